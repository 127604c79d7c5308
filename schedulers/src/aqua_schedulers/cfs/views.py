"""What a fair policy and an engine say to each other.

The engine tells events (arrived, admitted, preempted, removed) and shows itself before a step; the
policy answers with a `Decision`. Views are snapshots: the policy keeps those of requests outside
the batch, for which nothing changes until they are admitted, and asks for those inside only when a
slice ends. Blocks are the engine's unit of memory and the only one here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

UNBOUNDED_BLOCKS: Final = 2**62
"""More blocks than any store has."""


class PagingTier(StrEnum):
    """Where paged state goes now."""

    PEER = "peer"
    HOST = "host"
    NOWHERE = "nowhere"


class Eviction(StrEnum):
    """What becomes of a preempted context."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class RequestView(NamedTuple):
    """One request at the moment of the event or of the decision.

    Attributes:
        arrival_s: Orders requests, on any clock.
        output_tokens: Generated so far.
        computed_tokens: Inside the batch: tokens whose keys and values are in memory. Outside:
            tokens that come back by a load; 0 when everything is computed again.
        held_blocks: Inside: blocks that come free when it is preempted. Outside: 0.
        missing_blocks: Outside: free blocks that its admission takes, for the whole prompt or the
            context to load. Inside: 0.
        weight: Share under contention; 2.0 gets twice the tokens of 1.0.
        is_pinned: It cannot be preempted now: a copy or a token of it is in flight.
        saved_blocks: Of `held_blocks`, those that are in the page store already.
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
    saved_blocks: int = 0


class PagingRates(NamedTuple):
    """What paging and computing cost here, as measured.

    Attributes:
        link_bytes_per_s: To and from the page store, each way.
        prefill_tokens_per_s: Of prompts computed alone.
        copy_latency_s: Fixed cost of a copy, each way.
    """

    link_bytes_per_s: float
    block_bytes: int
    prefill_tokens_per_s: float
    copy_latency_s: float = 0.0

    def eviction(self, request: RequestView) -> Eviction:
        """The cheaper way to bring the request back: out and in over the link, or computed."""
        blocks = 2 * request.held_blocks - request.saved_blocks
        swap_s = blocks * self.block_bytes / self.link_bytes_per_s + 2 * self.copy_latency_s
        recompute_s = request.computed_tokens / self.prefill_tokens_per_s
        return Eviction.SWAP if swap_s <= recompute_s else Eviction.RECOMPUTE


class EngineView(NamedTuple):
    """The engine before a step.

    Attributes:
        free_blocks: Blocks that nobody holds.
        token_budget: Tokens of a step.
        max_running: Requests that may hold blocks at once.
        running_count: Requests that hold blocks, those still loading included.
        running: Their views, in any order; asked for at most once per decision.
        eviction_room_blocks: What the page store can still take.
        rates: Measured costs; None swaps wherever there is room.
    """

    free_blocks: int
    token_budget: int
    max_running: int
    running_count: int
    running: Callable[[], Sequence[RequestView]]
    eviction_room_blocks: int = UNBOUNDED_BLOCKS
    location: PagingTier = PagingTier.PEER
    rates: PagingRates | None = None


class Preemption(NamedTuple):
    """A request to take out of the batch now."""

    request_id: str
    eviction: Eviction


class Decision(NamedTuple):
    """What the engine does before its step.

    Attributes:
        preempt: Take these out now.
        admit: The only requests from outside that may be admitted until the next decision, in this
            order; the engine stops at the first that finds no blocks and may try again at every
            step. Resumed decodes come first: each takes one token, prompts share the rest.
    """

    preempt: tuple[Preemption, ...] = ()
    admit: tuple[str, ...] = ()


class FairPolicy(Protocol):
    """Decides who holds memory."""

    def added(self, request: RequestView) -> None:
        """A request arrived; it is outside."""
        ...

    def admitted(self, request_id: str) -> None:
        """A request from outside holds blocks now, running or still loading."""
        ...

    def preempted(self, request: RequestView) -> None:
        """A request left the batch, by our decision or by the engine's; the view is of after."""
        ...

    def removed(self, request_id: str) -> None:
        """A request finished or was aborted, inside or outside."""
        ...

    def begin_step(self) -> bool:
        """Called once per engine step; False: the last decision stands."""
        ...

    def decide(self, engine: EngineView) -> Decision:
        """Called when `begin_step` said True."""
        ...
