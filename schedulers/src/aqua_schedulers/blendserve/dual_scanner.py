"""The two ends of a blended order, and the books of what was taken from which.

What it owns: which request comes next from the left (compute-bound) and from the right
(memory-bound) end, which were handed back and must be offered again, and how much memory each end
has reserved for what runs. Promises: a request is pooled, running from one end, or done; it is
offered once, and once more for every time the runtime refuses or retracts it.

Flat arrays and compiled functions: both policies ask these questions at every engine step.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqua_schedulers.blendserve.order import BlendOrder
from aqua_schedulers.compiled import compiled

Int8s = NDArray[np.int8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

NONE: Final = -1

# Where a request is.
POOLED: Final = 0
LEFT: Final = 1
RIGHT: Final = 2
DONE: Final = 3

# Slots of `DualScanner.cursor`.
FRONT: Final = 0
BACK: Final = 1
LEFT_RETRIES: Final = 2
RIGHT_RETRIES: Final = 3
LEFT_RESERVED: Final = 4
RIGHT_RESERVED: Final = 5
LEFT_COUNT: Final = 6
RIGHT_COUNT: Final = 7
DONE_COUNT: Final = 8
CURSOR_SLOTS: Final = 9


class DualScanner(NamedTuple):
    """Arrays are changed in place.

    Attributes:
        order: Requests from compute-bound to memory-bound, shape (num_requests,).
        unit_of: Unit of each place in `order`.
        unit_density: Compute density of each unit.
        where: POOLED, LEFT, RIGHT or DONE of each request.
        stacked: Whether a request is on one of the stacks below.
        reserved: KV tokens that each request is expected to hold at its peak.
        left_retry, right_retry: Stacks of requests that were handed back.
        cursor: The slots above. FRONT and BACK are the next places; all between are untouched,
            but for single requests that were taken out of turn (`where` tells).
    """

    order: Int32s
    unit_of: Int32s
    unit_density: Floats
    where: Int8s
    stacked: Int8s
    reserved: Int64s
    left_retry: Int32s
    right_retry: Int32s
    cursor: Int64s


def open_scanner(order: BlendOrder, reserved: Int64s) -> DualScanner:
    """Both ends of an untouched order."""
    count = len(order.requests)
    cursor = np.zeros(CURSOR_SLOTS, np.int64)
    cursor[BACK] = count - 1
    return DualScanner(
        order.requests.astype(np.int32),
        order.unit_of.astype(np.int32),
        order.unit_density,
        np.zeros(count, np.int8),
        np.zeros(count, np.int8),
        reserved.astype(np.int64),
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        cursor,
    )


@compiled
def _drop_retry(ends: DualScanner, end: int) -> None:
    """Take the top off a stack.

    It may be running again: what was taken out of turn and handed back lies both on a stack and
    in the untouched part of the order, and either may offer it.
    """
    if end == LEFT:
        ends.cursor[LEFT_RETRIES] -= 1
        ends.stacked[ends.left_retry[ends.cursor[LEFT_RETRIES]]] = 0
    else:
        ends.cursor[RIGHT_RETRIES] -= 1
        ends.stacked[ends.right_retry[ends.cursor[RIGHT_RETRIES]]] = 0


@compiled
def next_left(ends: DualScanner) -> int:
    """The left end's next request, or NONE."""
    cursor = ends.cursor
    while cursor[LEFT_RETRIES] > 0:
        request = ends.left_retry[cursor[LEFT_RETRIES] - 1]
        if ends.where[request] == POOLED:
            return int(request)
        _drop_retry(ends, LEFT)
    while cursor[FRONT] <= cursor[BACK]:
        request = ends.order[cursor[FRONT]]
        if ends.where[request] == POOLED:
            return int(request)
        cursor[FRONT] += 1
    return NONE


@compiled
def next_right(ends: DualScanner) -> int:
    """The right end's next request, or NONE."""
    cursor = ends.cursor
    while cursor[RIGHT_RETRIES] > 0:
        request = ends.right_retry[cursor[RIGHT_RETRIES] - 1]
        if ends.where[request] == POOLED:
            return int(request)
        _drop_retry(ends, RIGHT)
    while cursor[FRONT] <= cursor[BACK]:
        request = ends.order[cursor[BACK]]
        if ends.where[request] == POOLED:
            return int(request)
        cursor[BACK] -= 1
    return NONE


@compiled
def take(ends: DualScanner, request: int, end: int) -> None:
    """Move a pooled request to the running ones of `end`."""
    cursor = ends.cursor
    if end == LEFT:
        if cursor[LEFT_RETRIES] > 0 and ends.left_retry[cursor[LEFT_RETRIES] - 1] == request:
            _drop_retry(ends, LEFT)
        cursor[LEFT_RESERVED] += ends.reserved[request]
        cursor[LEFT_COUNT] += 1
    else:
        if cursor[RIGHT_RETRIES] > 0 and ends.right_retry[cursor[RIGHT_RETRIES] - 1] == request:
            _drop_retry(ends, RIGHT)
        cursor[RIGHT_RESERVED] += ends.reserved[request]
        cursor[RIGHT_COUNT] += 1
    ends.where[request] = end


@compiled
def _leave(ends: DualScanner, request: int) -> int:
    end = ends.where[request]
    if end == LEFT:
        ends.cursor[LEFT_RESERVED] -= ends.reserved[request]
        ends.cursor[LEFT_COUNT] -= 1
    elif end == RIGHT:
        ends.cursor[RIGHT_RESERVED] -= ends.reserved[request]
        ends.cursor[RIGHT_COUNT] -= 1
    return int(end)


@compiled
def settle(ends: DualScanner, finished: Int32s, returned: Int32s) -> None:
    """Book what ended and what the runtime handed back.

    Handed-back requests go on a stack that is offered first, the last of `returned` lowest: they
    were next in turn, and those that were thrown out have work to save.
    """
    for request in finished:
        _leave(ends, request)
        ends.where[request] = DONE
        ends.cursor[DONE_COUNT] += 1
    for index in range(len(returned) - 1, -1, -1):
        request = returned[index]
        end = _leave(ends, request)
        ends.where[request] = POOLED
        if ends.stacked[request] == 1:
            continue
        ends.stacked[request] = 1
        if end == LEFT:
            ends.left_retry[ends.cursor[LEFT_RETRIES]] = request
            ends.cursor[LEFT_RETRIES] += 1
        elif end == RIGHT:
            ends.right_retry[ends.cursor[RIGHT_RETRIES]] = request
            ends.cursor[RIGHT_RETRIES] += 1


@compiled
def left_density(ends: DualScanner) -> float:
    """Compute density of the unit where the left end stands; of the last when all is taken."""
    place = min(ends.cursor[FRONT], len(ends.order) - 1)
    return float(ends.unit_density[ends.unit_of[place]])


@compiled
def right_density(ends: DualScanner) -> float:
    """Compute density of the unit where the right end stands; of the first when all is taken."""
    place = max(ends.cursor[BACK], 0)
    return float(ends.unit_density[ends.unit_of[place]])
