"""Who a member is, from what the settings say and what the machine shows."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from aqua_protocol import ConfigError
from aqua_protocol.ids import MAX_NAME_LENGTH, NAME_PATTERN
from aqualib.reporter import Identity

if TYPE_CHECKING:
    import torch

    from aqualib.settings import Settings


def find_identity(settings: Settings, device: torch.device, model: str | None = None) -> Identity:
    """The identity of this process; settings win over what is found out.

    Args:
        settings: May name the node, the domain and the GPU.
        device: Where the member's slabs are.
        model: What runs here, for people.

    Raises:
        ConfigError: The topology file is wrong, or does not list the GPU; or `model` is no name.
    """
    from aqualib.topology import TOPOLOGY_FILE_VARIABLE, place

    if model is not None:
        require_name("model", model)
    if settings.node and settings.domain and settings.gpu_uuid:
        return Identity(settings.node, settings.domain, settings.gpu_uuid, model)
    # Without a topology file an emulated GPU has the name that the settings give it.
    listed = settings.gpu_uuid if os.environ.get(TOPOLOGY_FILE_VARIABLE) else None
    here = place(device, gpu_uuid=listed)
    return Identity(
        node=settings.node or here.node,
        domain=settings.domain or here.domain,
        gpu_uuid=settings.gpu_uuid or here.gpu_uuid,
        model=model,
    )


def require_name(what: str, name: str) -> str:
    """`name`, if the books can hold it: refused here, not by the thread that reports it later.

    Args:
        what: Whose name it is, for the message.
        name: Such as `llm-0.node-3`.

    Raises:
        ConfigError: It is empty, too long, or has other characters, such as a slash.
    """
    if len(name) > MAX_NAME_LENGTH or re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"{what} {name!r} is not a name",
            remedy=f"Use up to {MAX_NAME_LENGTH} letters, digits and inner '. _ : -', "
            "for example 'Llama-3-8B'.",
        )
    return name
