"""The search for the highest rate that meets the objective: from the trials so far to the next one.

A pure function of what was measured, so it can be resumed from a journal and tried on a virtual
clock. It goes

1. up a *ramp*, the rate doubling every few seconds, until the endpoint falls behind. That brackets
   the rate for the price of about one trial (the paper bisects within 1 to 10 requests/s);
2. where requests queued, slightly above the capacity, until the capacity is known well enough; then
   to the rate that follows, to see the objective met in the steady state;
3. where latency rises without a queue: halving the bracket by interpolation; then a little below
   the estimate, to see the objective met, above it, to see it violated, and by the paper's linear
   steps to both sides.

Whatever contradicts the estimate moves it: all trials count in `estimate.rate`, at every decision.

Source: Aqua section 4.1. Ours: the ramp, the backlog's throughput, one estimate from all trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aqua_profiler.estimate.rate import Estimate, estimate_rate
from aqua_profiler.measure.compliance import is_measured, meets
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.objective import LatencyObjective, Trial, UnloadedLatency

RAMP_SHARE: Final = 0.05
"""Of the budget for one doubling: a ramp of six leaves two thirds."""

LEAST_DOUBLING_S: Final = 2.0
RAMP_BACKLOG: Final = 40
FIRST_BACKLOG: Final = 60.0
"""Of first tokens, per request/s of the capacity; within the bounds below."""

LEAST_BACKLOG: Final = 100
USUAL_BACKLOG: Final = 240
MOST_BACKLOG: Final = 1200
STEADY_REQUESTS: Final = 150
MOST_RUNS: Final = 24

STEADY_BELOW: Final = 0.96
"""A steady trial is made at that share of the estimate. At the estimate itself half of all trials
would fail by definition; a little below, a failure says that the estimate is wrong."""

STEADY_FROM: Final = 0.88
EXCEEDED_AT: Final = 1.15
"""Of the estimate: where a curve's limit has to be seen exceeded, or looked for in vain twice,
before the search is content. From below, a rate that is too low looks like any other."""

EXCEEDED_BY: Final = 1.18
EXCEEDING_TRIES: Final = 2
LEAST_WINDOW: Final = 20
"""Requests of a steady trial, without its warm-up, that can confirm a rate."""

LEAST_PRECISION: Final = 0.1
"""A rate that is less certain makes a partial profile."""

RUN_S: Final = 30.0
"""Of requests: as many as come in that time, within bounds."""

MOST_REQUESTS: Final = 1500
RELATIVE_STEP: Final = 0.04
TRIES_AT_THE_LEAST: Final = 3
LONE_SHARE: Final = 0.35
"""Of the rate at which lone requests follow each other: what a search tries at the least."""
CURVE_PRECISION: Final = 1.5
"""A crossing of curves is exact enough at so many times the precision: its error contains
the scatter of whole trials already."""


REQUESTS_PER_RATE: Final = 170.0
"""Requests that a search may send, per request/s of the rate it finds. A linear sweep in steps of
0.5 with 200 requests at each rate sends 400; the search ends earlier once it is precise."""

LEAST_REQUESTS: Final = 400

DRIFT_SHARE: Final = 0.6
"""Of the budget, for a search on a machine that changes its speed: there more requests in a row say
nothing more, but trials in other minutes do. What is left is for bursts."""

DRIFT_STEP: Final = 0.08
"""Of the rate: how far from it such trials are made, below and above in turn."""

HARDLY_KNOWN: Final = 0.5
FAR_BELOW: Final = 0.6
"""Of a limit. Where next to nothing is known and a trial stayed below that, the rate is doubled."""

GLANCE_REQUESTS: Final = 40
"""Of a trial while next to nothing is known."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The end of a search.

    Attributes:
        estimate: What is known.
        complete: The objective was seen met near the rate, and a limit above it; else the profile
            is partial.
        reason: Why it ended, for people.
        at_cap: The rate is the highest that was allowed, not a limit of the endpoint.
    """

    estimate: Estimate
    complete: bool
    reason: str
    at_cap: bool = False


def next_trial(
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    trials: Sequence[TrialSummary],
    *,
    left_s: float,
    budget_s: float,
    seed: int,
) -> Trial | SearchResult:
    """What to run now, or the end.

    Args:
        objective: What is looked for.
        unloaded: What a lone request takes.
        trials: All so far, in order.
        left_s: Seconds that are left of the budget.
        budget_s: The whole of it.
        seed: Of the search; every trial gets its own from it.
    """
    known = estimate_rate(objective, unloaded, trials)
    planner = _Planner(
        objective, unloaded, trials, known, left_s, budget_s, seed * 1_000 + len(trials)
    )
    if not trials:
        return planner.ramp()
    if len(trials) >= MOST_RUNS:
        return planner.verdict("as many trials as a search may make")
    if left_s < planner.shortest_s:
        return planner.verdict("the budget is spent")
    return planner.next()


@dataclass(frozen=True, slots=True)
class _Planner:
    objective: LatencyObjective
    unloaded: UnloadedLatency
    trials: Sequence[TrialSummary]
    known: Estimate
    left_s: float
    budget_s: float
    seed: int

    @property
    def shortest_s(self) -> float:
        """A trial that could still say something, with its drain."""
        return 2.0 + 3 * self.unloaded.residence_s

    @property
    def _lone_per_s(self) -> float:
        """Requests, one at a time."""
        return 1 / max(self.unloaded.residence_s, 1e-3)

    @property
    def sent(self) -> int:
        """Requests so far."""
        return sum(trial.sent for trial in self.trials)

    def ramp(self) -> Trial:
        """From a rate that a server which takes one request at a time just sustains."""
        objective, budget_s = self.objective, self.budget_s
        start = 0.7 * self._lone_per_s
        return Trial(
            rate_per_s=min(max(start, objective.min_rate_per_s), objective.max_rate_per_s),
            seed=self.seed,
            doubling_s=max(
                min(LEAST_DOUBLING_S, 0.5 * RAMP_SHARE * budget_s),
                min(RAMP_SHARE * budget_s, self.unloaded.residence_s / 3),
            ),
            max_rate_per_s=objective.max_rate_per_s,
            enough_backlog=RAMP_BACKLOG,
            patience=5.0,
            least_s=0.0,
            most_s=0.5 * self.left_s,
        )

    def next(self) -> Trial | SearchResult:
        """After the ramp."""
        known, objective = self.known, self.objective
        if known.rate_per_s is None:
            return self._towards_the_cap()
        if known.rate_per_s >= objective.max_rate_per_s:
            return self._towards_the_cap()
        if self._is_spent():
            return self.verdict(
                "as precise as a machine that changes its speed allows"
                if known.drift
                else "as precise as so many requests allow"
            )
        return self._queue() if known.queueing else self._curve()

    def _towards_the_cap(self) -> Trial | SearchResult:
        cap = self.objective.max_rate_per_s
        if self.known.ok_per_s >= cap:
            return self.verdict("the highest rate allowed meets the objective", at_cap=True)
        highest = max(trial.rate_per_s for trial in self.trials)
        if any(trial.rate_per_s >= cap and is_measured(trial) for trial in self.trials):
            return self._steady(max(self.known.ok_per_s * 1.2, 0.8 * cap))
        return self._steady(min(cap, max(highest, 2 * self.known.ok_per_s)))

    def _is_spent(self) -> bool:
        return self._allowed <= (LEAST_WINDOW if self._is_confirmed() else -0.1 * self.sent)

    @property
    def _allowed(self) -> float:
        """Requests that may still be sent."""
        if self.known.drift and self.left_s > (1 - DRIFT_SHARE) * self.budget_s:
            return math.inf
        rate = self.known.rate_per_s or 0.0
        return max(LEAST_REQUESTS, REQUESTS_PER_RATE * rate) - self.sent

    # --- Queues -------------------------------------------------------------------------

    def _queue(self) -> Trial | SearchResult:
        known = self.known
        assert known.rate_per_s is not None, known
        assert known.capacity is not None, known
        settled = any(
            backlog.starts >= LEAST_BACKLOG - 20
            for trial in self.trials
            if not trial.ramp
            for backlog in trial.backlogs
        )
        if not settled and not self._overshot():
            first = min(max(FIRST_BACKLOG * known.capacity.per_s, LEAST_BACKLOG), USUAL_BACKLOG)
            return self._saturate(round(first))
        if not self._is_confirmed():
            return self._steady(STEADY_BELOW * known.rate_per_s)
        if known.error > self.objective.precision:
            wanted = known.capacity.dispersion / self.objective.precision**2
            have = sum(b.starts for trial in self.trials if not trial.ramp for b in trial.backlogs)
            allowed = self._allowed
            if known.drift:
                wanted = math.inf
            more = min(max(wanted - have, LEAST_BACKLOG), MOST_BACKLOG, max(allowed, LEAST_BACKLOG))
            return self._saturate(round(more))
        return self.verdict("known to the precision asked for")

    def _overshot(self) -> bool:
        """Trials meant to overload did not, twice: the steady ones know better."""
        capacity = self.known.capacity
        assert capacity is not None, self.known
        return sum(not trial.ramp and not trial.backlogs for trial in self.trials) >= 4  # noqa: PLR2004

    def _is_confirmed(self) -> bool:
        """A steady trial near the estimate met the objective."""
        rate = self.known.rate_per_s
        assert rate is not None, self.known
        return any(
            is_measured(trial)
            and meets(self.objective, trial)
            and trial.rate_per_s >= STEADY_FROM * rate
            and trial.window >= LEAST_WINDOW
            for trial in self.trials
        )

    def _saturate(self, starts: int) -> Trial:
        capacity = self.known.capacity
        assert capacity is not None, self.known
        excess = 1.08 + min(0.17, 1.5 * capacity.error)
        # Where a trial above the estimate met the objective, the estimate is too low.
        rate = max(capacity.per_s * excess, 1.15 * self.known.ok_per_s)
        # A backlog of so many at that rate waits (excess - 1) times its length in the end.
        length_s = starts / capacity.per_s
        patience = max(6.0, 2 * (excess - 1) * length_s / self.objective.ttft_s)
        return self._run(
            rate,
            requests=round(2.5 * starts) + 50,
            backlog=starts,
            patience=patience,
            most_s=3 * length_s + 4 * self.unloaded.residence_s + 20,
        )

    # --- Curves -------------------------------------------------------------------------

    def _curve(self) -> Trial | SearchResult:
        known, objective = self.known, self.objective
        assert known.rate_per_s is not None, known
        if known.violated_per_s <= objective.min_rate_per_s * 1.01:
            return self.verdict("the lowest rate allowed violates the objective")
        lone = 1.5 * LONE_SHARE * self._lone_per_s
        in_vain = sum(is_measured(trial) and trial.rate_per_s <= lone for trial in self.trials)
        if not known.ok_per_s and in_vain >= TRIES_AT_THE_LEAST:
            return self.verdict("hardly more than one request at a time violates the objective")
        is_bracketed = self._is_confirmed() and self._is_exceeded()
        if known.error <= CURVE_PRECISION * objective.precision and is_bracketed:
            return self.verdict("known to the precision asked for")
        if known.error > LEAST_PRECISION:
            return self._measure(self._towards_the_limit())
        return self._measure(self._beside_the_estimate())

    def _beside_the_estimate(self) -> float:
        """Where a limit is known well: below it until that is seen, then above it, then both."""
        known = self.known
        assert known.rate_per_s is not None, known
        step = min(self.objective.step_per_s, RELATIVE_STEP * known.rate_per_s)
        if known.drift:
            step = max(step, DRIFT_STEP * known.rate_per_s)
        if not self._is_confirmed():
            # By a little more each time.
            tries = sum(
                is_measured(trial) and STEADY_FROM * known.rate_per_s <= trial.rate_per_s
                for trial in self.trials
            )
            rate = STEADY_BELOW * known.rate_per_s - tries * step
            return max(rate, STEADY_FROM * known.rate_per_s)
        if not self._is_exceeded():
            return EXCEEDED_AT * known.rate_per_s
        # To both sides of the estimate in turn: what is left of the budget goes where it matters.
        side = 1 if sum(trial.rate_per_s > known.rate_per_s for trial in self.trials) % 2 else -1
        return known.rate_per_s + side * step

    def _towards_the_limit(self) -> float:
        """Where a limit is hardly known: from below, a trial that is cut off teaches less."""
        known = self.known
        assert known.rate_per_s is not None, known
        low, high = known.ok_per_s, known.rate_per_s
        if low < known.violated_per_s:
            high = min(high, known.violated_per_s)
        if not low:
            # A server that takes one request at a time keeps up with that much.
            return max(
                high * max(0.5, 1 - known.error), 0.35 / max(self.unloaded.residence_s, 1e-3)
            )
        if self._is_far_below() and 2 * low < known.violated_per_s:
            return max(2 * low, math.sqrt(low * high))
        if low < 0.9 * high:
            return math.sqrt(low * high)
        return (1.04 if self._is_exceeded() else EXCEEDED_AT) * known.rate_per_s

    def _is_exceeded(self) -> bool:
        """A trial a little above the estimate violated the objective, or several met it."""
        rate = self.known.rate_per_s
        assert rate is not None, self.known
        near = [
            trial
            for trial in self.trials
            if not trial.ramp and trial.rate_per_s <= EXCEEDED_BY * rate
        ]
        if any(trial.rate_per_s > rate and not meets(self.objective, trial) for trial in near):
            return True
        return sum(trial.rate_per_s > 1.1 * rate for trial in near) >= EXCEEDING_TRIES

    def _is_far_below(self) -> bool:
        """Hardly anything is known, but that the highest rate that met the limits did so easily."""
        objective = self.objective
        highest = [trial for trial in self.trials if trial.rate_per_s == self.known.ok_per_s]
        return self.known.error > HARDLY_KNOWN and any(
            (trial.tbt_s or 0.0) < FAR_BELOW * objective.tbt_s
            and trial.ttft_s < FAR_BELOW * objective.ttft_s
            for trial in highest
        )

    # --- Trials ---------------------------------------------------------------------------

    def _steady(self, rate: float) -> Trial:
        return self._run(rate, requests=STEADY_REQUESTS, backlog=0, patience=5.0, most_s=240.0)

    def _measure(self, rate: float) -> Trial:
        """For quantiles of tokens: as long as a third of what is left allows."""
        most_s = max(10.0, 0.3 * self.left_s)
        least = LEAST_REQUESTS / 4 if self.known.error < HARDLY_KNOWN else GLANCE_REQUESTS
        requests = round(max(min(RUN_S * rate, MOST_REQUESTS, self._allowed), least))
        return self._run(rate, requests=requests, backlog=0, patience=5.0, most_s=most_s)

    def _run(
        self, rate: float, *, requests: int, backlog: int, patience: float, most_s: float
    ) -> Trial:
        objective = self.objective
        return Trial(
            rate_per_s=min(max(rate, objective.min_rate_per_s), objective.max_rate_per_s),
            seed=self.seed,
            enough_requests=requests,
            enough_backlog=backlog,
            patience=patience,
            least_s=min(10.0, 0.1 * self.left_s),
            # What is queued at the end has to be answered within the budget too.
            most_s=max(1.0, min(most_s, 0.8 * self.left_s - self.unloaded.residence_s)),
        )

    def verdict(self, reason: str, *, at_cap: bool = False) -> SearchResult:
        """The end, as far as it came."""
        known = self.known
        near = known.rate_per_s is not None and self._is_confirmed()
        near = near and known.error <= LEAST_PRECISION
        complete = at_cap or near
        if at_cap:
            known = Estimate(
                self.objective.max_rate_per_s,
                0.0,
                None,
                queueing=False,
                capacity=None,
                ok_per_s=known.ok_per_s,
                violated_per_s=known.violated_per_s,
            )
        return SearchResult(known, complete, reason, at_cap)
