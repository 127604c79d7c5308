"""Where a profile's rate is decided: from all trials so far to the sustained rate and its error.

Three limits are looked for, and the lowest holds.

- **A queue's** (`heavy_traffic`): requests wait because the server admits no more.
- **Token times'** (`token_times`): tokens slow down as requests add up.
- **A bracket**: between the highest rate that met the objective and the lowest that violated it for
  a reason that neither of the two explains yet.

Where trials show that the machine's own speed changes (`speed_drift`), the rate is that of the
median speed, with the error of that.

Source: Aqua section 4.1. Ours: one estimate from all trials; the paper bisects and then steps by
0.5 requests/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aqua_profiler.estimate.heavy_traffic import LEAST_STARTS, Capacity, capacity_of, queue_rate
from aqua_profiler.estimate.speed_drift import Drift, drift_of, rescaled
from aqua_profiler.estimate.token_times import UNKNOWN_ERROR, token_time_rate
from aqua_profiler.measure.summary import Limit, StopReason, TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

TOLERANCE: Final = 0.05
"""Fixed by the profile's format: confidence is the probability that the truth is that near."""

NEAR_RATIO: Final = 0.4
"""Trials whose rates are within that distance, in logarithms, are compared in speed. At twice that,
differences of load are taken for those of speed."""

SPEED_ELASTICITY: Final = 1.5
"""Power of its speed at which the rate of a server goes that token times allow: fewer requests meet
in a faster one, each of them faster. 5% of speed moved it by 6 to 8% in profiles of a real engine.
Doubled, drifting machines seem known half as well."""

LEAST_BRACKET_ERROR: Final = 0.1
"""Relative error of a bracket, however narrow: its ends are single trials, which fall on either
side of a limit by chance. Doubled, no rate known from a bracket would make a complete profile."""

CONTRADICTED: Final = 1.15
"""A rate beyond so many times one at which a trial violated the limit of token times is wrong if
two did: by chance one fails so far below a limit, but seldom two. At 1.05, servers whose tokens
hardly slow down contradict themselves; twice as far above, wrong lines live on."""

CUT_OFF: Final = frozenset({StopReason.SLOW_TOKENS, StopReason.SHED, StopReason.OVERLOAD})
"""Trials that were ended because they were too much violate the objective as measured ones do."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A rate that one limit allows.

    Attributes:
        rate_per_s: The estimate.
        error: Relative standard error.
        is_queue: Requests wait there; else latency rises smoothly.
    """

    rate_per_s: float
    error: float
    limit: Limit
    is_queue: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """The sustained rate as far as it is known.

    Attributes:
        rate_per_s: The estimate, or None when nothing bounds it yet.
        error: Relative standard error.
        limited_by: `ttft` or `tbt`, None when nothing does.
        queueing: The limit is a queue's; else latency rises smoothly.
        capacity: If requests have queued.
        ok_per_s: Highest rate that met the objective, 0 for none.
        violated_per_s: Lowest rate that did not for another reason than a queue; inf for none.
        drift: Standard deviation of the logarithm of the endpoint's speed between trials near the
            rate; 0 where it is constant as far as can be seen.
    """

    rate_per_s: float | None
    error: float
    limited_by: Limit | None
    queueing: bool
    capacity: Capacity | None
    ok_per_s: float
    violated_per_s: float
    drift: float = 0.0

    @property
    def confidence(self) -> float:
        """Probability that the truth is within `TOLERANCE` of the rate."""
        return 0.0 if self.rate_per_s is None else confidence_of(self.error)


def confidence_of(error: float) -> float:
    """Probability that the truth is within `TOLERANCE` of what is known to that relative error."""
    return math.erf(TOLERANCE / max(error, 1e-6) / math.sqrt(2))


def estimate_rate(
    objective: LatencyObjective, unloaded: UnloadedLatency, trials: Sequence[TrialSummary]
) -> Estimate:
    """The sustained rate, from everything measured so far: the lowest of the limits found."""
    capacity = capacity_of(trials)
    queue = None
    if capacity is not None and unloaded.ttft_s < objective.ttft_s:
        queue = _queue_limit(objective, unloaded, trials, capacity)
    tokens = _token_limit(objective, trials, math.inf if queue is None else queue.rate_per_s)
    ok = max(
        (trial.rate_per_s for trial in trials if trial.is_measured and trial.meets(objective)),
        default=0.0,
    )
    violations = _violations(objective, trials, queue)
    bracket = _between(ok, *violations[0]) if violations else None
    if tokens is not None and bracket is not None and bracket.limit == "tbt":
        contradicted = [at for at, _ in violations if CONTRADICTED * at < tokens.rate_per_s]
        tokens, bracket = (None, bracket) if len(contradicted) > 1 else (tokens, None)
    limits = [limit for limit in (queue, tokens, bracket) if limit is not None]
    lowest = min(limits, key=lambda limit: limit.rate_per_s, default=None)
    drift = None if lowest is None else _drift(trials, lowest.rate_per_s)
    return Estimate(
        rate_per_s=None if lowest is None else lowest.rate_per_s,
        error=1.0 if lowest is None else lowest.error,
        limited_by=None if lowest is None else lowest.limit,
        queueing=lowest is not None and lowest.is_queue,
        capacity=capacity,
        ok_per_s=ok,
        violated_per_s=violations[0][0] if violations else math.inf,
        drift=0.0 if drift is None else drift.spread,
    )


def _queue_limit(
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    trials: Sequence[TrialSummary],
    capacity: Capacity,
) -> RateLimit:
    rate, error = queue_rate(objective, unloaded, trials, capacity)
    if drift := _drift(trials, rate):
        rate, error = queue_rate(objective, unloaded, trials, capacity, spread=drift.spread)
        error = math.hypot(error, drift.error)
    return RateLimit(rate, error, "ttft", is_queue=True)


def _token_limit(
    objective: LatencyObjective, trials: Sequence[TrialSummary], ceiling: float
) -> RateLimit | None:
    """The limit of token times, if long gaps have been seen; a queue's holds at `ceiling`."""
    told = [trial for trial in trials if trial.paces and trial.gaps_per_request > 0]
    steady = [trial for trial in told if trial.is_measured] or told
    finished = sum(trial.finished for trial in steady)
    if not finished:
        return None
    per_request = sum(trial.gaps_per_request * trial.finished for trial in steady) / finished
    allowed = 1 - objective.tbt_quantile
    found = token_time_rate(told, per_request, allowed, ceiling_per_s=ceiling)
    drift_error = 0.0
    if found is not None and (drift := _drift(trials, found[0])):
        slowness = iter(drift.slowness)
        told = [
            rescaled(trial, next(slowness)) if is_comparable(trial, found[0]) else trial
            for trial in told
        ]
        found = token_time_rate(told, per_request, allowed, ceiling_per_s=ceiling)
        drift_error = SPEED_ELASTICITY * drift.error
    if found is None:
        return None
    rate, error = found[0], math.hypot(found[1], drift_error)
    if rate < objective.min_rate_per_s:  # Too slow even for one request at a time.
        rate, error = objective.min_rate_per_s, max(error, UNKNOWN_ERROR)
    return RateLimit(rate, error, "tbt")


def _drift(trials: Sequence[TrialSummary], rate: float) -> Drift | None:
    """Of the endpoint's speed between trials near a rate."""
    return drift_of([trial.paces for trial in trials if is_comparable(trial, rate)])


def is_comparable(trial: TrialSummary, rate: float) -> bool:
    """Whether its gaps compare with those of other trials near that rate."""
    told = bool(trial.paces) and trial.gaps_per_request > 0 and not trial.ramp
    return told and abs(math.log(trial.rate_per_s / rate)) < NEAR_RATIO


def _violations(
    objective: LatencyObjective, trials: Sequence[TrialSummary], queue: RateLimit | None
) -> list[tuple[float, Limit]]:
    """Rates that violated the objective for another reason than a queue, and which limit.

    The lowest comes first; ramps, which tell less than steady trials, come last.
    """
    told = [
        (trial.ramp, trial.rate_per_s, limit)
        for trial in trials
        if (limit := trial.violated(objective)) is not None
        and (trial.is_measured or trial.stop in CUT_OFF)
        and not (limit == "ttft" and queue is not None and _is_of_queue(trial, queue))
    ]
    return [(rate, limit) for _, rate, limit in sorted(told)]


def _is_of_queue(trial: TrialSummary, queue: RateLimit) -> bool:
    """A late first token near or above the capacity is the queue's doing."""
    return trial.rate_per_s > queue.rate_per_s * (1 - 2 * queue.error) or any(
        backlog.starts >= LEAST_STARTS for backlog in trial.backlogs
    )


def _between(ok: float, violated: float, limit: Limit) -> RateLimit:
    """The middle of a bracket, with the standard deviation of an even distribution over it."""
    low = min(ok, violated)
    rate = (low + violated) / 2
    return RateLimit(rate, max((violated - low) / math.sqrt(12) / rate, LEAST_BRACKET_ERROR), limit)
