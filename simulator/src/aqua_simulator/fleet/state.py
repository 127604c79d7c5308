"""What a simulated fleet is made of: engines and requests as records in flat arrays.

The compiled kernels of this package change them in place. A *slot* is a request that is inside an
engine, waiting or running; slots are used again, so that memory follows the requests of the moment
and not those of the day.

Free blocks queue up for reuse, least recently freed first, and remember their contents until then
(`serving.memory`). Here two counters are that queue: blocks ever given to it and ever taken. A
preempted request remembers where its own blocks were put in, so what is left of them is what the
count of taken blocks has not reached yet. A request that comes back takes its blocks as if all
before them had been taken too, which is exact while they are the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

if TYPE_CHECKING:
    from aqua_simulator.fleet.links import LoanRecord, PortRecord

NONE: Final = -1
"""Fixed: no slot, no engine."""

# Fixed: phases of a slot.
VACANT: Final = 0
WAITING: Final = 1
RUNNING: Final = 2


@dataclass(slots=True)
class EngineRecord:
    """One engine.

    Attributes:
        floor_s .. head_s: Its step times, as `whatif.step_times.StepLaw` names them.
        previous_end_s, end_s: When the last two planned steps end.
        extra_steps: Steps planned beyond the last one that slots know of: decodes alone, by the
            same `extra_count` requests, from `extra_start_s` on. `extra_context_tokens` is what
            the first of them reads, `extra_base_s` what each takes beside that, `extra_plan_s`
            when the first one was planned.
        given_blocks, taken_blocks: Ever put into and taken out of the queue of free blocks.
        finishing_count, left_count: Requests whose last token is planned and not delivered yet:
            running, and preempted since.
        first_prompt .. last_left: Ends of lists of waiting slots: prompts, decodes, and all in the
            order of leaving memory. First come, first served has all of them among the prompts.
        listed_count: Waiting slots that the policy's last decision admits.
        has_changed .. recompute_tokens: State of the fair policy (`aqua_schedulers.cfs.policy`).
        slowdown, shared_token_s: What copies cost its steps and, for each token, its collectives,
            at the moment (`fleet.links`).
        copied_tokens: Since the last look at loans.
        token_count, noted_tokens: Computed so far, and by the last look.
        peer_share: Of what its store holds, what is at peers.
        rate_peer, rate_host: Bytes per second of its links.
        lost_peer_s, lost_host_s: By how much a step is longer for each byte that the engine copies
            beside it, to peers and to the host; `store_lost_s` is the mean of the moment.
    """

    model: int
    is_fair: int
    max_tokens: int
    max_running: int
    block_count: int
    kv_bytes: int
    floor_s: float
    token_s: float
    power: float
    context_s: float
    chunk_context_s: float
    pair_s: float
    head_s: float
    previous_end_s: float
    end_s: float
    extra_steps: int
    extra_count: int
    extra_start_s: float
    extra_plan_s: float
    extra_base_s: float
    extra_context_tokens: int
    given_blocks: int
    taken_blocks: int
    running_count: int
    waiting_count: int
    finishing_count: int
    left_count: int
    first_prompt: int
    last_prompt: int
    first_decode: int
    last_decode: int
    first_left: int
    last_left: int
    listed_count: int
    has_changed: int
    elapsed_steps: int
    slice_index: int
    backlog_tokens: int
    token_budget: int
    recompute_tokens: float
    prefill_tokens_per_s: float
    has_store: int
    store_tokens: int
    store_used_tokens: int
    store_bytes_per_s: float
    copy_tokens: int
    busy_s: float
    step_count: int
    preemption_count: int
    is_producer: int
    slowdown: float
    shared_token_s: float
    copied_tokens: int
    token_count: int
    noted_tokens: int
    peer_share: float
    lent_blocks: int
    returning_count: int
    calm_since_s: float
    least_free_blocks: int
    has_peers: int
    static_bytes: float
    rate_peer: float
    rate_host: float
    lost_peer_s: float
    lost_host_s: float
    store_lost_s: float
    host_tokens: int


@dataclass(slots=True)
class SlotRecord:
    """A request inside an engine; attributes are those of `serving.request.Job`.

    Attributes:
        run_end, run_blocks: Where the blocks that it left behind end in the queue of free blocks.
        floor_output, floor_computed: How far it had got when it was last preempted.
        left_slice: Time slice in which it began to wait.
        before, after: Neighbours in its list of waiting slots; `left_before`, `left_after` in the
            order of leaving memory.
        mark: Of the decision that keeps it or lets it in.
    """

    phase: int
    engine: int
    request: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    emitted_tokens: int
    block_count: int
    paged_tokens: int
    run_end: int
    run_blocks: int
    floor_output: int
    floor_computed: int
    left_slice: int
    before: int
    after: int
    left_before: int
    left_after: int
    mark: int
    arrival_s: float
    first_s: float
    last_s: float


@dataclass(slots=True)
class ClockRecord:
    """The clock that all engines share, and totals.

    Attributes:
        span_s: The day's length; loans are counted to its end.
        looked_s: When loans were last looked at.
        next_request: Index of the next arrival.
        first_vacant: Head of the list of vacant slots.
        mark: Of the last decision.
        has_contention: Whether copies, collectives and kernels cost each other anything.
    """

    span_s: float
    reserve_share: float
    has_contention: int
    looked_s: float
    next_request: int
    first_vacant: int
    mark: int
    offered_gb_s: float
    used_gb_s: float
    reclaim_count: int
    reclaim_s: float


class FleetState(NamedTuple):
    """Everything that the kernels see.

    Attributes:
        ports, loans: Links to peers (`fleet.links`); the first ports are the engines'.
        running: Slots in order of admission, by engine.
        listed: Slots that may be admitted, in order, by engine.
        returning_s, returning_blocks: Reclaimed memory that is on its way back, by engine.
        event_s, heap, place: Next event of each engine, a heap of engines by it, places in it.
        request_count: Requests inside, by engine.
        router: Engines of each model in the order of their names, one model after the other;
            `router_start` says where each begins.
        tokens_of: What each running request gets in the step that is planned.
        ttft_s, tpot_s: What users saw; NaN where there is no such time.
    """

    clock: Sequence[ClockRecord]
    engines: Sequence[EngineRecord]
    slots: Sequence[SlotRecord]
    ports: Sequence[PortRecord]
    loans: Sequence[LoanRecord]
    running: Int32[np.ndarray, "engines places"]
    listed: Int32[np.ndarray, "engines places"]
    returning_s: Float64[np.ndarray, "engines places"]
    returning_blocks: Int64[np.ndarray, "engines places"]
    event_s: Float64[np.ndarray, " engines"]
    heap: Int64[np.ndarray, " engines"]
    place: Int32[np.ndarray, " engines"]
    request_count: Int32[np.ndarray, " engines"]
    tokens_of: Int32[np.ndarray, " places"]
    router: Int64[np.ndarray, " engines"]
    router_start: Int64[np.ndarray, " models"]
    arrival_s: Float64[np.ndarray, " requests"]
    prompt_tokens: Int32[np.ndarray, " requests"]
    output_tokens: Int32[np.ndarray, " requests"]
    model: Int32[np.ndarray, " requests"]
    ttft_s: Float32[np.ndarray, " requests"]
    tpot_s: Float32[np.ndarray, " requests"]
    is_served: Bool[np.ndarray, " requests"]
    unserved_count: Int64[np.ndarray, " models"]
