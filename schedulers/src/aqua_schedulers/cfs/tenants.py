"""Tenants share an engine by the tokens that they get, in the proportion of their weights.

Each tenant has a *counter*: what it has been served, `input_token_cost` for each prompt token that
was admitted and `output_token_cost` for each token generated, over its weight. The tenant with the
smallest counter goes first. Work is what counts, not requests: a hundred short ones and a long one
may come to the same, and a tenant gets no more by cutting its work into pieces.

No tenant saves up. One that begins to wait is *lifted* to the least counter of those that waited
before; where none did, all had what they asked for, and all begin alike, at the greatest counter.
Being idle, or asking for less than one's share, is no claim on the time after, and using what no
other wanted is no debt.

Tokens that a preemption has computed again are the engine's affair and charged to none. Counters
of tenants that have left are forgotten once they are behind, which is where they would be lifted
from, and beyond `MAX_REMEMBERED` others the least of them first.

Promises, for two tenants that wait all along: what they are served differs by no more than twice
the greater of the dearest prompt and a full memory's worth of output, and `lead_tokens`, each by
the smaller weight. (The tests say so of random histories.)

Costs: O(1) for an event; a decision charges what its engine tells of the running requests.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: the Virtual Token
Counter, Algorithm 2 (weighted: section 4.4). Ours: where none waits, the paper takes the counter of
the one that waited last, which makes others pay for tokens that none else wanted; and preemption,
which the paper leaves out. A running request makes room for another tenant's once its own tenant
leads by `lead_tokens`, or turns would cost a page-out each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from aqua_schedulers.cfs.views import RequestView

MAX_REMEMBERED: Final = 4096
"""Tenants without requests whose counters are kept, for they lead: a few hundred bytes each. When
there are more, the one that leads by least is treated as one that never came. Doubled, twice the
memory that callers with ever new names can take."""

FEW: Final = 64
"""Counters that are kept without a look at whether they are of use. Doubled, the least that is kept
doubles, to some 10 KB."""


LEAST_WEIGHT: Final = 1e-6
"""A counter lifted to that of a much lighter tenant must still tell single tokens apart, or those
that share from there on get whatever falls to them. Doubled, it does so for twice as many tokens of
the lightest, of which it is some 10^10."""

MOST_WEIGHT: Final = 1e6
"""Likewise for the heaviest beside others. Doubled, its single tokens blur twice as early."""


class TenantSettings(BaseModel):
    """What tenants get, and what tokens cost; immutable.

    Attributes:
        weights: Shares of tenants by name, under contention.
        default_weight: Of every other.
        input_token_cost: Of a prompt token; the paper's 1.
        output_token_cost: Of a generated one; the paper's 2, for decoding computes less at a time.
        lead_tokens: Weighted tokens by which a tenant must lead before its running requests make
            room for another's. Doubled, fewer page-outs, and a burst of one tenant is evened out
            over twice the time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: dict[str, float] = Field(default_factory=dict)
    default_weight: float = Field(default=1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    input_token_cost: float = Field(default=1.0, ge=0, le=1e6)
    output_token_cost: float = Field(default=2.0, gt=0, le=1e6)
    lead_tokens: float = Field(default=4096.0, ge=0, le=1e12)

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        wrong = {
            name: weight
            for name, weight in weights.items()
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT
        }
        if wrong:
            raise ValueError(f"weights are from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {wrong}")
        return weights

    def weight_of(self, tenant: str) -> float:
        """The share of a tenant."""
        return self.weights.get(tenant, self.default_weight)


class _Request:
    __slots__ = ("charged_output", "is_admitted", "prompt_tokens", "tenant")

    def __init__(self, tenant: str, prompt_tokens: int) -> None:
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.charged_output = 0
        self.is_admitted = False


class TenantAccounts:
    """The counters of all tenants; pure.

    Attributes:
        counters: What each has been served, weighted; read only.
    """

    def __init__(self, settings: TenantSettings) -> None:
        self.settings: Final = settings
        self.counters: dict[str, float] = {}
        self._requests: dict[str, _Request] = {}
        self._present: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        # They wait since after the last decision; in order.
        self._entering: dict[str, None] = {}
        self._floor = self._greatest = 0.0
        self._forget_from = FEW

    # --- Events ------------------------------------------------------------------------------

    def added(self, request: RequestView) -> None:
        """A request arrived."""
        tenant = request.tenant
        self._requests[request.request_id] = _Request(tenant, request.prompt_tokens)
        self._present[tenant] = self._present.get(tenant, 0) + 1
        self.counters.setdefault(tenant, self._floor)
        self._begin_to_wait(tenant)

    def admitted(self, request_id: str) -> None:
        """A waiting request holds memory; its prompt is charged the first time."""
        request = self._requests[request_id]
        self._end_to_wait(request.tenant)
        if not request.is_admitted:
            request.is_admitted = True
            self._charge(request.tenant, request.prompt_tokens * self.settings.input_token_cost)

    def preempted(self, request_id: str, output_tokens: int) -> None:
        """A running request waits again."""
        self.generated(request_id, output_tokens)
        self._begin_to_wait(self._requests[request_id].tenant)

    def removed(self, request_id: str, output_tokens: int, *, was_waiting: bool) -> None:
        """A request has ended."""
        self.generated(request_id, output_tokens)
        tenant = self._requests.pop(request_id).tenant
        if was_waiting:
            self._end_to_wait(tenant)
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            self._forget_left()

    def generated(self, request_id: str, output_tokens: int) -> None:
        """A request has generated so many tokens by now."""
        request = self._requests[request_id]
        new = output_tokens - request.charged_output
        if new > 0:
            request.charged_output = output_tokens
            self._charge(request.tenant, new * self.settings.output_token_cost)

    # --- Decisions ---------------------------------------------------------------------------

    def begin_decision(self, output_tokens: Iterable[tuple[str, int]]) -> None:
        """Charge what running requests have generated, then lift those that have come to wait."""
        for request_id, tokens in output_tokens:
            self.generated(request_id, tokens)
        counters = self.counters
        waited = [counters[name] for name in self._waiting if name not in self._entering]
        self._floor = max(self._floor, min(waited, default=self._greatest))
        for tenant in self._entering:
            counters[tenant] = max(counters[tenant], self._floor)
        self._entering.clear()

    def admission_cost(self, request: RequestView, *, output_tokens: int) -> float:
        """What a request will add to its tenant's counter: its prompt, unless it is charged."""
        settings = self.settings
        tokens = output_tokens * settings.output_token_cost
        if not self._requests[request.request_id].is_admitted:
            tokens += request.prompt_tokens * settings.input_token_cost
        return tokens / settings.weight_of(request.tenant)

    @property
    def waiting(self) -> Mapping[str, int]:
        """Requests that wait, by tenant."""
        return self._waiting

    def lead(self, tenant: str) -> float:
        """How far a running request's tenant may be ahead, in its counter's measure."""
        return self.settings.lead_tokens / self.settings.weight_of(tenant)

    # --- Inside ------------------------------------------------------------------------------

    def _charge(self, tenant: str, tokens: float) -> None:
        counter = self.counters[tenant] + tokens / self.settings.weight_of(tenant)
        self.counters[tenant] = counter
        self._greatest = max(self._greatest, counter)

    def _begin_to_wait(self, tenant: str) -> None:
        count = self._waiting.get(tenant, 0)
        self._waiting[tenant] = count + 1
        if not count:
            self._entering[tenant] = None

    def _end_to_wait(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._entering.pop(tenant, None)

    def _forget_left(self) -> None:
        """Forget who has left and is behind; of too many others, those that lead by least."""
        if len(self.counters) < self._forget_from:
            return
        left = [name for name in self.counters if name not in self._present]
        leading = [name for name in left if self.counters[name] > self._floor]
        leading.sort(key=self.counters.__getitem__)
        kept = set(leading[max(0, len(leading) - MAX_REMEMBERED) :])
        for name in left:
            if name not in kept:
                del self.counters[name]
        # Looking at all of them costs as much as as many have come since.
        self._forget_from = 2 * len(self.counters) + FEW
