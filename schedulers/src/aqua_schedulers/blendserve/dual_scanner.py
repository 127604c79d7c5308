"""The dual scanner: both ends of a blended order, and what was taken from which.

What it owns: which request comes next from the left (compute-bound) and from the right
(memory-bound) end, which were handed back and must be offered again, and how much memory each end
has reserved for what runs. Promises: a request is pooled, running from one end, or done; it is
offered once, and once more for every time the runtime refuses or retracts it.

Flat arrays and compiled functions: both policies ask these questions at every engine step.

Source: BlendServe section 3.4, "Dual scanner".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float64, Int8, Int32, Int64

from aqua_schedulers.blendserve.order import BlendOrder
from aqua_schedulers.compiled import compiled, compiled_part, records, variable

NONE: Final = -1
"""Fixed: no request has a negative index."""

MAX_ADMITTED: Final = 4096
"""Requests that one step may admit; a bound for the buffer, far above any step's need. Doubled, the
buffer takes 16 KiB more."""

# Fixed: where a request is, running from one of the two ends, or neither. The ends are indices too.
LEFT: Final = variable(0)
RIGHT: Final = variable(1)
POOLED: Final = 2
DONE: Final = 3


@dataclass(slots=True)
class End:
    """One end of the order.

    Attributes:
        place: The next place; all between the two ends' places are untouched, but for single
            requests that were taken out of turn (`DualScanner.status` tells).
        retry_count: Height of the stack of requests that were handed back.
        reserved_tokens: KV tokens of the end's running requests at their expected peaks.
        running_count: Requests that run.
    """

    place: int
    retry_count: int
    reserved_tokens: int
    running_count: int


class DualScanner(NamedTuple):
    """Arrays are changed in place.

    Attributes:
        order: Requests from compute-bound to memory-bound.
        unit_of: Unit of each place in `order`.
        unit_density: Compute density of each unit.
        status: LEFT, RIGHT, POOLED or DONE of each request.
        is_stacked: Whether a request is on one of the stacks below.
        reserved: KV tokens that each request is expected to hold at its peak.
        retries: For each end a stack of requests that were handed back.
        ends: The left and the right end.
    """

    order: Int32[np.ndarray, " requests"]
    unit_of: Int32[np.ndarray, " requests"]
    unit_density: Float64[np.ndarray, " units"]
    status: Int8[np.ndarray, " requests"]
    is_stacked: Int8[np.ndarray, " requests"]
    reserved: Int64[np.ndarray, " requests"]
    retries: Int32[np.ndarray, "2 requests"]
    ends: Sequence[End]


def open_scanner(order: BlendOrder, reserved: Int64[np.ndarray, " requests"]) -> DualScanner:
    """Both ends of an untouched order."""
    count = len(order.requests)
    ends = records(End, 2)
    ends[RIGHT].place = count - 1
    return DualScanner(
        order.requests.astype(np.int32),
        order.unit_of.astype(np.int32),
        order.unit_density,
        np.full(count, POOLED, np.int8),
        np.zeros(count, np.int8),
        reserved.astype(np.int64),
        np.zeros((2, count), np.int32),
        ends,
    )


@compiled_part
def _drop_retry(scanner: DualScanner, side: int) -> None:
    """Take the top off a stack.

    It may be running again: what was taken out of turn and handed back lies both on a stack and
    in the untouched part of the order, and either may offer it.
    """
    end = scanner.ends[side]
    end.retry_count -= 1
    scanner.is_stacked[scanner.retries[side, end.retry_count]] = 0


@compiled
def next_request(scanner: DualScanner, side: int) -> int:
    """The next request of one end, or NONE."""
    end, left, right = scanner.ends[side], scanner.ends[LEFT], scanner.ends[RIGHT]
    while end.retry_count > 0:
        request = scanner.retries[side, end.retry_count - 1]
        if scanner.status[request] == POOLED:
            return int(request)
        _drop_retry(scanner, side)
    inwards = 1 if side == LEFT else -1
    while left.place <= right.place:
        request = scanner.order[end.place]
        if scanner.status[request] == POOLED:
            return int(request)
        end.place += inwards
    return NONE


@compiled
def take(scanner: DualScanner, request: int, side: int) -> None:
    """Move a pooled request to the running ones of one end."""
    end = scanner.ends[side]
    if end.retry_count > 0 and scanner.retries[side, end.retry_count - 1] == request:
        _drop_retry(scanner, side)
    end.reserved_tokens += scanner.reserved[request]
    end.running_count += 1
    scanner.status[request] = side


@compiled_part
def _leave(scanner: DualScanner, request: int) -> int:
    """Take a request out of its end's running ones; returns the end."""
    side = int(scanner.status[request])
    assert side <= RIGHT  # it runs
    end = scanner.ends[side]
    end.reserved_tokens -= scanner.reserved[request]
    end.running_count -= 1
    return side


@compiled
def settle(
    scanner: DualScanner,
    finished: Int32[np.ndarray, " finished"],
    returned: Int32[np.ndarray, " returned"],
) -> None:
    """Book what ended and what the runtime handed back.

    Handed-back requests go on a stack that is offered first, the last of `returned` lowest: they
    were next in turn, and those that were thrown out have work to save.
    """
    for request in finished:
        _leave(scanner, request)
        scanner.status[request] = DONE
    for index in range(len(returned) - 1, -1, -1):
        request = returned[index]
        side = _leave(scanner, request)
        scanner.status[request] = POOLED
        if scanner.is_stacked[request] == 1:
            continue
        scanner.is_stacked[request] = 1
        end = scanner.ends[side]
        scanner.retries[side, end.retry_count] = request
        end.retry_count += 1


@compiled_part
def density_at(scanner: DualScanner, side: int) -> float:
    """Compute density of the unit where an end stands; of the last unit when all is taken."""
    place = min(max(scanner.ends[side].place, 0), len(scanner.order) - 1)
    return float(scanner.unit_density[scanner.unit_of[place]])
