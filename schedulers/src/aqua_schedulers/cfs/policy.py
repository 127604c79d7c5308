"""The fair policy: which requests hold memory, time slice by time slice.

What is scarce is memory: a request that holds blocks gets tokens at every step. So the policy
decides which ones hold blocks for the next slice, a number of engine steps:

1. Requests that have waited for `patience_turns` slices go first, longest first.
2. The token budget of a step is parted. Decodes get their upper bound, one token for each that
   fits in memory at once; the rest, over the slice, is the prompts'. Prompts are taken in the
   ranking's order until their pending tokens fill it.
3. Decodes follow in the ranking's order, while there is memory.
4. If memory is left, further prompts.

Memory counts what each request will have grown to at the end of the slice. Running requests that
were not taken are preempted, but only to make room: none leaves when none comes. Within a slice,
memory that comes free (a request finished) is filled in the same order, and none is preempted.

Whether all waiting requests fit anyway is first guessed without looking at the running ones: their
number times the steps of a slice, and the prompt tokens admitted less those that steps can have
computed since. The engine finds out at no cost where the guess was wrong: it has no block for an
admission.

Promises: every waiting request is served within `patience_turns` slices and a slice for each one
that waits longer (a ranking that bounds recomputation adds the time in which the running ones
finish); what is admitted fits, together with the growth of all; while some request fits, some is
admitted; the same events give the same decisions. A request is never preempted before it got
further than it was at its admission: under recompute it might otherwise never finish.

Costs: `begin_step` and the events are O(1) or O(log n); a slice is O(m log m) in the running
requests and O(k log n) in those admitted; any other waiting request costs nothing, but for one
addition where a ranking needs a mean.

Source: Aqua section 7, with three differences. A completion gives its memory away at once but
ends no slice, which would preempt requests that have barely come in. Prompts take part until they
fill the *slice*, not one step, or a batch of short prompts would run dry. And patience: with steady
arrivals, "least served" alone starves a request that is ahead (`ranking` says how it is read here).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import merge
from math import inf
from typing import Final

from aqua_schedulers.cfs.ranking import FirstComeFirstServed, Ranking
from aqua_schedulers.cfs.tenant_turns import Runners, TenantQueue, TenantSlice, TenantTurn
from aqua_schedulers.cfs.tenants import TenantAccounts, TenantSettings
from aqua_schedulers.cfs.time_slice import Candidates, TimeSlice
from aqua_schedulers.cfs.views import (
    Decision,
    EngineView,
    PagingTier,
    Preemption,
    PreemptionMode,
    RequestView,
)
from aqua_schedulers.cfs.waiting_queue import RankedRequest, WaitingQueue

KEEP_ALL: Final = Decision()
_BY_ARRIVAL: Final = FirstComeFirstServed()


class FairPolicy:
    """Decides which requests hold memory, by a ranking; made by `policy_named`.

    Args:
        patience_turns: After so many slices of waiting a request goes before all others.
        fcfs_on_host: Preempt none while paged state would go to host memory (section 7).
        tenants: How tenants share; None treats all requests alike.

    Attributes:
        accounts: What tenants have been served; read only.
    """

    def __init__(
        self,
        ranking: Ranking,
        *,
        block_tokens: int,
        patience_turns: int,
        fcfs_on_host: bool,
        tenants: TenantSettings | None = None,
    ) -> None:
        self._wanted_ranking = ranking
        self._ranking = ranking
        self._block_tokens = block_tokens
        self._patience_turns = patience_turns
        self._fcfs_on_host = fcfs_on_host
        self._waiting = WaitingQueue(ranking)
        self._numbers: dict[str, int] = {}
        self._arrival_count = 0
        # How far each request had got when it was last preempted: output, computed tokens.
        self._floors: dict[str, tuple[int, int]] = {}
        self._slice_index = 0
        self._elapsed_steps = 0
        self._has_changed = False
        self._backlog_tokens = 0
        self._token_budget = 0
        # Of the shortest slice: a prompt may arrive at any step and shorten a long one.
        self._horizon_steps = ranking.slice_steps(prompts_wait=True)
        self._preempting: set[str] = set()
        self._recompute_tokens = 0.0
        self._takes_turns = True
        self.accounts: Final = None if tenants is None else TenantAccounts(tenants)
        self._queues = TenantQueue(ranking)

    def slice_turns(self, on: bool) -> None:  # noqa: FBT001 - a switch, called by position
        """Take turns by the ranking from the next step on, or serve by arrival as stock engines."""
        self._takes_turns = on
        self._has_changed = True

    # --- Events ------------------------------------------------------------------------------

    def added(self, request: RequestView) -> None:
        """A request arrived; it is waiting."""
        assert request.request_id not in self._numbers, request.request_id
        self._numbers[request.request_id] = self._arrival_count
        self._arrival_count += 1
        if self.accounts is not None:
            self.accounts.added(request)
        self._wait(request)
        self._has_changed = True

    def admitted(self, request_id: str) -> None:
        """A waiting request holds blocks now, running or still loading."""
        request = self._waiting.remove(request_id)
        assert request is not None, request_id
        if self.accounts is not None:
            self.accounts.admitted(request_id)
            self._queues.remove(request)
        self._backlog_tokens += request.pending_tokens
        if not request.output_tokens:
            grant = request.prompt_tokens * self._ranking.recompute_per_prompt_token
            # No more than a step's worth is saved up, or a calm hour would pay for a storm.
            self._recompute_tokens = min(
                self._recompute_tokens + grant, max(grant, self._token_budget)
            )

    def preempted(self, request: RequestView) -> None:
        """A request left the batch, by our decision or by the engine's; the view is of after."""
        if self.accounts is not None:
            self.accounts.preempted(request.request_id, request.output_tokens)
        self._wait(request)
        if request.request_id in self._preempting:
            self._preempting.remove(request.request_id)
        else:
            self._has_changed = True

    def removed(self, request_id: str, output_tokens: int = 0) -> None:
        """A request finished or was aborted, running or waiting, after so much output."""
        waiting = self._waiting.remove(request_id)
        if self.accounts is not None:
            is_waiting = waiting is not None
            self.accounts.removed(request_id, output_tokens, was_waiting=is_waiting)
            if waiting is not None:
                self._queues.remove(waiting)
        self._floors.pop(request_id, None)
        self._preempting.discard(request_id)
        self._wanted_ranking.forget(request_id)
        del self._numbers[request_id]
        self._has_changed = True

    def _wait(self, request: RequestView) -> None:
        name = request.request_id
        output, computed = self._floors.get(name, (0, 0))
        if request.output_tokens > output or request.computed_tokens > computed:
            self._floors[name] = (
                max(output, request.output_tokens),
                max(computed, request.computed_tokens),
            )
        self._waiting.add(request, self._numbers[name], self._slice_index)
        if self.accounts is not None:
            self._queues.add(request, self._numbers[name], self._slice_index)

    # --- Decisions ---------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for memory."""
        return bool(len(self._waiting))

    def begin_step(self) -> bool:
        """Called once per engine step; False: the last decision stands."""
        self._elapsed_steps += 1
        if self._backlog_tokens:
            self._backlog_tokens = max(0, self._backlog_tokens - self._token_budget)
        return self.has_waiting and (self._has_changed or self._is_slice_over)

    def decide(self, engine: EngineView) -> Decision:
        """Choose which requests to preempt and to admit; called when `begin_step` said True."""
        self._choose_ranking(engine.location)
        self._has_changed = False
        self._token_budget = engine.token_budget
        if self.accounts is not None:
            output = engine.output_tokens
            self.accounts.begin_decision(
                output()
                if output is not None
                else [(each.request_id, each.output_tokens) for each in engine.running()]
            )
        if not self._ranking.preempts:
            return Decision(admit=self._earliest_arrivals(engine))
        is_slice_over = self._is_slice_over
        # Each takes a block at least.
        if not is_slice_over or len(self._waiting) <= engine.free_blocks:
            decision = self._fill_free_memory(engine)
            if len(decision.admit) == len(self._waiting) or not is_slice_over:
                return decision
        return self._next_slice(engine)

    @property
    def _is_slice_over(self) -> bool:
        ranking = self._ranking
        return ranking.preempts and self._elapsed_steps >= ranking.slice_steps(
            prompts_wait=bool(self._waiting.prompts)
        )

    def _choose_ranking(self, tier: PagingTier) -> None:
        """Fall back to first come, first served where paging is slow, or turns are off."""
        is_slow = self._fcfs_on_host and tier is not PagingTier.PEER
        ranking = self._wanted_ranking if self._takes_turns and not is_slow else _BY_ARRIVAL
        if ranking is not self._ranking:
            self._ranking = ranking
            self._waiting.rank_by(ranking)
            self._queues.rank_by(ranking)
            self._horizon_steps = ranking.slice_steps(prompts_wait=True)

    def _earliest_arrivals(self, engine: EngineView) -> tuple[str, ...]:
        """The earliest requests that fit, and one more, which the engine may try."""
        free_blocks = engine.free_blocks
        free_slots = engine.max_running - engine.running_count
        admit: list[str] = []
        for request in self._in_order_of_arrival():
            if free_blocks < 0 or len(admit) >= free_slots:
                break
            admit.append(request.request_id)
            free_blocks -= request.missing_blocks
        return tuple(admit)

    def _in_order_of_arrival(self) -> Iterator[RequestView]:
        """All waiting requests, of the least served tenant first."""
        if self.accounts is not None:
            return self._queues.by_counter(self.accounts)
        return (each[4] for each in merge(self._waiting.prompts, self._waiting.decodes))

    def _fill_free_memory(self, engine: EngineView) -> Decision:
        """Admissions into free memory, leaving a guess of what the running ones will need."""
        free_blocks = engine.free_blocks
        free_slots = engine.max_running - engine.running_count
        if engine.running_count:
            tokens = self._backlog_tokens + engine.running_count * self._horizon_steps
            free_blocks -= -(-tokens // self._block_tokens)
            if free_blocks < 1 or free_slots < 1:
                return KEEP_ALL
        chosen = self._time_slice(free_blocks, free_slots, is_empty=not engine.running_count)
        self._choose(chosen, engine, (), self._backlog_tokens)
        return Decision(admit=chosen.in_order())

    def _next_slice(self, engine: EngineView) -> Decision:
        """All running and waiting requests, weighed anew."""
        self._slice_index += 1
        self._elapsed_steps = 0
        running = engine.running()
        self._ranking.begin_slice(running, self._waiting.decode_keys)
        floors = self._floors
        preemptible = [
            each
            for each in running
            if not each.is_pinned
            and (each.output_tokens, each.computed_tokens) > floors.get(each.request_id, (0, 0))
        ]
        if self._recompute_tokens <= 0.0 and self._ranking.recompute_per_prompt_token < inf:
            # Only what the store takes may leave.
            engine = engine._replace(rates=None)
            modes = engine.preemption_modes(preemptible)
            preemptible = [
                each for each in preemptible if modes[each.request_id] is PreemptionMode.SWAP
            ]
        staying_count = len(running) - len(preemptible)
        chosen = self._time_slice(
            engine.free_blocks + sum([each.held_blocks for each in preemptible]),
            engine.max_running - engine.running_count + len(preemptible),
            is_empty=not staying_count,
        )
        backlog_tokens = 0
        if staying_count:
            names = {each.request_id for each in preemptible}
            for request in running:
                if request.request_id not in names:
                    chosen.hold(request)
                    backlog_tokens += request.pending_tokens
        self._choose(chosen, engine, preemptible, backlog_tokens)
        if not chosen.admitted:
            return KEEP_ALL
        victims = [each for each in preemptible if each.request_id not in chosen.kept]
        return Decision(self._preempt(victims, engine), chosen.in_order())

    def _choose(
        self,
        chosen: TimeSlice,
        engine: EngineView,
        preemptible: Iterable[RequestView],
        backlog_tokens: int,
    ) -> None:
        """Give out the slice's memory in the order of the module's theory."""
        ranking, numbers = self._ranking, self._numbers
        accounts, granularity = self.accounts, ranking.granularity
        key = ranking.key
        prompts: list[RankedRequest] = [
            (key(each), False, each.arrival_s, numbers[each.request_id], each)
            for each in preemptible
            if not each.output_tokens
        ]
        decodes: list[RankedRequest] = [
            (key(each) - granularity, False, each.arrival_s, numbers[each.request_id], each)
            for each in preemptible
            if each.output_tokens
        ]
        # As many as are running fit in memory at once: the upper bound of the decodes' share.
        prompt_share = max(1, engine.token_budget - engine.running_count)
        prompt_tokens = prompt_share * self._horizon_steps - backlog_tokens
        since = self._slice_index - self._patience_turns
        if accounts is not None:
            running: defaultdict[str, Runners] = defaultdict(lambda: ([], []))
            for phase, runners in enumerate((prompts, decodes)):
                for rank in runners:
                    running[rank[4].tenant][phase].append(rank)
            turns = {
                tenant: TenantTurn(accounts, tenant, self._queues[tenant], running[tenant], since)
                for tenant in dict.fromkeys([*running, *self._queues])
            }
            steps = self._horizon_steps
            TenantSlice(
                chosen, accounts, turns, prompt_tokens=prompt_tokens, slice_steps=steps
            ).fill()
            return
        first = Candidates(prompts, self._waiting.prompts)
        chosen.admit_overdue(self._waiting.overdue(since))
        chosen.fill(first, prompt_tokens)
        chosen.fill(Candidates(decodes, self._waiting.decodes))
        chosen.fill(first)

    def _preempt(
        self, victims: Iterable[RequestView], engine: EngineView
    ) -> tuple[Preemption, ...]:
        """Note which requests leave and how far each got."""
        modes = engine.preemption_modes(victims)
        for request in victims:
            self._floors[request.request_id] = (request.output_tokens, request.computed_tokens)
            if modes[request.request_id] is PreemptionMode.RECOMPUTE:
                self._recompute_tokens -= request.computed_tokens
        self._preempting.update(modes)
        return tuple(map(Preemption._make, modes.items()))

    def _time_slice(self, free_blocks: int, free_slots: int, *, is_empty: bool) -> TimeSlice:
        return TimeSlice(
            free_blocks,
            free_slots,
            block_tokens=self._block_tokens,
            horizon_steps=self._horizon_steps,
            is_engine_empty=is_empty,
        )
