"""From all trials so far to the sustained rate and its uncertainty.

Two kinds of server meet two kinds of limit.

**Queues.** Requests wait because the server admits no more (`heavy_traffic`).

**Curves.** Latency rises smoothly with the rate and crosses the limit without a queue: longer
batches, slower tokens (`token_times`), and for all other reasons `latency_curve`.

The sustained rate is the lower of the two. Where trials show that the machine's own speed changes
(`speed_drift`), it is the rate of the median speed, with the error of that.

Source: Aqua section 4.1. Ours: one estimate from all trials; the paper bisects and then steps by
0.5 requests/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aqua_profiler.estimate.heavy_traffic import LEAST_STARTS, Capacity, capacity_of, queue_rate
from aqua_profiler.estimate.latency_curve import crossing, points_of
from aqua_profiler.estimate.speed_drift import Drift, drift_of, rescaled
from aqua_profiler.estimate.token_times import UNTOLD_ERROR, TrialGaps, token_time_rate
from aqua_profiler.measure.compliance import has_clearly_slow_tokens, is_measured, meets, why_not
from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.objective import LatencyObjective, UnloadedLatency

TOLERANCE: Final = 0.05
"""Confidence is the probability that the truth is within that share of the answer."""

CONTRADICTED: Final = 1.05
NEAR_RATIO: Final = 0.4
"""Trials whose rates are within that distance, in logarithms, are compared in speed."""

SPEED_ELASTICITY: Final = 1.5
"""Of the rate that token times allow: fewer requests meet in a faster server, each of them faster.
5% of speed moved it by 6 to 8% in profiles of a real engine."""


Option = tuple[float, float, str]
"""A rate, its relative error, and the limit it is of."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The sustained rate as far as it is known.

    Attributes:
        rate_per_s: The estimate, or None when nothing bounds it yet.
        error: Relative standard error.
        limited_by: `ttft` or `tbt`, None when nothing does.
        queueing: The limit is a queue's; else a curve's.
        capacity: If requests have queued.
        ok_per_s: Highest rate that met the objective, 0 for none.
        violated_per_s: Lowest rate that did not for another reason than a queue; inf for none.
        drift: Standard deviation of the logarithm of the endpoint's speed between trials near the
            rate; 0 where it is constant as far as can be seen.
    """

    rate_per_s: float | None
    error: float
    limited_by: str | None
    queueing: bool
    capacity: Capacity | None
    ok_per_s: float
    violated_per_s: float
    drift: float = 0.0

    @property
    def confidence(self) -> float:
        """Probability that the truth is within `TOLERANCE` of the rate."""
        if self.rate_per_s is None:
            return 0.0
        return math.erf(TOLERANCE / max(self.error, 1e-6) / math.sqrt(2))


def estimate_rate(
    objective: LatencyObjective, unloaded: UnloadedLatency, trials: Sequence[TrialSummary]
) -> Estimate:
    """The sustained rate, from everything measured so far."""
    capacity = capacity_of(trials)
    queue = None
    if capacity is not None and unloaded.ttft_s < objective.ttft_s:
        queue = _queue(objective, unloaded, trials, capacity)
    steady = [trial for trial in trials if is_measured(trial)]
    ok = max((trial.rate_per_s for trial in steady if meets(objective, trial)), default=0.0)
    tokens = _tokens(objective, trials, math.inf if queue is None else queue[0])
    curve, violated = _curve(objective, trials, ok, queue)
    if tokens is not None and curve is not None and curve[2] == "tbt":
        if _contradicts(objective, trials, tokens[0], curve[0]):
            tokens = None
        else:
            curve = None
    options = [option for option in (queue, tokens, curve) if option is not None]
    if not options:
        return Estimate(
            None, 1.0, None, queueing=False, capacity=capacity, ok_per_s=ok, violated_per_s=violated
        )
    rate, error, reason = min(options)
    near = _drift(trials, rate)
    return Estimate(
        rate,
        error,
        reason,
        queueing=(rate, error, reason) == queue,
        capacity=capacity,
        ok_per_s=ok,
        violated_per_s=violated,
        drift=0.0 if near is None else near.spread,
    )


def _contradicts(
    objective: LatencyObjective, trials: Sequence[TrialSummary], rate: float, curve: float
) -> bool:
    """Whether single trials know better than what all of them say of the server.

    They do where one failed far below its rate, by more than chance. On a machine that changes its
    speed some do, in its slow minutes.
    """
    failed = min(
        (trial.rate_per_s for trial in trials if has_clearly_slow_tokens(objective, trial)),
        default=math.inf,
    )
    return CONTRADICTED * max(failed, curve) < rate and _drift(trials, rate) is None


def _queue(
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    trials: Sequence[TrialSummary],
    capacity: Capacity,
) -> Option:
    """The limit that waiting sets."""
    rate, error = queue_rate(objective, unloaded, trials, capacity)
    if drift := _drift(trials, rate):
        rate, error = queue_rate(objective, unloaded, trials, capacity, spread=drift.spread)
        error = math.hypot(error, drift.error)
    return rate, error, "ttft"


def _tokens(
    objective: LatencyObjective, trials: Sequence[TrialSummary], ceiling: float
) -> Option | None:
    """The limit that token times set, if gaps beyond theirs have been seen.

    Args:
        ceiling: The rate at which a queue's limit holds.
    """
    told = [trial for trial in trials if trial.paces and trial.gaps_per_request > 0]
    steady = [trial for trial in told if is_measured(trial)] or told
    finished = sum(trial.finished for trial in steady)
    if not finished:
        return None
    gaps = sum(trial.gaps_per_request * trial.finished for trial in steady) / finished
    paced = [TrialGaps(trial.rate_per_s, not is_measured(trial), trial.paces) for trial in told]
    allowed = 1 - objective.tbt_quantile
    found = token_time_rate(paced, gaps, allowed, ceiling_per_s=ceiling)
    if found is None:
        return None
    if drift := _drift(trials, found[0]):
        slowness = iter(drift.slowness)
        paced = [
            rescaled(entry, next(slowness)) if _is_near(trial, found[0]) else entry
            for trial, entry in zip(told, paced, strict=True)
        ]
        found = token_time_rate(paced, gaps, allowed, ceiling_per_s=ceiling)
        if found is None:
            return None
        found = (found[0], math.hypot(found[1], SPEED_ELASTICITY * drift.error))
    rate, error = found
    if rate < objective.min_rate_per_s:  # Too slow even for one request at a time.
        return objective.min_rate_per_s, max(error, UNTOLD_ERROR), "tbt"
    return rate, error, "tbt"


def _drift(trials: Sequence[TrialSummary], rate: float) -> Drift | None:
    """Of the endpoint's speed between trials near a rate."""
    return drift_of([trial.paces for trial in trials if _is_near(trial, rate)])


def _is_near(trial: TrialSummary, rate: float) -> bool:
    """Its paces compare with those of other trials near that rate."""
    told = bool(trial.paces) and trial.gaps_per_request > 0 and not trial.ramp
    return told and abs(math.log(trial.rate_per_s / rate)) < NEAR_RATIO


def _curve(
    objective: LatencyObjective, trials: Sequence[TrialSummary], ok: float, queue: Option | None
) -> tuple[Option | None, float]:
    """The crossing of a smooth limit, and the lowest rate that violated one."""
    violations = [
        (trial, reason)
        for trial in trials
        if (reason := why_not(objective, trial)) is not None
        and (
            is_measured(trial)
            or trial.stop in {StopReason.SLOW_TOKENS, StopReason.SHED, StopReason.OVERLOAD}
        )
        and not _is_queues(trial, reason, queue)
    ]
    if not violations:
        return None, math.inf
    worst, reason = min(violations, key=lambda pair: (pair[0].ramp, pair[0].rate_per_s))
    points = points_of(objective, trials, reason)
    fitted = crossing(points, worst.rate_per_s)
    if fitted is not None:
        rate, error = fitted
        return (rate, error, reason), worst.rate_per_s
    # Nothing measured above the limit yet, or nothing below: somewhere between.
    below = max((point.rate for point in points if point.log_ratio < 0), default=ok)
    rate = (min(below, worst.rate_per_s) + worst.rate_per_s) / 2
    return (rate, max(0.3 * (worst.rate_per_s - below) / rate, 0.1), reason), worst.rate_per_s


def _is_queues(trial: TrialSummary, reason: str, queue: Option | None) -> bool:
    """A late first token near or above the capacity is the queue's doing."""
    if reason != "ttft" or queue is None:
        return False
    rate, error, _ = queue
    return trial.rate_per_s > rate * (1 - 2 * error) or any(
        backlog.starts >= LEAST_STARTS for backlog in trial.backlogs
    )
