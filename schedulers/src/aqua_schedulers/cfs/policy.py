"""The fair policy: memory in turns.

What is scarce is memory: whoever holds blocks gets tokens at every step. So a policy decides who
holds blocks for the next turn, a number of engine steps:

1. Requests that have been outside for `patience_turns` go first, longest first.
2. The token budget of a step is parted. Decodes get their upper bound, one token for each that
   fits in memory at once; the rest, over the turn, is the prompts'. Prompts are taken in the
   ranking's order until their pending tokens fill it.
3. Decodes follow in the ranking's order, while there is memory.
4. If memory is left, further prompts.

Memory counts what each request will have grown to at the end of the turn. Requests inside that
were not taken are put out, but only to make room: nobody leaves when nobody comes. Between turns
memory that comes free (a request finished) is filled in the same order, and nobody is put out.

Whether everyone outside fits anyway is first guessed without looking at those inside: their number
times the steps of a turn, and the prompt tokens let in less those that steps can have computed
since. The engine finds out at no cost where the guess was wrong: it has no block for an admission.

Promises: every request outside is served within `patience_turns` and a turn for each one that waits
longer (a ranking that bounds recomputation adds the time in which those inside finish); what is
admitted fits, together with the growth of all; while somebody fits, somebody is admitted; the same
events give the same decisions. A request is never put out before it got further than it was at its
admission: under recompute it might otherwise never finish.

Costs: `begin_step` and the events are O(1) or O(log n); a turn is O(m log m) in the requests
inside and O(k log n) in those admitted; whoever else waits costs nothing, but for one addition
where a ranking needs a mean.

Source: Aqua section 7, with three differences. A completion gives its memory away at once but
ends no slice, which would put out requests that have barely come in. Prompts take part until they
fill the *turn*, not one step, or a batch of short prompts would run dry. And patience: with steady
arrivals, "least served" alone starves whoever is ahead (`ranking` says how it is read here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from aqua_schedulers.cfs.ranking import FirstComeFirstServed, Ranking
from aqua_schedulers.cfs.views import (
    Decision,
    EngineView,
    Eviction,
    PagingTier,
    Preemption,
    RequestView,
)
from aqua_schedulers.cfs.waiting_queue import Entry, Queue, WaitingQueue

KEEP: Final = Decision()
_ARRIVAL: Final = FirstComeFirstServed()

Growth = Callable[[RequestView], int]
"""Blocks that a request takes until the end of a turn, beside those it holds or misses.

Of the shortest turn: a prompt may arrive at any step and shorten a long one.
"""


class _Table:
    """Who gets what is left of memory and slots, while a decision is made."""

    def __init__(self, room: int, slots: int, *, is_empty: bool) -> None:
        self.room = room
        self.slots = slots
        self.stays: set[str] = set()
        self.invited: dict[str, RequestView] = {}
        self.is_closed = False
        self._is_empty = is_empty

    def keep(self, request: RequestView, growth: int) -> bool:
        """Let one stay that is inside; False if there is no room for it."""
        if not self._spend(request.held_blocks + growth):
            return False
        self.stays.add(request.request_id)
        return True

    def invite(self, request: RequestView, growth: int) -> bool:
        """Let one in; False if there is no room for it."""
        if self._is_empty:
            # Alone it may take everything; what it lacks to grow, nobody else has.
            growth = max(0, min(growth, self.room - request.missing_blocks))
        if self.is_closed or not self._spend(request.missing_blocks + growth):
            return False
        self.invited[request.request_id] = request
        return True

    def _spend(self, blocks: int) -> bool:
        if blocks > self.room or self.slots < 1:
            return False
        self.room -= blocks
        self.slots -= 1
        self._is_empty = False
        return True


class _Line:
    """Those inside and those outside of one phase, merged in the ranking's order."""

    def __init__(self, inside: list[Entry], queue: Queue, *, keeps_equals: bool) -> None:
        inside.sort()
        self._inside = inside
        self._index = 0
        self._queue = queue
        self._is_closed = False
        self._keeps_equals = keeps_equals

    def seat(self, table: _Table, growth: Growth, quota_tokens: float = inf) -> None:
        """Take requests until their pending tokens reach the quota, or memory ends.

        Once one from outside finds no room, nobody behind it comes in: small requests would keep a
        large one out for ever. Those inside may still stay.
        """
        queue = self._queue
        while quota_tokens > 0:
            inner = self._inside[self._index] if self._index < len(self._inside) else None
            outer = None if self._is_closed else queue.first()
            if inner is not None and (outer is None or self._goes_first(inner, outer)):
                self._index += 1
                request = inner[3]
                is_seated = table.keep(request, growth(request))
            elif outer is not None:
                request = outer[3]
                if request.request_id in table.invited:
                    queue.step()
                    continue
                is_seated = table.invite(request, growth(request))
                if is_seated:
                    queue.step()
                else:
                    self._is_closed = True
            else:
                return
            if is_seated:
                quota_tokens -= max(1, request.prompt_tokens - request.computed_tokens)

    def _goes_first(self, inner: Entry, outer: Entry) -> bool:
        return inner[0] <= outer[0] if self._keeps_equals else inner[:3] <= outer[:3]


class TimeSlicePolicy:
    """A `FairPolicy` by a ranking.

    Args:
        ranking: Who comes first.
        block_tokens: Tokens of a block.
        patience_turns: After so many turns outside a request goes before all others.
        fcfs_on_host: Put nobody out while paged state would go to host memory (section 7).
    """

    def __init__(
        self, ranking: Ranking, *, block_tokens: int, patience_turns: int, fcfs_on_host: bool
    ) -> None:
        self._wanted = ranking
        self._ranking = ranking
        self._block_tokens = block_tokens
        self._patience_turns = patience_turns
        self._fcfs_on_host = fcfs_on_host
        self._waiting = WaitingQueue(ranking)
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._floors: dict[str, tuple[int, int]] = {}
        self._turn_index = 0
        self._elapsed_steps = 0
        self._has_changed = False
        self._backlog_tokens = 0
        self._token_budget = 0
        self._horizon_steps = ranking.turn_iterations(prompts_wait=True)
        self._leaving: set[str] = set()
        self._recompute_tokens = 0.0

    # --- Events ------------------------------------------------------------------------------

    def added(self, request: RequestView) -> None:
        """A request arrived; it is outside."""
        assert request.request_id not in self._numbers, request.request_id
        self._numbers[request.request_id] = self._next_number
        self._next_number += 1
        self._put(request)
        self._has_changed = True

    def admitted(self, request_id: str) -> None:
        """A request from outside holds blocks now, running or still loading."""
        request = self._waiting.take(request_id)
        assert request is not None, request_id
        self._backlog_tokens += _pending_tokens(request)
        if not request.output_tokens:
            grant = request.prompt_tokens * self._ranking.recompute_per_prompt_token
            # No more than a step's worth is saved up, or a calm hour would pay for a storm.
            self._recompute_tokens = min(
                self._recompute_tokens + grant, max(grant, self._token_budget)
            )

    def preempted(self, request: RequestView) -> None:
        """A request left the batch, by our decision or by the engine's; the view is of after."""
        self._put(request)
        if request.request_id in self._leaving:
            self._leaving.remove(request.request_id)
        else:
            self._has_changed = True

    def removed(self, request_id: str) -> None:
        """A request finished or was aborted, inside or outside."""
        self._waiting.take(request_id)
        self._floors.pop(request_id, None)
        self._leaving.discard(request_id)
        self._wanted.forget(request_id)
        del self._numbers[request_id]
        self._has_changed = True

    def _put(self, request: RequestView) -> None:
        name = request.request_id
        output, computed = self._floors.get(name, (0, 0))
        if request.output_tokens > output or request.computed_tokens > computed:
            self._floors[name] = (
                max(output, request.output_tokens),
                max(computed, request.computed_tokens),
            )
        self._waiting.put(request, self._numbers[name], self._turn_index)

    # --- Decisions ---------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Called once per engine step; False: the last decision stands."""
        self._elapsed_steps += 1
        if self._backlog_tokens:
            self._backlog_tokens = max(0, self._backlog_tokens - self._token_budget)
        return bool(len(self._waiting)) and (self._has_changed or self._is_turn_over)

    @property
    def _is_turn_over(self) -> bool:
        ranking = self._ranking
        return ranking.evicts and self._elapsed_steps >= ranking.turn_iterations(
            prompts_wait=self._waiting.has_prompts
        )

    def decide(self, engine: EngineView) -> Decision:
        """Who leaves and who may come; called when `begin_step` said True."""
        self._follow(engine.location)
        self._has_changed = False
        self._token_budget = engine.token_budget
        if not self._ranking.evicts:
            return Decision(admit=self._by_arrival(engine))
        decision = self._fill(engine)
        if len(decision.admit) == len(self._waiting) or not self._is_turn_over:
            return decision
        return self._turn(engine)

    def _follow(self, location: PagingTier) -> None:
        """Fall back to first come, first served where paging is slow, and back again."""
        is_slow = self._fcfs_on_host and location is not PagingTier.PEER
        ranking = _ARRIVAL if is_slow else self._wanted
        if ranking is not self._ranking:
            self._ranking = ranking
            self._waiting.rank_by(ranking)
            self._horizon_steps = ranking.turn_iterations(prompts_wait=True)

    def _by_arrival(self, engine: EngineView) -> tuple[str, ...]:
        """The first that fit by their arrival, and one more, which the engine may try."""
        room, slots = engine.free_blocks, engine.max_running - engine.running_count
        queues = (self._waiting.prompts(), self._waiting.decodes())
        admit: list[str] = []
        while room >= 0 and len(admit) < slots:
            entries = [(entry, queue) for queue in queues if (entry := queue.first()) is not None]
            if not entries:
                break
            entry, queue = min(entries, key=lambda pair: pair[0][:3])
            queue.step()
            admit.append(entry[3].request_id)
            room -= entry[3].missing_blocks
        for queue in queues:
            queue.close()
        return tuple(admit)

    def _fill(self, engine: EngineView) -> Decision:
        """Admissions into free memory, leaving a guess of what those inside will need."""
        tokens = self._backlog_tokens + engine.running_count * self._horizon_steps
        room = engine.free_blocks
        if engine.running_count:
            room -= -(-tokens // self._block_tokens)
        slots = engine.max_running - engine.running_count
        if engine.running_count and (room < 0 or slots < 1):
            return KEEP
        table = _Table(room, slots, is_empty=not engine.running_count)
        self._seat(table, engine, [], self._backlog_tokens)
        return _decision((), table)

    def _turn(self, engine: EngineView) -> Decision:
        """Everyone's claim anew."""
        self._turn_index += 1
        self._elapsed_steps = 0
        inside = engine.running()
        self._ranking.begin_turn(inside, self._waiting.decode_keys)
        movable = [request for request in inside if self._may_leave(request)]
        may_recompute = (
            self._recompute_tokens > 0.0 or self._ranking.recompute_per_prompt_token == inf
        )
        if not may_recompute:
            out = self._evict(movable, engine._replace(rates=None))
            movable = [each for each in movable if out[each.request_id] is Eviction.SWAP]
        moving = {request.request_id for request in movable}
        room = engine.free_blocks + sum(request.held_blocks for request in movable)
        backlog = 0
        for request in inside:
            if request.request_id not in moving:
                room -= self._growth(request)
                backlog += _pending_tokens(request)
        slots = engine.max_running - engine.running_count + len(movable)
        table = _Table(room, slots, is_empty=len(movable) == len(inside))
        self._seat(table, engine, movable, backlog)
        if not table.invited:
            return KEEP
        leaving = [request for request in movable if request.request_id not in table.stays]
        out = self._evict(leaving, engine if may_recompute else engine._replace(rates=None))
        for request in leaving:
            self._floors[request.request_id] = (request.output_tokens, request.computed_tokens)
            if out[request.request_id] is Eviction.RECOMPUTE:
                self._recompute_tokens -= request.computed_tokens
        self._leaving.update(out)
        return _decision(tuple(Preemption(*each) for each in out.items()), table)

    def _seat(
        self, table: _Table, engine: EngineView, movable: Sequence[RequestView], backlog: int
    ) -> None:
        """The order of the module's theory: patience, prompts, decodes, further prompts."""
        ranking, numbers, growth = self._ranking, self._numbers, self._growth
        for request in self._waiting.overdue(self._turn_index - self._patience_turns):
            if not table.invite(request, growth(request)):
                table.is_closed = True
                break
        inside: tuple[list[Entry], list[Entry]] = ([], [])
        for request in movable:
            is_decode = request.output_tokens > 0
            key = ranking.decode_key(request) if is_decode else ranking.prompt_key(request)
            inside[is_decode].append((key, request.arrival_s, numbers[request.request_id], request))
        queues = (self._waiting.prompts(), self._waiting.decodes())
        prompts, decodes = (
            _Line(mine, theirs, keeps_equals=ranking.keeps_equals)
            for mine, theirs in zip(inside, queues, strict=True)
        )
        # As many as are inside fit in memory at once: the upper bound of the decode share.
        share = max(1, engine.token_budget - engine.running_count)
        prompts.seat(table, growth, share * self._horizon_steps - backlog)
        decodes.seat(table, growth)
        prompts.seat(table, growth)
        for queue in queues:
            queue.close()

    def _evict(self, leaving: Sequence[RequestView], engine: EngineView) -> dict[str, Eviction]:
        """What becomes of each; the store's room goes to the longest contexts."""
        store = engine.eviction_room_blocks if engine.location is not PagingTier.NOWHERE else 0
        out: dict[str, Eviction] = {}
        for request in sorted(leaving, key=lambda each: -each.computed_tokens):
            need = request.held_blocks - request.saved_blocks
            eviction = Eviction.SWAP
            if need > store:
                eviction = Eviction.RECOMPUTE
            elif engine.rates is not None:
                eviction = engine.rates.eviction(request)
            if eviction is Eviction.SWAP:
                store -= need
            out[request.request_id] = eviction
        return out

    def _may_leave(self, request: RequestView) -> bool:
        floor = self._floors.get(request.request_id, (0, 0))
        return not request.is_pinned and (request.output_tokens, request.computed_tokens) > floor

    def _growth(self, request: RequestView) -> int:
        """Blocks that it takes beside those held or missing until the end of a turn."""
        size = self._block_tokens
        known = request.prompt_tokens + request.output_tokens
        has = known if request.missing_blocks else request.computed_tokens
        return max(0, -(-(known + self._horizon_steps) // size) - -(-has // size))


def _pending_tokens(request: RequestView) -> int:
    """Tokens to compute before the next one is sampled."""
    return max(1, request.prompt_tokens + request.output_tokens - request.computed_tokens)


def _decision(preempt: tuple[Preemption, ...], table: _Table) -> Decision:
    decodes = [name for name, request in table.invited.items() if request.output_tokens]
    prompts = [name for name, request in table.invited.items() if not request.output_tokens]
    return Decision(preempt, (*decodes, *prompts))
