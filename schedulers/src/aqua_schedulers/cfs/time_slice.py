"""One time slice in the making: which requests hold memory in it.

Memory and running slots are given out one request after another, in the order that the policy asks
for. Each request counts with the blocks that it will have grown to at the slice's end, so what a
slice holds fits until it is over. A running request that gets no memory is to be preempted; that
costs nothing here and is the policy's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import merge
from math import inf
from operator import itemgetter
from typing import Final

from aqua_schedulers.cfs.views import Decision, Preemption, PreemptionMode, RequestView
from aqua_schedulers.cfs.waiting_queue import HeapScan, RankedRequest

Growth = Callable[[RequestView], int]
"""Blocks that a request takes until the slice's end, beside those it holds or misses."""


class Candidates:
    """Running and waiting requests of one phase, merged in the ranking's order.

    Args:
        running: Those that may be preempted.
        waiting: Those that may be admitted.
        keeps_equals: Whether running ones go before waiting ones of the same key, or all by
            arrival.

    Attributes:
        waiting: As above.
        running_ids: Which of them are running.
        in_order: An iterator over all of them, that each `TimeSlice.fill` moves on.
    """

    def __init__(
        self, running: Iterable[RankedRequest], waiting: HeapScan, *, keeps_equals: bool
    ) -> None:
        ranked = sorted(running)
        self.waiting: Final = waiting
        self.running_ids: Final = {request.request_id for _, _, _, request in ranked}
        # Of equal keys, `merge` takes those of its first argument first.
        self.in_order: Final = merge(ranked, waiting, key=itemgetter(0) if keeps_equals else None)


class TimeSlice:
    """Gives out memory and running slots for one slice.

    Args:
        free_blocks: Blocks to give out, those of preemptible requests included.
        free_slots: Requests that may hold them.
        growth: What each will take beside.
        is_engine_empty: Whether no request holds memory for certain.

    Attributes:
        kept: Running requests that stay.
        admitted: Waiting requests that come in, by id, in order.
    """

    def __init__(
        self, free_blocks: int, free_slots: int, growth: Growth, *, is_engine_empty: bool
    ) -> None:
        self._free_blocks = free_blocks
        self._free_slots = free_slots
        self._growth = growth
        self._is_engine_empty = is_engine_empty
        self._is_closed = False
        self.kept: set[str] = set()
        self.admitted: dict[str, RequestView] = {}

    def keep(self, request: RequestView) -> bool:
        """Let a running request stay; False if there is no memory for it."""
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
        for _, _, _, request in candidates.in_order:
            if request.request_id in self.admitted:
                continue
            is_running = request.request_id in candidates.running_ids
            fits = self.keep(request) if is_running else self.admit(request)
            if fits:
                max_tokens -= max(1, request.prompt_tokens - request.computed_tokens)
                if max_tokens <= 0:
                    return
            elif not is_running:
                candidates.waiting.stop()

    def decision(self, victims: Mapping[str, PreemptionMode] | None = None) -> Decision:
        """The slice as the engine hears it: decodes before prompts."""
        decodes_first = sorted(self.admitted.values(), key=lambda each: not each.output_tokens)
        return Decision(
            tuple(Preemption(*victim) for victim in (victims or {}).items()),
            tuple(request.request_id for request in decodes_first),
        )

    def _take(self, blocks: int) -> bool:
        if blocks > self._free_blocks or self._free_slots < 1:
            return False
        self._free_blocks -= blocks
        self._free_slots -= 1
        self._is_engine_empty = False
        return True
