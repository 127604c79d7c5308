"""One engine with the semantics of vLLM V1, on a virtual clock.

Every step is planned under a token budget: running requests first, in order of admission, each
with as much of its prompt as fits (chunked prefill) or its one next token; then waiting requests.
When a running request finds no block, the latest admitted one is preempted; none is admitted in
a step that preempted for that reason. A request is admitted if its whole prompt would fit.

Which requests leave and which may come in is the policy's decision (`aqua_schedulers.cfs`), taken
once per step as an adapter takes it in a real engine; first come, first served is vLLM's own. Under
a policy that preempts, decodes run before prompts: section 7's partition of the batch.

Steps are planned ahead: with asynchronous scheduling (vLLM's default) the step after the running
one is already planned, so a request that arrives now waits for two step ends, and blocks come free
one step after the last token was computed.

The engine is passive: `advance` moves it to its next event. Several engines are a loop over the
earliest event (`serve_routed`).

Source: vLLM `v1/core/sched/scheduler.py`, read for its rules (order, preemption, budget).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from aqua_protocol.errors import CapacityError, ConfigError
from aqua_schedulers.cfs import (
    EngineView,
    FairPolicy,
    PagingRates,
    PagingTier,
    PolicyName,
    PreemptionMode,
    RequestView,
    policy_named,
)
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, Job, Phase, Served
from aqua_simulator.timing.iteration import Chunk, IterationTime, ScheduledBatch


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The knobs of an engine, named as vLLM names them.

    Attributes:
        max_num_batched_tokens: Token budget of a step.
        steps_in_flight: 2 with asynchronous scheduling, 1 without.
        kv_bytes_per_token: For copies over a link.
        may_recompute: A victim is computed again where that is cheaper than its copies; False
            swaps whatever the store has room for.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    steps_in_flight: int = 2
    kv_bytes_per_token: int = 131_072
    may_recompute: bool = True


@dataclass(slots=True)
class _Step:
    """A planned step: when it ends, and which requests get a token."""

    end_s: float
    sampled: list[tuple[Job, int]]


@dataclass(slots=True)
class Engine:
    """A serving engine; `submit` requests in order of arrival, then `advance`.

    Attributes:
        store: Where preempted contexts go; None computes them again.
        policy: Decides which requests hold memory; this engine's own object.
        finished: Served requests, in order of their last token.
        busy_s: Time in which a step was running.
        copy_s: Time that steps took longer because of copies.
        slowdown, shared_token_s: Factor on the time of a step, and seconds longer for each of its
            tokens, because of what others copy beside it.
        copied_tokens, token_count: Copied to and from the store, and computed.
    """

    name: str
    settings: EngineSettings
    time_of: IterationTime
    memory: PagedMemory
    store: PageStore | None = None
    policy: FairPolicy = field(default_factory=lambda: policy_named(PolicyName.FCFS))
    now_s: float = 0.0
    finished: list[Served] = field(default_factory=list)
    busy_s: float = 0.0
    step_count: int = 0
    preemption_count: int = 0
    copy_s: float = 0.0
    slowdown: float = 1.0
    shared_token_s: float = 0.0
    copied_tokens: int = 0
    token_count: int = 0
    _names: set[str] = field(default_factory=set, repr=False)
    _incoming: deque[Job] = field(default_factory=deque, repr=False)
    _waiting: dict[str, Job] = field(default_factory=dict, repr=False)
    _listed: tuple[str, ...] = field(default=(), repr=False)
    _running: list[Job] = field(default_factory=list, repr=False)
    _in_flight: deque[_Step] = field(default_factory=deque, repr=False)
    _copy_tokens: int = field(default=0, repr=False)
    _prefill_tokens_per_s: float = field(default=0.0, repr=False)

    def submit(self, arrival: Arrival) -> None:
        """Hand over a request that arrives at `arrival.arrival_s`, not before earlier ones.

        Raises:
            CapacityError: It can never fit in memory.
            ConfigError: A request of that name was here before.
        """
        if arrival.request_id in self._names:
            raise ConfigError(
                f"{self.name} got request {arrival.request_id!r} twice",
                remedy="Give every request of a trace an id of its own.",
            )
        need = self.memory.blocks_for(arrival.prompt_tokens + arrival.output_tokens)
        if need > self.memory.block_count:
            raise CapacityError(
                f"request {arrival.request_id} needs {need} blocks, {self.name} has "
                f"{self.memory.block_count}",
                remedy="Use a larger GPU or drop the request.",
            )
        self._names.add(arrival.request_id)
        job = Job(arrival)
        if arrival.stored_tokens and self.store is not None:
            job.phase, job.paged_tokens = Phase.PAGED_OUT, arrival.stored_tokens
        self._incoming.append(job)

    @property
    def request_count(self) -> int:
        """Requests that run, wait or are on their way."""
        return len(self._waiting) + len(self._incoming) + len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests that have arrived and are not in the batch."""
        return len(self._waiting)

    @property
    def next_event_s(self) -> float:
        """When something happens next: a step ends or a request arrives; infinity when idle."""
        step_s = self._in_flight[0].end_s if self._in_flight else inf
        arrival_s = self._incoming[0].arrival.arrival_s if self._incoming else inf
        return min(step_s, max(arrival_s, self.now_s))

    def advance(self) -> None:
        """Process the next event and plan what can be planned then."""
        self.now_s = self.next_event_s
        assert self.now_s < inf, f"{self.name} has nothing to do"
        while self._in_flight and self._in_flight[0].end_s <= self.now_s:
            self._deliver(self._in_flight.popleft())
        while self._incoming and self._incoming[0].arrival.arrival_s <= self.now_s:
            job = self._incoming.popleft()
            self._waiting[job.arrival.request_id] = job
            self.policy.added(self._view(job))
        self._plan_ahead()

    def replan(self, now_s: float) -> None:
        """Plan what can be planned now that memory has come back, not before the last event."""
        self.now_s = max(self.now_s, now_s)
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        while len(self._in_flight) < self.settings.steps_in_flight:
            step = self._plan_step()
            if step is None:
                return
            self._in_flight.append(step)

    def run(self, arrivals: Iterable[Arrival]) -> list[Served]:
        """Serve all of them alone, to the end."""
        for arrival in sorted(arrivals, key=lambda each: each.arrival_s):
            self.submit(arrival)
        while self.next_event_s < inf:
            self.advance()
        assert not self._waiting, self.name
        assert not self._running, self.name
        return self.finished

    # --- Planning ----------------------------------------------------------------------------

    def _plan_step(self) -> _Step | None:
        budget = self.settings.max_num_batched_tokens
        chosen: list[tuple[Job, int]] = []
        preempted = False
        if self.policy.begin_step():
            self._follow_policy()
        for job in list(self._running):
            if budget == 0:
                break
            if job.phase is not Phase.RUNNING or job.is_planned_out:
                continue
            tokens = min(job.pending_tokens, budget)
            while not self.memory.grow(job, job.computed_tokens + tokens):
                victim = self._running[-1]
                self._preempt(victim)
                preempted = True
                if victim is job:
                    break
            else:
                chosen.append((job, tokens))
                budget -= tokens
        if not preempted:
            self._admit(chosen, budget)
        return self._launch(chosen) if chosen else None

    def _follow_policy(self) -> None:
        decision = self.policy.decide(
            EngineView(
                free_blocks=self.memory.free_count,
                token_budget=self.settings.max_num_batched_tokens,
                max_running=self.settings.max_num_seqs,
                running_count=len(self._running),
                running=lambda: [self._view(job) for job in self._running],
                store_room_blocks=self._store_room_blocks,
                location=PagingTier.NOWHERE if self.store is None else self.store.location,
                rates=self._rates(),
            )
        )
        self._listed = decision.admit
        if decision.preempt:
            by_name = {job.arrival.request_id: job for job in self._running}
            for name, mode in decision.preempt:
                self._preempt(by_name[name], mode)
        if decision.admit:
            # Stable: a prompt admitted earlier must not take the token of a decode resumed later.
            self._running.sort(key=lambda job: job.emitted_tokens == 0)

    def _view(self, job: Job) -> RequestView:
        is_inside = job.phase is Phase.RUNNING
        arrival = job.arrival
        return RequestView(
            arrival.request_id,
            arrival.arrival_s,
            arrival.prompt_tokens,
            output_tokens=job.emitted_tokens,
            computed_tokens=job.computed_tokens if is_inside else job.paged_tokens,
            held_blocks=job.block_count,
            missing_blocks=0 if is_inside else self.memory.blocks_for(job.known_tokens),
            is_pinned=is_inside and job.is_planned_out,
        )

    @property
    def _store_room_blocks(self) -> int:
        if self.store is None:
            return 0
        return (self.store.capacity_tokens - self.store.used_tokens) // self.memory.block_tokens

    def _rates(self) -> PagingRates | None:
        """What a link and this engine's prefill would measure."""
        if self.store is None or not self.settings.may_recompute:
            return None
        if self._prefill_tokens_per_s == 0.0:
            tokens = self.settings.max_num_batched_tokens
            spent_s = self.time_of(ScheduledBatch((Chunk(tokens, 0),), 0, 0, 1))
            self._prefill_tokens_per_s = tokens / spent_s
        return PagingRates(
            self.store.link_bytes_per_s,
            self.settings.kv_bytes_per_token * self.memory.block_tokens,
            self._prefill_tokens_per_s,
        )

    def _admit(self, chosen: list[tuple[Job, int]], budget: int) -> None:
        for name in self._listed:
            job = self._waiting.get(name)
            if job is None:
                continue
            if budget == 0 or len(self._running) >= self.settings.max_num_seqs:
                return
            if job.phase is Phase.PAGED_OUT:
                if not self.memory.grow(job, job.paged_tokens):
                    return
                self._page_in(job)
            else:
                if not self.memory.fits(job):
                    return
                self.memory.hold_cached(job)
            tokens = min(job.pending_tokens, budget)
            if not self.memory.grow(job, job.computed_tokens + tokens):
                # Paged in, but no room for one more token: it runs as soon as there is.
                tokens = 0
            del self._waiting[name]
            self.policy.admitted(name)
            job.phase = Phase.RUNNING
            if job.scheduled_s != job.scheduled_s:  # NaN: never scheduled before
                job.scheduled_s = self.now_s
            self._running.append(job)
            if tokens:
                chosen.append((job, tokens))
                budget -= tokens

    def _launch(self, chosen: list[tuple[Job, int]]) -> _Step:
        batch = batch_of(chosen)
        sampled: list[tuple[Job, int]] = []
        for job, tokens in chosen:
            job.computed_tokens += tokens
            if job.computed_tokens == job.known_tokens:
                job.emitted_tokens += 1
                sampled.append((job, job.emitted_tokens))
            self.memory.publish_prefix(job)
        spent = self.time_of(batch) * self.slowdown + self.shared_token_s * batch.tokens
        self.token_count += batch.tokens
        if self._copy_tokens and self.store is not None:
            copied = self._copy_tokens * self.settings.kv_bytes_per_token
            copy_s = copied / self.store.link_bytes_per_s
            beside_copy = spent + copied * self.store.lost_s_per_byte
            with_copy = max(beside_copy, copy_s) if self.store.is_overlapped else spent + copy_s
            self.copy_s += with_copy - spent
            spent = with_copy
            self.copied_tokens += self._copy_tokens
            self._copy_tokens = 0
        start = max(self.now_s, self._in_flight[-1].end_s if self._in_flight else self.now_s)
        self.busy_s += spent
        self.step_count += 1
        return _Step(start + spent, sampled)

    def _preempt(self, job: Job, mode: PreemptionMode = PreemptionMode.SWAP) -> None:
        """Take a request out of memory; its context is stored if there is a store with room."""
        self._running.remove(job)
        self.preemption_count += 1
        job.preemption_count += 1
        tokens = job.computed_tokens
        paged = (
            self.store is not None
            and mode is PreemptionMode.SWAP
            and tokens > 0
            and self.store.put(tokens)
        )
        self.memory.release(job, remember=not paged)
        if paged:
            job.phase = Phase.PAGED_OUT
            job.paged_tokens = tokens
            self._copy_tokens += tokens
        else:
            job.phase = Phase.WAITING
        self._waiting[job.arrival.request_id] = job
        self.policy.preempted(self._view(job))

    def _page_in(self, job: Job) -> None:
        assert self.store is not None
        # What was stored before the request came is a cached prefix, and stays stored.
        self.store.take(job.paged_tokens, keep=job.preemption_count == 0)
        self._copy_tokens += job.paged_tokens
        job.computed_tokens = job.paged_tokens
        job.paged_tokens = 0

    # --- Results -----------------------------------------------------------------------------

    def _deliver(self, step: _Step) -> None:
        for job, number in step.sampled:
            if number == 1:
                job.first_token_s = step.end_s
            if number == job.arrival.output_tokens:
                job.last_token_s = step.end_s
                job.phase = Phase.FINISHED
                if job in self._running:
                    self._running.remove(job)
                    self.memory.release(job)
                else:
                    # Preempted after its last token was planned: nothing is left to compute.
                    del self._waiting[job.arrival.request_id]
                    if job.paged_tokens and self.store is not None:
                        self.store.take(job.paged_tokens)
                self.policy.removed(job.arrival.request_id)
                self.finished.append(job.served())


def batch_of(work: Iterable[tuple[Job, int]]) -> ScheduledBatch:
    """What a step computes that gives these requests so many tokens each."""
    chunks: list[Chunk] = []
    decoding = context = sampled = 0
    for job, tokens in work:
        if tokens == 1 and job.emitted_tokens:
            decoding += 1
            context += job.computed_tokens + 1
        else:
            chunks.append(Chunk(tokens, job.computed_tokens))
        sampled += job.computed_tokens + tokens == job.known_tokens
    return ScheduledBatch(tuple(chunks), decoding, context, sampled)


def serve_routed(engines: Sequence[Engine], arrivals: Iterable[Arrival]) -> list[Served]:
    """Serve all arrivals on several engines and one clock; requests in order of their last token.

    Each request goes on arrival, for good, to the engine with the fewest requests. Ties go by the
    engines' names, so that a run is the same run every time.
    """
    queue = sorted(arrivals, key=lambda each: each.arrival_s)[::-1]
    while True:
        earliest = min(engines, key=lambda each: (each.next_event_s, each.name))
        if queue and queue[-1].arrival_s <= earliest.next_event_s:
            chosen = min(engines, key=lambda each: (each.request_count, each.name))
            chosen.submit(queue.pop())
        elif earliest.next_event_s < inf:
            earliest.advance()
        else:
            break
    served = [each for engine in engines for each in engine.finished]
    return sorted(served, key=lambda each: (each.last_token_s, each.request_id))
