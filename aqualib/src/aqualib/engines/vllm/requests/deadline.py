"""The deadline of an offline request: within how many seconds its sender wants the answer.

The scheduler sees it in `aqua_finish_in_s` among the request's `vllm_xargs`, and counts from when
it got the request. The middleware (`admin_api`) writes the header `x-aqua-finish-in` there, which a
gateway may set and which counts before the body's own word, and refuses either where it is no such
number. Without the middleware that is no deadline: a scheduler cannot refuse a request.

Online requests have none. What the policy makes of one, `aqua_schedulers.conserve.offline_queue`
says; it is no promise.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from aqua_protocol.errors import RequestInvalidError
from aqualib.engines.vllm.requests.body import Choose

XARG: Final = "aqua_finish_in_s"
"""Among a request's `vllm_xargs`; fixed, as part of the interface."""

HEADER: Final = "x-aqua-finish-in"
"""Likewise; in seconds, too."""

MAX_FINISH_IN_S: Final = 28 * 24 * 3600.0
"""Seconds: far longer than batches are given, and far less than a date in seconds, which is refused
so. Doubled, fewer senders that mean another unit are told so."""


def finish_in_s_of(request: Any) -> float:
    """Seconds within which a request of vLLM's is wanted; infinity where it has no deadline."""
    # Pooling requests have no sampling parameters.
    extra = getattr(request.sampling_params, "extra_args", None)
    seconds = _seconds(extra.get(XARG)) if extra else None
    return inf if seconds is None else seconds


def deadline_choice(header: str) -> Choose:
    """What says when a request is wanted, given what its body claims.

    Args:
        header: Of `HEADER`; empty if there is none.

    Raises:
        RequestInvalidError: The header is no number of seconds; what is returned raises it for a
            claim that is none.
    """
    told = _required(HEADER, _number(header)) if header else None

    def choose(content: Mapping[str, Any], claimed: object) -> float | None:
        del content
        if told is None and claimed is not None:
            return _required(XARG, claimed)
        return told

    return choose


def _number(header: str) -> object:
    try:
        return float(header)
    except ValueError:
        return header


def _required(where: str, given: object) -> float:
    seconds = _seconds(given)
    if seconds is None:
        raise RequestInvalidError(
            f"{where}: {reprlib.repr(given)} is no deadline",
            remedy="Send a number of seconds from now on, more than 0 and "
            f"{MAX_FINISH_IN_S:.0f} at most.",
        )
    return seconds


def _seconds(given: object) -> float | None:
    # Python counts JSON's true as 1.
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return float(given) if 0 < given <= MAX_FINISH_IN_S else None
