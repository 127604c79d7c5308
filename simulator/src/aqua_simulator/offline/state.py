"""All that an offline engine is: columns by request and by node, and named counters.

Python owns the arrays and reads results from them; kernels change them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numba import types
from numba.experimental import structref

from aqua_schedulers.blendserve.prefix_cache import PrefixCache, empty_cache
from aqua_schedulers.compiled import record, records
from aqua_schedulers.linked_list import Links, empty_lists
from aqua_simulator.offline.workload import OfflineWorkload

NO_NODE: Final = -1
"""Fixed: the parent of a root."""

# Fixed: request states.
POOLED: Final = 0
PREFILLING: Final = 1
DECODING: Final = 2
DONE: Final = 3

USAGE_BINS: Final = 8192
"""Rows of the usage series; a longer run ends in one long last row. Doubled, the series takes 192
KiB more."""


@dataclass(slots=True)
class Counters:
    """Where an engine stands, and its sums over the run.

    Attributes:
        logical_kv_tokens: Contexts of decoding requests, a shared prefix counted once per request.
        held_tokens: Generated tokens in memory, beside the prompts' in the cache.
        used_tokens: Those and the prompts', but for cached prefixes that nothing uses.
        finished_count, retracted_count, admitted_count: Events of the present call.
        done_count, retraction_count: Over the run.
        shared_tokens: Prompt tokens found in memory at first admission.
        computed_tokens: Tokens that passed the linear layers.
        peak_resident_tokens: Highest occupation, cached prefixes included.
        is_stuck: 1 when nothing runs and nothing could be admitted.
        compute_s, memory_s: Sums over steps of compute-bound and of memory-bound operators.
    """

    capacity_tokens: int
    step: int = 0
    decoding_count: int = 0
    prefilling_count: int = 0
    pending_prefill_tokens: int = 0
    logical_kv_tokens: int = 0
    held_tokens: int = 0
    used_tokens: int = 0
    finished_count: int = 0
    retracted_count: int = 0
    admitted_count: int = 0
    done_count: int = 0
    retraction_count: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    peak_resident_tokens: int = 0
    is_stuck: int = 0
    now_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0


@dataclass(slots=True)
class Usage:
    """Sums over some steps: how many, and their times."""

    step_count: float
    compute_s: float
    memory_s: float


class EngineState(NamedTuple):
    """All of an engine; arrays are shared between Python and the kernel and changed in place.

    The kernel gets them as one `handle`: unpacking them all at every step took longer than the
    step itself.

    Attributes:
        prompt, output: Prompt and output tokens.
        leaf: Tree node at which the prompt ends.
        status: POOLED, PREFILLING, DECODING or DONE.
        generated: Tokens generated so far, as of the last retraction.
        left: Tokens still to prefill.
        position: Context already present when the next chunk starts.
        began: Step at which decoding began.
        was_retracted: Whether the request ever was, so that its cache hits are not counted.
        due: Lists of decoding requests by the step that they will finish in, modulo their number.
        admitted: Running requests in order of admission.
        prefilling: Prefilling requests, first admitted first.
        cache: The prefix tree, and what of it is in memory.
        finished, retracted: Events of the present call, counted in `counters`.
        finish_s: Virtual time at which each request ended.
        usage: Rows of so many steps each.
        counters: One record.
    """

    prompt: Int64[np.ndarray, " requests"]
    output: Int64[np.ndarray, " requests"]
    leaf: Int64[np.ndarray, " requests"]
    status: Int32[np.ndarray, " requests"]
    generated: Int64[np.ndarray, " requests"]
    left: Int64[np.ndarray, " requests"]
    position: Int64[np.ndarray, " requests"]
    began: Int64[np.ndarray, " requests"]
    was_retracted: Int32[np.ndarray, " requests"]
    due: Links
    admitted: Links
    prefilling: Links
    cache: PrefixCache
    finished: Int32[np.ndarray, " requests"]
    retracted: Int32[np.ndarray, " requests"]
    finish_s: Float64[np.ndarray, " requests"]
    usage: Sequence[Usage]
    counters: Sequence[Counters]


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


def fresh_state(workload: OfflineWorkload, capacity_tokens: int) -> EngineState:
    """An engine before its first step, with all requests pooled."""
    requests, tree = workload.request_count, workload.tree
    return EngineState(
        prompt=workload.prompt_tokens.astype(np.int64),
        output=workload.output_tokens.astype(np.int64),
        leaf=tree.inner_count + np.arange(requests, dtype=np.int64),
        status=np.full(requests, POOLED, np.int32),
        generated=np.zeros(requests, np.int64),
        left=np.zeros(requests, np.int64),
        position=np.zeros(requests, np.int64),
        began=np.zeros(requests, np.int64),
        was_retracted=np.zeros(requests, np.int32),
        due=empty_lists(requests, int(workload.output_tokens.max()) + 2),
        admitted=empty_lists(requests),
        prefilling=empty_lists(requests),
        cache=empty_cache(tree.parent, tree.edge_tokens),
        finished=np.zeros(requests, np.int32),
        retracted=np.zeros(requests, np.int32),
        finish_s=np.zeros(requests, np.float64),
        usage=records(Usage, USAGE_BINS),
        counters=record(Counters(capacity_tokens)),
    )
