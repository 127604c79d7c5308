"""An engine that co-serves: steps, memory, checkpoints and one link, on a virtual clock.

The rules are those of `serving.engine` with synchronous steps; who computes what in a step is the
plan of an `aqua_schedulers.conserve` policy, the same object that runs in a real engine. Which
online requests hold memory is a fair policy's decision (`aqua_schedulers.cfs`), to which blocks of
offline requests are free.

*Safepoints* (`step`) cost `safepoint_s` each, in steps without online requests only. Nothing of an
aborted step counts.

*Copies* to and from the checkpoint store move in the background (`link`) and are acknowledged at
the first step boundary after their end. They take memory bandwidth from the step that runs
(`hbm_bytes_per_s`). Copies that all wait for (swaps, loads without prefetch) come on top of the
step, at `swap_bytes_per_s`.

*Offline requests* come from an iterator, some ahead of what runs: there is always more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Final

from aqua_protocol.errors import CapacityError
from aqua_schedulers.cfs import (
    EngineView,
    FairPolicy,
    PagingTier,
    PolicyName,
    PreemptionMode,
    policy_named,
)
from aqua_schedulers.conserve import (
    ConservePolicy,
    CoServingPlan,
    CoServingView,
    ServiceClass,
)
from aqua_simulator.co_serving.job import CoServedJob, CoServingRun, StepRecord
from aqua_simulator.co_serving.link import LinkDirection
from aqua_simulator.co_serving.spec import CoServingEngineSpec
from aqua_simulator.co_serving.step import CoServingStep, StepWork, load_of
from aqua_simulator.serving.engine import batch_of
from aqua_simulator.serving.request import Arrival, Phase
from aqua_simulator.timing.iteration import IterationTime

OFFLINE_AHEAD: Final = 64
"""Offline requests kept waiting, by judgement: more than come in at one step. Doubled, the queue is
longer and nothing else changes."""

IDLE_S: Final = 0.01
"""Seconds after which an engine with requests and nothing to compute asks its policy again, about a
decode step; it waits for a copy then. Doubled, the copy's budget comes in coarser pieces."""


@dataclass(slots=True)
class CoServingEngine:
    """Co-serves online arrivals and an endless offline pool under a policy.

    Attributes:
        policy: Decides each step; this engine's own object.
        fair: Decides which online requests hold memory; likewise.
        result: Grows as the run goes on.
    """

    spec: CoServingEngineSpec
    time_of: IterationTime
    policy: ConservePolicy
    offline: Iterator[Arrival] = field(default_factory=lambda: iter(()))
    fair: FairPolicy = field(default_factory=lambda: policy_named(PolicyName.FCFS))
    now_s: float = 0.0
    free_blocks: int = field(init=False)
    result: CoServingRun = field(default_factory=CoServingRun)
    _online_waiting: dict[str, CoServedJob] = field(default_factory=dict, repr=False)
    _offline_waiting: dict[str, CoServedJob] = field(default_factory=dict, repr=False)
    _running: list[CoServedJob] = field(default_factory=list, repr=False)
    _listed: Sequence[str] = field(default=(), repr=False)
    _step: CoServingStep | None = field(default=None, repr=False)
    _out: LinkDirection = field(init=False, repr=False)
    _in: LinkDirection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.free_blocks = self.spec.block_count
        block_s = self.spec.block_bytes / self.spec.link_bytes_per_s
        self._out, self._in = LinkDirection(block_s), LinkDirection(block_s)

    def run(self, arrivals: Iterable[Arrival], until_s: float) -> CoServingRun:
        """Serve all online arrivals to their end, and offline requests until then and `until_s`.

        Raises:
            CapacityError: A request can never fit in memory.
        """
        incoming = deque(sorted(arrivals, key=lambda each: each.arrival_s))
        self._plan_step()
        while True:
            arrival_s = incoming[0].arrival_s if incoming else inf
            event_s = self._next_event_s()
            is_over = not incoming and not self._online_waiting and not self._has_online()
            if min(arrival_s, event_s) == inf or (is_over and self.now_s >= until_s):
                return self.result
            self.now_s = min(arrival_s, max(event_s, self.now_s))
            if arrival_s < event_s:
                self._arrive(CoServedJob(incoming.popleft()))
            elif self._step is not None and self._step.end_s <= self.now_s:
                self._deliver(self._step)
                self._step = None
            if self._step is None:
                self._settle_copies()
                self._plan_step()

    @property
    def jobs(self) -> Sequence[CoServedJob]:
        """Requests that hold blocks, in order of admission."""
        return self._running

    def _has_online(self) -> bool:
        return any(job.is_online for job in self._running)

    def _next_event_s(self) -> float:
        """When the step ends; without one, when a copy ends that it may wait for, or is allowed."""
        if self._step is not None:
            return self._step.end_s
        has_requests = self._running or self._offline_waiting or self._online_waiting
        idle_s = self.now_s + IDLE_S if has_requests else inf
        return min(self._out.next_end_s, self._in.next_end_s, idle_s)

    # --- Arrivals and aborts -----------------------------------------------------------------

    def _check(self, arrival: Arrival) -> None:
        need = self._blocks_for(arrival.prompt_tokens + arrival.output_tokens)
        if need > self.spec.block_count:
            raise CapacityError(
                f"request {arrival.request_id} needs {need} blocks of {self.spec.block_count}",
                remedy="Use a larger GPU or drop the request.",
            )

    def _arrive(self, job: CoServedJob) -> None:
        self._check(job.arrival)
        size = self.spec.block_tokens
        self._online_waiting[job.arrival.request_id] = job
        self.fair.added(job.fair_view(size))
        step = self._step
        if step is None:
            return
        waiting = [each.view(size) for each in self._online_waiting.values()]
        if not self.policy.on_arrival(step.under_way(), waiting, self.now_s):
            return
        if step.abort(self.spec, self.now_s):
            job.abort_count += 1
            self.result.most_aborts = max(self.result.most_aborts, job.abort_count)
            self.result.abort_lags_s.append(step.end_s - self.now_s)

    # --- Planning ----------------------------------------------------------------------------

    def _plan_step(self) -> None:
        self._refill_pool()
        size = self.spec.block_tokens
        self._follow_fair_policy()
        waiting = self._online_waiting
        arriving = [waiting[name].view(size) for name in self._listed if name in waiting]
        room = self.spec.store_blocks - self.policy.checkpoints.stored_blocks
        plan = self.policy.plan(
            CoServingView(
                now_s=self.now_s,
                free_blocks=self.free_blocks,
                block_count=self.spec.block_count,
                max_tokens=self.spec.max_tokens,
                max_running=self.spec.max_running,
                running=[job.view(size) for job in self._running],
                arriving=arriving,
                link_bytes_per_s=self.spec.link_bytes_per_s,
                block_bytes=self.spec.block_bytes,
                store_room_blocks=room,
            )
        )
        stall_s = 0.0
        by_name = {job.arrival.request_id: job for job in self._running}
        for name, mode in plan.preempt:
            stall_s += self._preempt_offline(by_name[name], mode)
        work = self._online_work(plan.online_tokens)
        work += self._arriving_work(plan.online_tokens - sum(tokens for _, tokens in work))
        for name in plan.admit:
            stall_s += self._admit_offline(name)
        for job in self._running:
            tokens = plan.offline_tokens.get(job.arrival.request_id, 0)
            if tokens and not job.is_online:
                assert self._grow(job, job.computed_tokens + tokens), job
                work.append((job, tokens))
        copied = self._start_copies(plan)
        if work:
            self._launch(plan, work, stall_s, copied)

    def _refill_pool(self) -> None:
        while len(self._offline_waiting) < OFFLINE_AHEAD:
            arrival = next(self.offline, None)
            if arrival is None:
                return
            self._check(arrival)
            job = CoServedJob(arrival, service_class=ServiceClass.OFFLINE)
            self._offline_waiting[arrival.request_id] = job
            self.policy.added(job.view(self.spec.block_tokens), self.now_s)

    def _follow_fair_policy(self) -> None:
        if not self.fair.begin_step():
            return
        size = self.spec.block_tokens
        online = [job for job in self._running if job.is_online]
        offline = [job for job in self._running if not job.is_online]
        decision = self.fair.decide(
            EngineView(
                free_blocks=self.free_blocks + sum(job.block_count for job in offline),
                token_budget=self.spec.max_tokens,
                max_running=self.spec.max_running,
                running_count=len(online),
                running=lambda: [job.fair_view(size) for job in online],
                location=PagingTier.NOWHERE,
            )
        )
        self._listed = decision.admit
        by_name = {job.arrival.request_id: job for job in online}
        if decision.preempt:
            # Online requests want more than all memory: no offline one keeps any.
            for job in offline:
                self._preempt_offline(job, PreemptionMode.RECOMPUTE)
        for name, _mode in decision.preempt:
            self._preempt_online(by_name[name])

    def _online_work(self, budget: int) -> list[tuple[CoServedJob, int]]:
        """Tokens of online requests inside, decodes first, prompts by admission."""
        work: list[tuple[CoServedJob, int]] = []
        online = [job for job in self._running if job.is_online]
        online.sort(key=lambda job: job.pending_tokens > 1 or not job.emitted_tokens)
        index = 0
        while index < len(online):
            job = online[index]
            index += 1
            tokens = min(job.pending_tokens, budget)
            while tokens and not self._grow(job, job.computed_tokens + tokens):
                if self.policy.checkpoints.pinned_blocks:
                    # They come free when their copies end; no online request leaves for that.
                    tokens = 0
                    break
                victim = online.pop()
                self._preempt_online(victim)
                work = [each for each in work if each[0] is not victim]
                if victim is job:
                    tokens = 0
            if tokens:
                work.append((job, tokens))
                budget -= tokens
        return work

    def _arriving_work(self, budget: int) -> list[tuple[CoServedJob, int]]:
        """Admit online requests and give them tokens, while there are any."""
        work: list[tuple[CoServedJob, int]] = []
        for name in self._listed:
            waiting = self._online_waiting.get(name)
            if waiting is None:
                continue
            if budget <= 0 or len(self._running) >= self.spec.max_running:
                break
            if self._blocks_for(waiting.known_tokens) > self.free_blocks:
                break
            tokens = min(waiting.pending_tokens, budget)
            self._grow(waiting, tokens)
            del self._online_waiting[name]
            self.fair.admitted(name)
            waiting.phase = Phase.RUNNING
            if isnan(waiting.scheduled_s):
                waiting.scheduled_s = self.now_s
            self._running.append(waiting)
            work.append((waiting, tokens))
            budget -= tokens
        return work

    def _launch(
        self, plan: CoServingPlan, work: StepWork, stall_s: float, copied_bytes: float
    ) -> None:
        batch = batch_of(work)
        # Copies take memory bandwidth from the step.
        spent_s = self.time_of(batch) + copied_bytes / self.spec.hbm_bytes_per_s
        if plan.is_preemptible:
            groups = self.spec.layer_count // self.spec.safepoint_layers
            spent_s += groups * self.spec.safepoint_s
        self.result.stalled_s += stall_s
        end_s = self.now_s + stall_s + spent_s
        self._step = CoServingStep(plan, self.now_s, end_s, load_of(batch), work, stall_s)

    # --- Memory ------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_tokens)

    def _grow(self, job: CoServedJob, tokens: int) -> bool:
        need = max(0, self._blocks_for(tokens) - job.block_count)
        if need > self.free_blocks:
            return False
        self.free_blocks -= need
        job.block_count += need
        return True

    def _preempt_online(self, job: CoServedJob) -> None:
        """Take an online request's memory; it computes everything again."""
        if not all(each.is_online for each in self._running):
            self.result.wrong_victims += 1
        self._running.remove(job)
        self.free_blocks += job.block_count
        job.block_count = job.computed_tokens = 0
        job.preemption_count += 1
        job.phase = Phase.WAITING
        self._online_waiting[job.arrival.request_id] = job
        self.fair.preempted(job.fair_view(self.spec.block_tokens))

    def _preempt_offline(self, job: CoServedJob, mode: PreemptionMode) -> float:
        """Take an offline request's memory; returns the seconds that all wait for its copy."""
        name, ledger = job.arrival.request_id, self.policy.checkpoints
        stall_s = 0.0
        if mode is PreemptionMode.SWAP and not job.is_loading:
            unsaved = job.computed_tokens // self.spec.block_tokens - ledger.of(name).saved
            if 0 < unsaved <= self.spec.store_blocks - ledger.stored_blocks:
                ledger.copy(name, unsaved)
                ledger.acknowledge(name, unsaved)
                stall_s = unsaved * self.spec.block_bytes / self.spec.swap_bytes_per_s
        saved = ledger.of(name).saved
        held, job.block_count = job.block_count, 0
        if not job.is_loading:
            lost = job.computed_tokens - saved * self.spec.block_tokens
            self.result.recomputed_tokens += max(0, lost)
        job.is_loading, job.loaded_blocks = False, 0
        job.computed_tokens = saved * self.spec.block_tokens
        job.preemption_count += 1
        job.phase = Phase.PAGED_OUT if saved else Phase.WAITING
        self._running.remove(job)
        self._in.withdraw(job)
        self._offline_waiting[name] = job
        pinned = self.policy.preempted(job.view(self.spec.block_tokens), self.now_s)
        self.free_blocks += held - pinned
        self.result.offline_victims += 1
        return stall_s

    def _admit_offline(self, name: str) -> float:
        """Let a waiting request in; returns the seconds that all wait for its checkpoint."""
        job = self._enter(name)
        saved = self.policy.checkpoints.of(name).saved
        job.computed_tokens = saved * self.spec.block_tokens
        assert self._grow(job, job.computed_tokens), name
        self.result.copied_in_blocks += saved
        return saved * self.spec.block_bytes / self.spec.swap_bytes_per_s

    def _enter(self, name: str) -> CoServedJob:
        job = self._offline_waiting.pop(name)
        self.policy.waiting.take(name)
        job.phase = Phase.RUNNING
        self._running.append(job)
        return job

    # --- Copies ------------------------------------------------------------------------------

    def _start_copies(self, plan: CoServingPlan) -> float:
        """Put the plan's copies on the link; returns their bytes."""
        by_name = {job.arrival.request_id: job for job in self._running}
        for name, count in plan.copy_out.items():
            self.policy.checkpoints.copy(name, count)
            self._out.send(by_name[name], count, self.now_s)
        for name, count in plan.copy_in.items():
            job = by_name.get(name)
            if job is None:
                job = self._enter(name)
                job.is_loading, job.loaded_blocks = True, 0
                assert self._grow(job, job.known_tokens), name
            if count:
                self._in.send(job, count, self.now_s)
        out, loaded = sum(plan.copy_out.values()), sum(plan.copy_in.values())
        self.result.copied_in_blocks += loaded
        return float((out + loaded) * self.spec.block_bytes)

    def _settle_copies(self) -> None:
        """Acknowledge what has arrived."""
        for copy in self._out.ended(self.now_s):
            name = copy.job.arrival.request_id
            self.free_blocks += self.policy.checkpoints.acknowledge(name, copy.blocks)
        for copy in self._in.ended(self.now_s):
            job = copy.job
            job.loaded_blocks += copy.blocks
            saved = self.policy.checkpoints.of(job.arrival.request_id).saved
            if job.loaded_blocks == saved:
                job.computed_tokens = saved * self.spec.block_tokens
                job.is_loading, job.loaded_blocks = False, 0

    # --- Results -----------------------------------------------------------------------------

    def _deliver(self, step: CoServingStep) -> None:
        result = self.result
        result.busy_s += step.end_s - step.start_s
        record = StepRecord(step.start_s, step.end_s, 0, 0)
        result.steps.append(record)
        if step.is_aborting:
            self.policy.aborted()
            for job, _tokens in step.work:
                surplus = job.block_count - self._blocks_for(job.computed_tokens)
                job.block_count -= surplus
                self.free_blocks += surplus
            return
        for job, tokens in step.work:
            job.computed_tokens += tokens
            if job.computed_tokens == job.known_tokens:
                self._emit(job)
            counted = job.computed_tokens + (job.emitted_tokens == job.arrival.output_tokens)
            if counted > job.counted_tokens:
                if job.is_online:
                    record.online_tokens += counted - job.counted_tokens
                else:
                    record.offline_tokens += counted - job.counted_tokens
                job.counted_tokens = counted
        spent_s = step.end_s - step.start_s - step.stall_s
        self.policy.stepped(step.plan, step.load, spent_s, self.now_s)
        self.policy.paced(step.plan, spent_s)

    def _emit(self, job: CoServedJob) -> None:
        """Hand out a token at the end of a step."""
        job.emitted_tokens += 1
        is_online = job.is_online
        if job.emitted_tokens == 1:
            job.first_token_s = self.now_s
        elif is_online:
            self.result.token_gaps_s.append(self.now_s - job.last_emitted_s)
        job.last_emitted_s = self.now_s
        if job.emitted_tokens < job.arrival.output_tokens:
            return
        job.last_token_s = self.now_s
        job.phase = Phase.FINISHED
        self._running.remove(job)
        name, pinned = job.arrival.request_id, 0
        if is_online:
            self.fair.removed(name)
            self.result.served.append(job.served())
        else:
            pinned = self.policy.removed(name)
            self.result.finished_offline.append(job.served())
        self.free_blocks += job.block_count - pinned
        job.block_count = 0
