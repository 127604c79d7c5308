"""One time slice in the making: which requests hold memory in it.

Memory and running slots are given out one request after another, in the order that the policy asks
for. Each request counts with the blocks that it will have grown to at the slice's end, so what a
slice holds fits until it is over. A running request that gets no memory is to be preempted; that
costs nothing here and is the policy's decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from aqua_schedulers.cfs.views import RequestView
from aqua_schedulers.cfs.waiting_queue import RankedRequest


class Candidates:
    """Running and waiting requests of one phase, merged by the keys of their `Ranking`.

    `running` ones may be preempted, in any order; `waiting` ones admitted, in order.

    Attributes:
        in_order: All, each with whether it is running; `TimeSlice.fill` moves this iterator on.
        admits: False ends the waiting ones; those running go on.
    """

    def __init__(self, running: list[RankedRequest], waiting: Sequence[RankedRequest]) -> None:
        self.admits = True
        self.in_order = self._merge(running, waiting)

    def _merge(
        self, running: list[RankedRequest], waiting: Sequence[RankedRequest]
    ) -> Iterator[tuple[RequestView, bool]]:
        running.sort(reverse=True)
        for outer in waiting:
            while running and running[-1] < outer:
                yield running.pop()[4], True
            yield outer[4], False
            if not self.admits:
                break
        while running:
            yield running.pop()[4], True


class TimeSlice:
    """Gives out memory and running slots for one slice.

    Args:
        free_blocks: Blocks to give out, those of preemptible requests included.
        free_slots: Requests that may hold them.
        block_tokens: Tokens of a block.
        horizon_steps: Tokens that each decode will take.
        is_engine_empty: Whether no request holds memory for certain.

    Attributes:
        kept: Running requests that stay.
        admitted: Waiting requests that come in, by id, in order.
    """

    def __init__(
        self,
        free_blocks: int,
        free_slots: int,
        *,
        block_tokens: int,
        horizon_steps: int,
        is_engine_empty: bool,
    ) -> None:
        self._free_blocks = free_blocks
        self._free_slots = free_slots
        self._block_tokens = block_tokens
        self._horizon_steps = horizon_steps
        self._is_engine_empty = is_engine_empty
        self._is_closed = False
        self.kept: set[str] = set()
        self.admitted: dict[str, RequestView] = {}

    def hold(self, request: RequestView) -> None:
        """A running request that cannot be preempted takes what it grows by, and keeps its slot."""
        self._free_blocks -= self._growth(request)

    def keep(self, request: RequestView) -> bool:
        """Let a running request stay; False if there is no memory for it."""
        # Before its growth is reckoned: once memory has run out, most of a slice's end is this.
        if request.held_blocks > self._free_blocks:
            return False
        if not self._take(request.held_blocks + self._growth(request)):
            return False
        self.kept.add(request.request_id)
        return True

    def admit(self, request: RequestView) -> bool:
        """Let a waiting request in; False if there is no memory for it."""
        growth = self._growth(request)
        if self._is_engine_empty:
            # Alone it may take everything; what it lacks to grow, no other request has.
            growth = max(0, min(growth, self._free_blocks - request.missing_blocks))
        if self._is_closed or not self._take(request.missing_blocks + growth):
            return False
        self.admitted[request.request_id] = request
        return True

    def admit_overdue(self, requests: Iterable[RequestView]) -> None:
        """Admit these before all others: when one finds no memory, none comes in after it."""
        self._is_closed = not all(map(self.admit, requests))

    def fill(self, candidates: Candidates, max_tokens: float = inf) -> None:
        """Keep or admit candidates until their pending tokens reach the limit, or memory ends.

        Once a waiting request finds no memory, none behind it is admitted: small requests would
        keep a large one out for ever. Running ones may still stay. A second call goes on where the
        first one ended.
        """
        if max_tokens <= 0:
            return
        for request, is_running in candidates.in_order:
            if is_running:
                fits = self.keep(request)
            elif request.request_id in self.admitted:
                continue
            else:
                fits = candidates.admits = self.admit(request)
            if fits:
                max_tokens -= max(1, request.prompt_tokens - request.computed_tokens)
                if max_tokens <= 0:
                    return

    def in_order(self) -> tuple[str, ...]:
        """The admitted requests as the engine takes them: decodes before prompts."""
        decodes = [name for name, each in self.admitted.items() if each.output_tokens]
        prompts = [name for name, each in self.admitted.items() if not each.output_tokens]
        return (*decodes, *prompts)

    def _take(self, blocks: int) -> bool:
        if blocks > self._free_blocks or self._free_slots < 1:
            return False
        self._free_blocks -= blocks
        self._free_slots -= 1
        self._is_engine_empty = False
        return True

    def _growth(self, request: RequestView) -> int:
        """Blocks that a request takes beside those held or missing until the slice's end."""
        size = self._block_tokens
        known = request.prompt_tokens + request.output_tokens
        has = known if request.missing_blocks else request.computed_tokens
        return max(0, -(-(known + self._horizon_steps) // size) - -(-has // size))
