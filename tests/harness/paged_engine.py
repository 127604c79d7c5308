"""A counting engine under a fair policy: requests, blocks, a token budget, and nothing else.

It does what an adapter does (events, one decision per step, admission in order) and checks at every
step what holds for any policy: memory is never exceeded, and only listed requests come in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aqua_schedulers.cfs import (
    EngineView,
    FairPolicy,
    PagingRates,
    PagingTier,
    PreemptionMode,
    RequestView,
)


@dataclass(slots=True)
class Request:
    """A request that generates `output_tokens`, from step `arrival` on."""

    name: str
    arrival: int
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    tenant: str = ""
    emitted: int = 0
    computed: int = 0
    blocks: int = 0
    first_step: int | None = None
    last_step: int | None = None
    served_steps: list[int] = field(default_factory=list)
    outs: int = 0

    @property
    def known(self) -> int:
        """Tokens to hold before the next can be sampled."""
        return self.prompt_tokens + self.emitted


@dataclass(slots=True)
class PagedEngine:
    """Serves `requests` to the end by `run`.

    Attributes:
        log: Every decision that said something, with its step.
        most_idle: Longest run of steps that left budget unused while somebody outside would have
            fitted beside the growth of all inside.
    """

    policy: FairPolicy
    requests: list[Request]
    block_count: int
    block_tokens: int = 4
    budget: int = 32
    max_running: int = 16
    location: PagingTier = PagingTier.PEER
    store_blocks: int = 2**40
    rates: PagingRates | None = None
    step: int = 0
    log: list[tuple[int, object]] = field(default_factory=list)
    most_idle: int = 0
    outside: dict[str, Request] = field(default_factory=dict)
    inside: dict[str, Request] = field(default_factory=dict)
    _listed: tuple[str, ...] = ()
    _idle: int = 0

    def run(self, limit: int = 100_000) -> None:
        """Step until everything is served."""
        coming = sorted(self.requests, key=lambda each: each.arrival)
        while coming or self.outside or self.inside:
            while coming and coming[0].arrival <= self.step:
                request = coming.pop(0)
                self.outside[request.name] = request
                self.policy.added(self.view(request))
            self.advance()
            self.step += 1
            assert self.step < limit, "somebody is never served"

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.block_count - sum(each.blocks for each in self.inside.values())

    def advance(self) -> None:
        """One step."""
        left: set[str] = set()
        if self.policy.begin_step():
            decision = self.policy.decide(self.engine_view())
            if decision.preempt or decision.admit:
                self.log.append((self.step, decision))
            for name, mode in decision.preempt:
                self.preempt(self.inside[name], mode)
                left.add(name)
            self._listed = decision.admit
            assert not left & set(decision.admit)
        self._grow_or_preempt()
        for name in self._listed:
            if name not in self.outside:
                continue
            request = self.outside[name]
            need = self.missing(request)
            if need > self.free or len(self.inside) >= self.max_running:
                break
            request.blocks = need
            self.inside[name] = self.outside.pop(name)
            self.policy.admitted(name)
        assert self.free >= 0
        assert len(self.inside) <= self.max_running
        self._compute()

    def missing(self, request: Request) -> int:
        """Blocks for everything known."""
        return -(-request.known // self.block_tokens)

    def preempt(self, request: Request, mode: PreemptionMode) -> None:
        """Preempt."""
        del self.inside[request.name]
        if mode is PreemptionMode.RECOMPUTE:
            request.computed = 0
        request.blocks = 0
        request.outs += 1
        self.outside[request.name] = request
        self.policy.preempted(self.view(request))

    def engine_view(self) -> EngineView:
        """As the policy sees it."""
        return EngineView(
            free_blocks=self.free,
            token_budget=self.budget,
            max_running=self.max_running,
            running_count=len(self.inside),
            running=lambda: [self.view(each) for each in self.inside.values()],
            store_room_blocks=self.store_blocks,
            location=self.location,
            rates=self.rates,
            output_tokens=lambda: [(each.name, each.emitted) for each in self.inside.values()],
        )

    def view(self, request: Request) -> RequestView:
        """As the policy sees it."""
        is_inside = request.name in self.inside
        return RequestView(
            request.name,
            float(request.arrival),
            request.prompt_tokens,
            output_tokens=request.emitted,
            computed_tokens=request.computed,
            held_blocks=request.blocks,
            missing_blocks=0 if is_inside else self.missing(request),
            weight=request.weight,
            tenant=request.tenant,
        )

    def _grow_or_preempt(self) -> None:
        """Blocks for the next token; without one the latest goes, as in a stock engine."""
        for request in list(self.inside.values()):
            while request.name in self.inside and self.missing(request) > request.blocks:
                if self.free:
                    request.blocks += 1
                else:
                    self.preempt(list(self.inside.values())[-1], PreemptionMode.RECOMPUTE)

    def _compute(self) -> None:
        budget = self.budget
        for request in sorted(self.inside.values(), key=lambda each: each.emitted == 0):
            tokens = min(budget, request.known - request.computed)
            if not tokens:
                continue
            budget -= tokens
            request.computed += tokens
            request.served_steps.append(self.step)
            if request.computed < request.known:
                continue
            request.emitted += 1
            if request.first_step is None:
                request.first_step = self.step
            if request.emitted == request.output_tokens:
                request.last_step = self.step
                del self.inside[request.name]
                self.policy.removed(request.name, request.emitted)
        growth = sum(
            -(-(each.known + 8) // self.block_tokens) - each.blocks for each in self.inside.values()
        )
        fits = [
            self.missing(each) + 4 <= self.free - growth and len(self.inside) < self.max_running
            for each in self.outside.values()
        ]
        self._idle = self._idle + 1 if budget and fits and all(fits) else 0
        self.most_idle = max(self.most_idle, self._idle)
