"""The class of a request where an engine co-serves: online, or offline.

The scheduler sees a request's class in `aqua_class` among its `vllm_xargs`; where that says nothing
(or anything but the two), in its `priority`: what is less urgent than 0 is offline. Which sign that
is, an option says (`priority`). What an HTTP client says otherwise, the middleware (`admin_api`)
writes into `vllm_xargs`: the header `x-aqua-class`, which a gateway may set, before the body's own
word, and that before OpenAI's `service_tier`, of which `flex` is offline and `priority` online.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aqua_protocol.errors import RequestInvalidError
from aqua_schedulers.conserve import ServiceClass
from aqualib.engines.vllm.requests.body import Choose
from aqualib.engines.vllm.requests.priority import UrgentPriority

XARG: Final = "aqua_class"
"""Among a request's `vllm_xargs`; fixed, as part of the interface."""

HEADER: Final = "x-aqua-class"
"""Likewise."""

TIERS: Final = {"flex": ServiceClass.OFFLINE, "priority": ServiceClass.ONLINE}
"""What OpenAI's `service_tier` says of a class; its other values say nothing."""


def service_class_of(request: Any, urgent: UrgentPriority) -> ServiceClass:
    """The class of a request of vLLM's, as its scheduler sees it."""
    # Pooling requests have no sampling parameters.
    extra = getattr(request.sampling_params, "extra_args", None)
    claimed = extra.get(XARG) if extra else None
    if isinstance(claimed, str) and claimed in set(ServiceClass):
        return ServiceClass(claimed)
    urgency = request.priority if urgent is UrgentPriority.HIGHER else -request.priority
    return ServiceClass.OFFLINE if urgency < 0 else ServiceClass.ONLINE


def class_choice(header: str) -> Choose:
    """What says how a request is served, given what its body claims.

    Args:
        header: Of `HEADER`; empty if there is none.

    Raises:
        RequestInvalidError: The header names no class.
    """
    if header and header not in set(ServiceClass):
        raise RequestInvalidError(
            f"{HEADER}: {header!r} is no class", remedy=f"Send one of: {', '.join(ServiceClass)}."
        )

    def choose(content: Mapping[str, Any], claimed: object) -> object:
        return header or claimed or TIERS.get(str(content.get("service_tier")))

    return choose
