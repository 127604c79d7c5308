"""What a fair policy and an engine say to each other.

The engine tells events (arrived, admitted, preempted, removed) and shows itself before a step; the
policy answers with a `Decision`. Views are snapshots: the policy keeps those of waiting requests,
for which nothing changes until they are admitted, and asks for those of running ones only when a
time slice ends. A request is *running* while it holds blocks, loading ones included, and *waiting*
otherwise. Blocks are the engine's unit of memory and the only one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

UNBOUNDED_BLOCKS: Final = 2**62
"""Fixed: more blocks than any store has."""


class PagingTier(StrEnum):
    """The memory that preempted state is paged to now."""

    PEER = "peer"
    HOST = "host"
    NOWHERE = "nowhere"


class PreemptionMode(StrEnum):
    """What becomes of a preempted request's context, as vLLM calls the two."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class RequestView(NamedTuple):
    """One request at the moment of the event or of the decision.

    Attributes:
        arrival_s: Orders requests, on any clock.
        output_tokens: Generated so far.
        computed_tokens: Running: tokens whose keys and values are in memory. Waiting: tokens that
            come back by a load; 0 when everything is computed again.
        held_blocks: Running: blocks that come free when it is preempted. Waiting: 0.
        missing_blocks: Waiting: free blocks that its admission takes, for the whole prompt or the
            context to load. Running: 0.
        weight: Share under contention; 2.0 gets twice the tokens of 1.0.
        is_pinned: It cannot be preempted now: a copy or a token of it is in flight.
        tenant: Who it is served for; counts where policies share by tenants.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    computed_tokens: int = 0
    held_blocks: int = 0
    missing_blocks: int = 0
    weight: float = 1.0
    is_pinned: bool = False
    tenant: str = ""

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute until the next one is sampled."""
        return max(1, self.prompt_tokens + self.output_tokens - self.computed_tokens)


class PagingRates(NamedTuple):
    """What paging and computing cost here, as measured.

    Attributes:
        link_bytes_per_s: To and from the page store, each way.
        prefill_tokens_per_s: Of prompts computed alone.
    """

    link_bytes_per_s: float
    block_bytes: int
    prefill_tokens_per_s: float

    def cheaper_mode(self, request: RequestView, saved_blocks: int = 0) -> PreemptionMode:
        """The cheaper way to bring the request back: out and in over the link, or computed.

        `saved_blocks` of its blocks need not go out, because they are in the page store already.
        """
        blocks = 2 * request.held_blocks - saved_blocks
        swap_s = blocks * self.block_bytes / self.link_bytes_per_s
        recompute_s = request.computed_tokens / self.prefill_tokens_per_s
        return PreemptionMode.SWAP if swap_s <= recompute_s else PreemptionMode.RECOMPUTE


class EngineView(NamedTuple):
    """The engine before a step.

    Attributes:
        free_blocks: Blocks that no request holds.
        token_budget: Tokens of a step.
        max_running: Requests that may hold blocks at once.
        running_count: Requests that hold blocks, those still loading included.
        running: Their views, in any order; asked for at most once per decision.
        store_room_blocks: What the page store can still take.
        location: The tier that paged state goes to now.
        rates: Measured costs; None swaps wherever there is room.
        output_tokens: Output of each running request, by id, for policies that share by tenants;
            None takes it from `running`, which is then asked for it as well.
        saved_blocks: Of the blocks that a running request holds, by its id, those that are in the
            page store already; None says none. Asked of those that may leave alone.
    """

    free_blocks: int
    token_budget: int
    max_running: int
    running_count: int
    running: Callable[[], Sequence[RequestView]]
    store_room_blocks: int = UNBOUNDED_BLOCKS
    location: PagingTier = PagingTier.PEER
    rates: PagingRates | None = None
    output_tokens: Callable[[], Iterable[tuple[str, int]]] | None = None
    saved_blocks: Callable[[str], int] | None = None

    def preemption_modes(self, victims: Iterable[RequestView]) -> dict[str, PreemptionMode]:
        """What becomes of each victim; the store's room goes to the longest contexts."""
        room = self.store_room_blocks if self.location is not PagingTier.NOWHERE else 0
        modes: dict[str, PreemptionMode] = {}
        for request in sorted(victims, key=lambda each: -each.computed_tokens):
            saved = 0 if self.saved_blocks is None else self.saved_blocks(request.request_id)
            unsaved = request.held_blocks - saved
            mode = PreemptionMode.SWAP
            if unsaved > room:
                mode = PreemptionMode.RECOMPUTE
            elif self.rates is not None:
                mode = self.rates.cheaper_mode(request, saved)
            if mode is PreemptionMode.SWAP:
                room -= unsaved
            modes[request.request_id] = mode
        return modes


class Preemption(NamedTuple):
    """A request to take out of the batch now."""

    request_id: str
    mode: PreemptionMode


class Decision(NamedTuple):
    """What the engine does before its step.

    Attributes:
        preempt: Take these out now.
        admit: The only waiting requests that may be admitted until the next decision, in this
            order; the engine stops at the first that finds no blocks and may try again at every
            step. Resumed decodes come first: each takes one token, prompts share the rest.
    """

    preempt: tuple[Preemption, ...] = ()
    admit: tuple[str, ...] = ()
