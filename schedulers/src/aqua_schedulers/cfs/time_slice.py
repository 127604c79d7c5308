"""One time slice in the making: which requests hold memory in it.

Memory and running slots are given out one request after another, in the order that the policy asks
for. Each request counts with the blocks that it will have grown to at the slice's end, so what a
slice holds fits until it is over. A running request that gets no memory is to be preempted; that
costs nothing here and is the policy's decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from aqua_schedulers.cfs.views import RequestView
from aqua_schedulers.cfs.waiting_queue import RankedRequest


class Candidates:
    """Running and waiting requests of one phase, by the keys of their `Ranking`, each taken once.

    Args:
        running: May be preempted, in any order; sorted in place.
        waiting: May be admitted, in order.

    Attributes:
        admits: False ends the waiting ones; those running go on.
    """

    def __init__(self, running: list[RankedRequest], waiting: Sequence[RankedRequest]) -> None:
        running.sort()
        self.admits = True
        self._running = running
        self._waiting = waiting
        self._running_at = self._waiting_at = 0

    def running_next(self) -> list[RequestView]:
        """The running requests that go before the next waiting one; `pass_running` takes them."""
        start, end = self._running_at, len(self._running)
        if start == end:
            return []
        waiting = self._next_waiting()
        if waiting is not None:
            end = bisect_left(self._running, waiting, start)
        return [rank[4] for rank in self._running[start:end]]

    def pass_running(self, count: int) -> None:
        """Take so many of the running ones."""
        self._running_at += count

    def take_waiting(self) -> RequestView | None:
        """Take the next waiting request; None if there is none, or none is admitted any more."""
        waiting = self._next_waiting()
        if waiting is None:
            return None
        self._waiting_at += 1
        return waiting[4]

    def take(self) -> tuple[RequestView, bool] | None:
        """Take the next request, with whether it is running; None if there is none."""
        waiting = self._next_waiting()
        if self._running_at < len(self._running):
            running = self._running[self._running_at]
            if waiting is None or running < waiting:
                self._running_at += 1
                return running[4], True
        if waiting is None:
            return None
        self._waiting_at += 1
        return waiting[4], False

    def _next_waiting(self) -> RankedRequest | None:
        if not self.admits or self._waiting_at >= len(self._waiting):
            return None
        return self._waiting[self._waiting_at]


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
        self._free_blocks -= self._growth(request, request.computed_tokens)

    def keep(self, requests: Iterable[RequestView], max_tokens: float = inf) -> tuple[int, float]:
        """Let running requests stay, each if there is memory for it, until the limit is reached.

        Returns how many were looked at, and what their pending tokens leave of the limit. They are
        most of what a slice's end looks at, so this is one loop without calls.
        """
        size, horizon = self._block_tokens, self._horizon_steps
        free_blocks, free_slots = self._free_blocks, self._free_slots
        is_limited = max_tokens < inf
        count = 0
        for request in requests:
            count += 1
            left = free_blocks - request.held_blocks
            # Before its growth is reckoned: once memory has run out, this is what is left to do.
            if left < 0 or free_slots < 1:
                continue
            grown = request.prompt_tokens + request.output_tokens + horizon
            growth = -(-grown // size) - -(-request.computed_tokens // size)
            if growth > 0:
                left -= growth
                if left < 0:
                    continue
            free_blocks = left
            free_slots -= 1
            self.kept.add(request.request_id)
            if is_limited:
                max_tokens -= max(1, request.prompt_tokens - request.computed_tokens)
                if max_tokens <= 0:
                    break
        if free_slots < self._free_slots:
            self._is_engine_empty = False
        self._free_blocks, self._free_slots = free_blocks, free_slots
        return count, max_tokens

    def admit(self, request: RequestView) -> bool:
        """Let a waiting request in; False if there is no memory for it."""
        free_blocks = self._free_blocks - request.missing_blocks
        growth = self._growth(request, request.prompt_tokens + request.output_tokens)
        if self._is_engine_empty:
            # Alone it may take everything; what it lacks to grow, no other request has.
            growth = max(0, min(growth, free_blocks))
        free_blocks -= growth
        if self._is_closed or free_blocks < 0 or self._free_slots < 1:
            return False
        self._free_blocks = free_blocks
        self._free_slots -= 1
        self._is_engine_empty = False
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
        while max_tokens > 0:
            running = candidates.running_next()
            if running:
                count, max_tokens = self.keep(running, max_tokens)
                candidates.pass_running(count)
                if max_tokens <= 0:
                    return
            request = candidates.take_waiting()
            if request is None:
                return
            if request.request_id in self.admitted:
                continue
            candidates.admits = self.admit(request)
            if candidates.admits:
                max_tokens -= max(1, request.prompt_tokens - request.computed_tokens)

    def in_order(self) -> tuple[str, ...]:
        """The admitted requests as the engine takes them: decodes before prompts."""
        decodes = [name for name, each in self.admitted.items() if each.output_tokens]
        prompts = [name for name, each in self.admitted.items() if not each.output_tokens]
        return (*decodes, *prompts)

    def _growth(self, request: RequestView, has_tokens: int) -> int:
        """Blocks that a request with memory for so many tokens takes more until the slice's end."""
        size = self._block_tokens
        grown = request.prompt_tokens + request.output_tokens + self._horizon_steps
        return max(0, -(-grown // size) - -(-has_tokens // size))
