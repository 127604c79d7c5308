"""The search for the highest rate that meets the objective: from the trials so far to the next one.

A pure function of what was measured, so it can be resumed from a journal and tried on a virtual
clock. It goes

1. up a *ramp*, the rate doubling every few seconds, until the endpoint falls behind. That brackets
   the rate for the price of about one trial (the paper bisects within 1 to 10 requests/s);
2. where requests queued, slightly above the capacity, until the capacity is known well enough; then
   to the rate that follows, to see the objective met in the steady state;
3. where latency rises without a queue: up from below; then a little below the estimate, to see the
   objective met, above it, to see it violated, and by the paper's linear steps to both sides.

Whatever contradicts the estimate moves it: all trials count in `estimate.rate`, at every decision.

Source: Aqua section 4.1. Ours: the ramp, the backlog's throughput, one estimate from all trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from aqua_profiler.estimate.rate import Estimate, estimate_rate, is_comparable
from aqua_profiler.estimate.speed_drift import LEAST_TRIALS
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

# --- Ramps ------------------------------------------------------------------------------

RAMP_SHARE: Final = 0.05
"""Share of the budget for one doubling of a ramp: one of six leaves two thirds. Doubled, ramps eat
short budgets."""

LEAST_DOUBLING_S: Final = 2.0
"""Seconds of a doubling, where a short budget does not take less. Twice as slow ramps send more
requests for the same bracket."""

RAMP_BACKLOG: Final = 40
"""First tokens of a backlog that end a ramp: enough for a first capacity, to a third. Doubled,
ramps send more for a bracket that later trials narrow anyway."""

# --- Queues -----------------------------------------------------------------------------

# First tokens of a backlog: in the first as many as the capacity starts in `BACKLOG_S` seconds,
# from `LEAST_BACKLOG` to `USUAL_BACKLOG`; later up to `MOST_BACKLOG`, a bound on one trial. Chosen
# by hand; with the least doubled, slow servers need most of their requests for one.
BACKLOG_S: Final = 60.0
LEAST_BACKLOG: Final = 100
USUAL_BACKLOG: Final = 240
MOST_BACKLOG: Final = 1200

OVERLOAD: Final = (1.08, 0.17, 1.5)
"""Of the capacity, the load at which requests queue: 8% above it, and up to 17% more, at 1.5 times
its relative error. Twice as far above, the wait outgrows patience before the backlog is long."""

# --- Steady states ----------------------------------------------------------------------

STEADY_BELOW: Final = 0.96
"""A steady trial is made at that share of the estimate. At the estimate itself half of all trials
would fail by definition; a little below, a failure says that the estimate is wrong."""

STEADY_FROM: Final = 0.88
"""Share of the estimate from which a steady trial confirms it. Twice as far below, it would meet
the objective whatever the estimate's error is."""

STEADY_TO: Final = 1.04
"""Share of an estimate of a queue's limit up to which a trial confirms it: a queue that has just
begun to grow meets the objective for a while. Twice as far above, one search of four on a server of
16 places that began 15% above the truth was 9% off."""

STEADY_REQUESTS: Final = 150
"""Requests of a trial that confirms a rate that a queue allows, chosen by hand. Doubled, the
confirmation costs as much as a backlog."""

LEAST_WINDOW: Final = 20
"""Requests of a steady trial, without its warm-up, that can confirm a rate: a median of fewer is
chance. Chosen by hand; doubled, slow servers confirm later."""

EXCEEDED_AT: Final = 1.15
"""Of the estimate: where a limit of tokens has to be seen exceeded, or looked for in vain twice,
before the search is content. From below, a rate that is too low looks like any other: without this
5 of 52 searches were beyond 5% instead of 2."""

EXCEEDED_RANGE: Final = (1.1, 1.18)
"""Shares of the estimate about `EXCEEDED_AT`: the estimate moves a little after the look."""

EXCEEDING_TRIES: Final = 2
"""Trials in that range that may meet the objective by chance before it is taken as exceeded.
Doubled, servers whose tokens hardly slow down spend all their requests there."""

RELATIVE_STEP: Final = 0.04
"""Share of the rate, the largest linear step: section 4.1 steps by 0.5 of up to 10 requests/s.
Doubled, trials beside the estimate say less of it."""

# --- How long ---------------------------------------------------------------------------

TRIAL_S: Final = 30.0
"""Seconds: a trial of token times has as many requests as come in that time, within the next two.
Doubled, the requests are spent in half as many trials, which say less of how the machine
changes."""

LEAST_TRIAL_REQUESTS: Final = 100
"""Requests of a trial of token times, for a p99 of gaps. Doubled, slow servers need most of their
requests for one."""

MOST_TRIAL_REQUESTS: Final = 1500
"""Requests of any trial of token times: a bound. Doubled, fast servers make half as many trials."""

MOST_TRIALS: Final = 24
"""Trials of a search: three times the usual number; a bound, also when doubled."""

# Requests that a search may send: so many per request/s of the rate it finds, at least the second
# number. Doubled, it is hardly cheaper than a linear sweep, which sends 400 per request/s (steps of
# 0.5, 200 requests at each rate); mostly it is precise before.
REQUESTS_PER_RATE: Final = 170.0
LEAST_REQUESTS: Final = 400

# --- When it is known -------------------------------------------------------------------

TOKEN_PRECISION: Final = 1.5
"""A limit of token times is exact enough at so many times the precision: its error contains the
straight line's already. At 1 searches spend all their requests for the same rates; doubled, they
end with fewer trials beside the rate."""

LEAST_PRECISION: Final = 0.1
"""Relative error beyond which a rate makes a partial profile, and is approached from below.
Doubled, a complete profile may be a fifth off."""

LOWEST_SHARE: Final = 0.35
"""Share of the rate at which lone requests follow each other: where a search from below starts, for
two seldom meet there. Doubled, a server of one slot already queues."""

# On a machine that changes its speed more requests in a row say nothing more, but trials in other
# minutes do: the search goes on for that share of the budget, for what is left is for bursts, with
# trials that share of the rate below and above it in turn. Chosen by hand; doubled, nothing is left
# for bursts, and trials say less of the rate between them.
DRIFT_SHARE: Final = 0.6
DRIFT_STEP: Final = 0.08


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The end of a search.

    Attributes:
        complete: The objective was seen met near the rate, and a limit above it; else the profile
            is partial.
        reason: Why it ended, for people.
    """

    estimate: Estimate
    complete: bool
    reason: str


def next_trial(
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    trials: Sequence[TrialSummary],
    *,
    left_s: float,
    budget_s: float,
    seed: int,
    predicted_per_s: float | None = None,
) -> Trial | SearchResult:
    """What to run after all `trials` so far, in order, or the end; `left_s` of the budget are left.

    Every trial gets a seed of its own from the search's.

    Args:
        predicted_per_s: Where to begin, in place of a ramp, if somebody has an idea. Nothing else
            comes of it: the estimate rests on trials alone, and where requests queue that first one
            counts as a ramp.
    """
    known = estimate_rate(objective, unloaded, trials)
    if predicted_per_s is not None and trials:
        # Begun empty and a little beyond the capacity, it may end before its queue is seen to grow,
        # and would then stand for a rate that meets the objective in the steady state.
        without = [replace(trials[0], ramp=True), *trials[1:]]
        again = estimate_rate(objective, unloaded, without)
        if known.queueing or again.queueing:
            trials, known = without, again
    trial_seed = seed * 1_000 + len(trials)
    search = _Search(objective, unloaded, trials, known, left_s, budget_s, trial_seed)
    if not trials:
        return search.ramp() if predicted_per_s is None else search.beyond(predicted_per_s)
    if len(trials) >= MOST_TRIALS:
        return search.end("as many trials as a search may make")
    if left_s < 2.0 + 3 * unloaded.residence_s:  # A trial that could still say something.
        return search.end("the budget is spent")
    return search.next()


@dataclass(frozen=True, slots=True)
class _Search:
    objective: LatencyObjective
    unloaded: UnloadedLatency
    trials: Sequence[TrialSummary]
    known: Estimate
    left_s: float
    budget_s: float
    seed: int

    @property
    def _rate(self) -> float:
        """The estimate, where there is one."""
        assert self.known.rate_per_s is not None, self.known
        return self.known.rate_per_s

    @property
    def _lone_per_s(self) -> float:
        """Requests, one at a time."""
        return 1 / max(self.unloaded.residence_s, 1e-3)

    def ramp(self) -> Trial:
        """From a rate that a server which takes one request at a time just sustains."""
        objective, budget_s = self.objective, self.budget_s
        start = max(0.7 * self._lone_per_s, objective.min_rate_per_s)
        return Trial(
            rate_per_s=min(start, objective.max_rate_per_s),
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

    def beyond(self, predicted_per_s: float) -> Trial:
        """Where a right prediction is seen exceeded; a wrong one costs no more than a ramp.

        Of a queue it is a first look at the capacity, of token times one above the estimate.
        """
        rate = EXCEEDED_AT * predicted_per_s
        return self._trial(
            rate,
            requests=STEADY_REQUESTS,
            backlog=LEAST_BACKLOG,
            patience=5.0,
            most_s=0.5 * self.left_s,
        )

    def next(self) -> Trial | SearchResult:
        """After the first trial."""
        known = self.known
        if known.rate_per_s is None or known.rate_per_s >= self.objective.max_rate_per_s:
            return self._towards_the_cap()
        spent = self._requests_left <= (LEAST_WINDOW if self._is_confirmed() else -0.1 * self._sent)
        if spent and known.drift:
            return self.end("as precise as a machine that changes its speed allows")
        if spent:
            return self.end("as precise as so many requests allow")
        return self._next_of_queue() if known.queueing else self._next_of_tokens()

    def _towards_the_cap(self) -> Trial | SearchResult:
        cap, ok = self.objective.max_rate_per_s, self.known.ok_per_s
        if ok >= cap:
            return self.end("the highest rate allowed meets the objective", at_cap=True)
        if any(trial.rate_per_s >= cap and trial.is_measured for trial in self.trials):
            return self._steady(max(ok * 1.2, 0.8 * cap))
        return self._steady(max(2 * ok, *(trial.rate_per_s for trial in self.trials)))

    @property
    def _sent(self) -> int:
        return sum(trial.sent for trial in self.trials)

    @property
    def _requests_left(self) -> float:
        """Requests that may still be sent."""
        if self.known.drift and self.left_s > (1 - DRIFT_SHARE) * self.budget_s:
            return math.inf
        return max(LEAST_REQUESTS, REQUESTS_PER_RATE * self._rate) - self._sent

    def _is_confirmed(self) -> bool:
        """A steady trial near the estimate met the objective."""
        most = STEADY_TO if self.known.queueing else math.inf
        return any(
            trial.is_measured
            and trial.meets(self.objective)
            and STEADY_FROM * self._rate <= trial.rate_per_s <= most * self._rate
            and trial.window >= LEAST_WINDOW
            for trial in self.trials
        )

    # --- Queues -------------------------------------------------------------------------

    def _next_of_queue(self) -> Trial | SearchResult:
        known = self.known
        assert known.capacity is not None, known
        backlogs = [b for trial in self.trials if not trial.ramp for b in trial.backlogs]
        if not any(backlog.starts >= 0.8 * LEAST_BACKLOG for backlog in backlogs):
            first = min(max(BACKLOG_S * known.capacity.per_s, LEAST_BACKLOG), USUAL_BACKLOG)
            return self._overload(round(first))
        if not self._is_confirmed():
            return self._steady(STEADY_BELOW * self._rate)
        if known.error <= self.objective.precision:
            return self.end("known to the precision asked for")
        wanted = known.capacity.dispersion / self.objective.precision**2
        more = math.inf if known.drift else wanted - sum(b.starts for b in backlogs)
        more = min(max(more, LEAST_BACKLOG), MOST_BACKLOG)
        return self._overload(round(min(more, max(self._requests_left, LEAST_BACKLOG))))

    def _overload(self, starts: int) -> Trial:
        """So much above the capacity that so many first tokens come from a queue."""
        capacity = self.known.capacity
        assert capacity is not None, self.known
        least, most_more, errors = OVERLOAD
        excess = least + min(most_more, errors * capacity.error)
        # Where a trial above the estimate met the objective, the estimate is too low.
        rate = max(capacity.per_s * excess, 1.15 * self.known.ok_per_s)
        # A backlog of so many at that rate waits (excess - 1) times its length in the end.
        length_s = starts / capacity.per_s
        return self._trial(
            rate,
            requests=round(2.5 * starts) + 50,
            backlog=starts,
            patience=max(6.0, 2 * (excess - 1) * length_s / self.objective.ttft_s),
            most_s=3 * length_s + 4 * self.unloaded.residence_s + 20,
        )

    # --- Token times --------------------------------------------------------------------

    def _next_of_tokens(self) -> Trial | SearchResult:
        known, objective = self.known, self.objective
        if known.violated_per_s <= objective.min_rate_per_s * 1.01:
            return self.end("the lowest rate allowed violates the objective")
        # Of fewer trials near the rate, nothing would be known of how the machine's speed changes.
        near = sum(is_comparable(trial, self._rate) for trial in self.trials)
        is_bracketed = self._is_confirmed() and self._is_exceeded() and near >= LEAST_TRIALS
        if known.error <= TOKEN_PRECISION * objective.precision and is_bracketed:
            return self.end("known to the precision asked for")
        if known.error > LEAST_PRECISION:
            return self._measure(self._from_below())
        return self._measure(self._beside_the_estimate())

    def _from_below(self) -> float:
        """Where a limit is hardly known: from below, a trial that is cut off teaches less."""
        known = self.known
        low, high = known.ok_per_s, self._rate
        if low < known.violated_per_s:
            high = min(high, known.violated_per_s)
        if not low:
            # A server that takes one request at a time keeps up with that much.
            return max(high * max(0.5, 1 - known.error), LOWEST_SHARE * self._lone_per_s)
        if low < 0.9 * high:
            return math.sqrt(low * high)
        return (1 + RELATIVE_STEP if self._is_exceeded() else EXCEEDED_AT) * self._rate

    def _beside_the_estimate(self) -> float:
        """Where a limit is known well: below it until that is seen, then above it, then both."""
        rate = self._rate
        step = min(self.objective.step_per_s, RELATIVE_STEP * rate)
        if self.known.drift:
            step = max(step, DRIFT_STEP * rate)
        if not self._is_confirmed():
            near = [t for t in self.trials if t.is_measured and t.rate_per_s >= STEADY_FROM * rate]
            # By a little more each time.
            return max(STEADY_BELOW * rate - len(near) * step, STEADY_FROM * rate)
        if not self._is_exceeded():
            return EXCEEDED_AT * rate
        # To both sides of the estimate in turn: what is left of the budget goes where it matters.
        side = 1 if sum(trial.rate_per_s > rate for trial in self.trials) % 2 else -1
        return rate + side * step

    def _is_exceeded(self) -> bool:
        """A trial a little above the estimate violated the objective, or several met it."""
        nearest, farthest = EXCEEDED_RANGE
        above = [
            trial
            for trial in self.trials
            if not trial.ramp and self._rate < trial.rate_per_s <= farthest * self._rate
        ]
        if any(not trial.meets(self.objective) for trial in above):
            return True
        far = [trial for trial in above if trial.rate_per_s > nearest * self._rate]
        return len(far) >= EXCEEDING_TRIES

    # --- Trials -------------------------------------------------------------------------

    def _steady(self, rate: float) -> Trial:
        return self._trial(rate, requests=STEADY_REQUESTS, backlog=0, patience=5.0, most_s=240.0)

    def _measure(self, rate: float) -> Trial:
        """For quantiles of tokens: as long as a third of what is left allows."""
        requests = max(
            min(TRIAL_S * rate, MOST_TRIAL_REQUESTS, self._requests_left), LEAST_TRIAL_REQUESTS
        )
        most_s = max(10.0, 0.3 * self.left_s)
        return self._trial(rate, requests=round(requests), backlog=0, patience=5.0, most_s=most_s)

    def _trial(
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

    def end(self, reason: str, *, at_cap: bool = False) -> SearchResult:
        """The end, as far as it came."""
        known = self.known
        if at_cap:
            cap = self.objective.max_rate_per_s
            known = replace(
                known, rate_per_s=cap, error=0.0, limited_by=None, queueing=False, capacity=None
            )
            return SearchResult(known, complete=True, reason=reason)
        is_known = known.rate_per_s is not None and known.error <= LEAST_PRECISION
        return SearchResult(known, is_known and self._is_confirmed(), reason)
