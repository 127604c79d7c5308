"""All that an offline engine is: flat arrays, counters by slot, and the handle kernels take.

Python owns the arrays and reads results from them; kernels change them in place. Which slot counts
what is said here once, for both sides.
"""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import numpy as np
from numba import types
from numba.experimental import structref
from numpy.typing import NDArray

from aqua_schedulers.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

NONE: Final = -1

# Request states.
POOLED: Final = 0
PREFILLING: Final = 1
DECODING: Final = 2
DONE: Final = 3

# Slots of `EngineState.number`.
STEP: Final = 0
DECODING_COUNT: Final = 1
PREFILLING_COUNT: Final = 2
PENDING_PREFILL: Final = 3
LOGICAL_KV: Final = 4
RESIDENT: Final = 5
EVICTABLE: Final = 6
CAPACITY: Final = 7
LATEST: Final = 8
CACHE_OLDEST: Final = 9
CACHE_NEWEST: Final = 10
PREFILL_HEAD: Final = 11
PREFILL_TAIL: Final = 12
FINISHED_COUNT: Final = 13
RETRACTED_COUNT: Final = 14
ADMITTED_COUNT: Final = 15
DONE_COUNT: Final = 16
RETRACTIONS: Final = 17
SHARED: Final = 18
COMPUTED: Final = 19
PEAK_RESIDENT: Final = 20
COUNT_SLOTS: Final = 21

# Slots of `EngineState.time`.
NOW: Final = 0
COMPUTE: Final = 1
MEMORY: Final = 2
TIME_SLOTS: Final = 3

# Columns of `EngineState.usage`.
USAGE_STEPS: Final = 0
USAGE_COMPUTE: Final = 1
USAGE_MEMORY: Final = 2
USAGE_SECONDS: Final = 3
USAGE_RESIDENT: Final = 4
USAGE_COLUMNS: Final = 5


class EngineState(NamedTuple):
    """All of an engine; arrays are shared between Python and the kernel and changed in place.

    The kernel gets them as one `handle`: unpacking them all at every step took longer than the
    step itself.

    Attributes:
        prompt: Prompt tokens per request.
        output: Output tokens per request.
        leaf: Tree node per request.
        status: POOLED, PREFILLING, DECODING or DONE per request.
        generated: Tokens generated so far, as of the last retraction.
        left: Tokens still to prefill per request.
        position: Context already present when the next chunk starts, per request.
        began: Step at which decoding began, per request.
        was_retracted: Whether the request ever was, so that its cache hits are not counted.
        ring_head: First request that finishes at a step, by step modulo the ring's length.
        ring_next, ring_prev: Lists of the ring.
        admitted_prev, admitted_next: Running requests in order of admission.
        prefill_next, prefill_prev: Prefilling requests, first admitted first.
        parent, tokens: The prefix tree.
        users: Running requests that use each node.
        present: Whether a node's tokens are in memory.
        cache_prev, cache_next: Present nodes without users, oldest first.
        finished, retracted: Events of the present call, counted in `number`.
        finish_s: Virtual time at which each request ended.
        usage: Sums over `usage_stride` steps each, shape (bins, USAGE_COLUMNS).
        number, time: The slots above.
    """

    prompt: Int64s
    output: Int64s
    leaf: Int64s
    status: Int32s
    generated: Int64s
    left: Int64s
    position: Int64s
    began: Int64s
    was_retracted: Int32s
    ring_head: Int32s
    ring_next: Int32s
    ring_prev: Int32s
    admitted_prev: Int32s
    admitted_next: Int32s
    prefill_next: Int32s
    prefill_prev: Int32s
    parent: Int64s
    tokens: Int64s
    users: Int32s
    present: Int32s
    cache_prev: Int32s
    cache_next: Int32s
    finished: Int32s
    retracted: Int32s
    finish_s: Floats
    usage: Floats
    number: Int64s
    time: Floats


@structref.register
class _HandleType(types.StructRef):
    """Numba's side of a handle."""


class _Handle(structref.StructRefProxy):
    """One reference to all arrays of a state; kernels read them by the same names."""


structref.define_proxy(  # type: ignore[no-untyped-call]  # numba has no types
    _Handle, _HandleType, list(EngineState._fields)
)


def handle(state: EngineState) -> EngineState:
    """The state as the kernel takes it; only kernels may read its fields."""
    return cast("EngineState", _Handle(*state))  # type: ignore[no-untyped-call]  # numba has no types


class Counters(NamedTuple):
    """What `advance` tells: the view's numbers, how many events there are, and what is left."""

    step_index: int
    decoding_count: int
    prefilling_count: int
    pending_prefill_tokens: int
    logical_kv_tokens: int
    physical_kv_tokens: int
    now_s: float
    finished_count: int
    retracted_count: int
    admitted_count: int
    done_count: int
    is_stuck: bool


@compiled
def counters(state: EngineState, is_stuck: bool) -> Counters:  # noqa: FBT001 - by position
    """Read the counters out, at the end of a call."""
    count = state.number
    return Counters(
        count[STEP],
        count[DECODING_COUNT],
        count[PREFILLING_COUNT],
        count[PENDING_PREFILL],
        count[LOGICAL_KV],
        count[RESIDENT] - count[EVICTABLE],
        state.time[NOW],
        count[FINISHED_COUNT],
        count[RETRACTED_COUNT],
        count[ADMITTED_COUNT],
        count[DONE_COUNT],
        is_stuck,
    )
