"""Who a member is, from what the settings say and what the machine shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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
        ConfigError: The topology file is wrong, or does not list the GPU.
    """
    from aqualib.topology import TOPOLOGY_FILE_VARIABLE, place

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
