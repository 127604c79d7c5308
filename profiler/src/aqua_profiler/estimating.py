"""From all runs so far to the sustained rate and its uncertainty.

Two kinds of server meet two kinds of limit.

**Queues.** Requests wait because the server admits no more: TTFT is flat until the rate comes close
to the capacity and leaps there. The capacity C is measured where requests queued (`observing`). How
far below it the objective holds follows from the heavy-traffic law of queues: with Poisson arrivals
the wait W exceeds t with probability

    P(W > t) = P(wait) exp(-2 v C (1 - rho) t / (1 + d)),   rho = rate / C,

d the measured dispersion of first tokens, P(wait) as in Sakasegawa's formula for as many servers as
requests run at once, v a factor around 1 for all that this leaves out. Every steady run near the
capacity is evidence about C and v. A posterior over a grid of both gives the rate at which the
objective's quantile is met, with an error that contains everything not known.

**Curves.** Latency rises smoothly with the rate (longer batches, slower tokens) and crosses the
limit without a queue. Then the crossing is interpolated between the two nearest rates measured.

The sustained rate is the lower of the two. Where runs show that the machine's own speed changes
(`drifting`), it is the rate of the median speed, with the error of that.

Source: Kingman 1962, Sakasegawa 1977. The paper bisects and then steps by 0.5 requests/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_profiler.drifting import Drift, drift_of, rescaled
from aqua_profiler.objective import Objective, Unloaded
from aqua_profiler.observing import DISPERSION_STARTS, SPREAD_WINDOWS
from aqua_profiler.pacing import RAMP_WORTH, UNTOLD_ERROR, Paced, sustained
from aqua_profiler.summary import Stop, Summary

TOLERANCE: Final = 0.05
"""Confidence is the probability that the truth is within that share of the answer."""

LEAST_STARTS: Final = 12
PRIOR_DISPERSION: Final = 0.5
PRIOR_WINDOWS: Final = 4.0
LEAST_DISPERSION: Final = 0.02
FILL_UNCERTAINTY: Final = 0.25
"""Of a residence, in seconds of backlog: requests that filled an empty server leave in rhythm."""

FACTOR_SD: Final = 0.4
"""Of ln v: the law is within a factor of 1.5 for all queues tried, two times out of three."""

CONTRADICTED: Final = 1.05
LEAST_CURVE_ERROR: Final = 0.02
CURVE_REACH: Final = 0.35
"""A latency curve counts as straight (in logarithms) within that relative distance."""

LEAST_SLOPE: Final = 0.3
"""Least growth of ln latency over ln rate at a limit: flatter is scatter."""

NEAR_RATIO: Final = 0.4
"""Runs whose rates are within that distance, in logarithms, are compared in speed."""

SPEED_ELASTICITY: Final = 1.5
"""Of the rate that token times allow: fewer requests meet in a faster server, each of them faster.
5% of speed moved it by 6 to 8% in profiles of a real engine."""

SATURATED_SHARE: Final = 0.97
"""Requests beyond the limit that are expected above the capacity in a run of finite length."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """First tokens per second while requests queue.

    Attributes:
        per_s: The estimate.
        error: Relative standard error.
        dispersion: Variance over mean of counts.
        running: Requests served at once.
    """

    per_s: float
    error: float
    dispersion: float
    running: float


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
        drift: Standard deviation of the logarithm of the endpoint's speed between runs near the
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


def meets(objective: Objective, summary: Summary) -> bool:
    """Whether a steady run met the objective."""
    return why_not(objective, summary) is None


def why_not(objective: Objective, summary: Summary) -> str | None:
    """Which limit a run exceeded: `ttft`, `tbt` or None."""
    if summary.stop in {Stop.OVERLOAD, Stop.SHED, Stop.BACKLOG}:
        return "ttft"
    if summary.stop is Stop.SLOW_TOKENS:
        return "tbt"
    if summary.tbt_s is not None and summary.tbt_s > objective.tbt_s:
        return "tbt"
    return "ttft" if summary.ttft_s > objective.ttft_s else None


def is_measured(summary: Summary) -> bool:
    """The run lasted long enough for its quantiles to count."""
    return not summary.ramp and summary.stop in {Stop.ENOUGH, Stop.TIME} and summary.window > 0


def capacity_of(runs: Sequence[Summary]) -> Capacity | None:
    """All backlogs of all runs together; None when requests have hardly queued."""
    found = [
        (backlog, run)
        for run in runs
        for backlog in run.backlogs
        if backlog.starts >= LEAST_STARTS and backlog.seconds > 0
    ]
    if not found:
        return None
    # A ramp's backlog is short and follows a rising load: use it only while there is nothing else.
    settled = [(backlog, run) for backlog, run in found if not run.ramp]
    if sum(backlog.starts for backlog, _ in settled) >= 4 * LEAST_STARTS:
        found = settled
    starts = sum(backlog.starts for backlog, _ in found)
    seconds = sum(backlog.seconds for backlog, _ in found)
    dispersion = _pooled(
        (backlog.dispersion, backlog.starts / DISPERSION_STARTS) for backlog, _ in found
    )
    spread = _pooled(
        (backlog.spread, min(SPREAD_WINDOWS, backlog.starts / DISPERSION_STARTS))
        for backlog, _ in found
    )
    per_s = starts / seconds
    residence_s = max(run.residence_s for _, run in found)
    error = math.hypot(
        math.sqrt(spread / starts), FILL_UNCERTAINTY * min(1.0, residence_s / seconds)
    )
    return Capacity(per_s, error, dispersion, max(1.0, per_s * residence_s))


def _pooled(found: Iterable[tuple[float | None, float]]) -> float:
    """A dispersion from several, by their windows, and from what queues usually have."""
    windows, weighted = PRIOR_WINDOWS, PRIOR_WINDOWS * PRIOR_DISPERSION
    for value, weight in found:
        if value is not None:
            windows += weight
            weighted += weight * value
    return max(LEAST_DISPERSION, weighted / windows)


def estimate(objective: Objective, unloaded: Unloaded, runs: Sequence[Summary]) -> Estimate:
    """The sustained rate, from everything measured so far."""
    capacity = capacity_of(runs)
    queue = None
    if capacity is not None and unloaded.ttft_s < objective.ttft_s:
        queue = _posterior(objective, unloaded, runs, capacity)
        if drift := _drift(runs, queue[0]):
            queue = (queue[0], math.hypot(queue[1], drift.error), queue[2])
    steady = [run for run in runs if is_measured(run)]
    ok = max((run.rate_per_s for run in steady if meets(objective, run)), default=0.0)
    tokens = _tokens(objective, runs)
    crossing, violated = _curve(objective, runs, ok, queue)
    if tokens is not None and crossing is not None and crossing[2] == "tbt":
        # What all runs say of the server beats where single runs failed, until runs fail far below;
        # on a machine that changes its speed some do, in its slow minutes.
        if tokens[0] < CONTRADICTED * violated or _drift(runs, tokens[0]) is not None:
            crossing = None
        else:
            tokens = None
    options = [option for option in (queue, tokens, crossing) if option is not None]
    if not options:
        return Estimate(
            None, 1.0, None, queueing=False, capacity=capacity, ok_per_s=ok, violated_per_s=violated
        )
    rate, error, reason = min(options)
    near = _drift(runs, rate)
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


Option = tuple[float, float, str]


def _tokens(objective: Objective, runs: Sequence[Summary]) -> Option | None:
    """The limit that token times set, if gaps beyond theirs have been seen."""
    told = [run for run in runs if run.paces and run.gaps_per_request > 0]
    steady = [run for run in told if is_measured(run)] or told
    finished = sum(run.finished for run in steady)
    if not finished:
        return None
    gaps = sum(run.gaps_per_request * run.finished for run in steady) / finished
    paced = [Paced(run.rate_per_s, RAMP_WORTH if run.ramp else 1.0, run.paces) for run in told]
    allowed = 1 - objective.tbt_quantile
    found = sustained(paced, gaps, allowed)
    if found is None:
        return None
    if drift := _drift(runs, found[0]):
        slowness = iter(drift.slowness)
        paced = [
            rescaled(entry, next(slowness)) if _is_near(run, found[0]) else entry
            for run, entry in zip(told, paced, strict=True)
        ]
        found = sustained(paced, gaps, allowed)
        if found is None:
            return None
        found = (found[0], math.hypot(found[1], SPEED_ELASTICITY * drift.error))
    rate, error = found
    if rate < objective.min_rate_per_s:  # Too slow even for one request at a time.
        return objective.min_rate_per_s, max(error, UNTOLD_ERROR), "tbt"
    return rate, error, "tbt"


def _drift(runs: Sequence[Summary], rate: float) -> Drift | None:
    """Of the endpoint's speed between runs near a rate."""
    return drift_of([run.paces for run in runs if _is_near(run, rate)])


def _is_near(run: Summary, rate: float) -> bool:
    """Its paces compare with those of other runs near that rate."""
    told = bool(run.paces) and run.gaps_per_request > 0 and not run.ramp
    return told and abs(math.log(run.rate_per_s / rate)) < NEAR_RATIO


def _posterior(
    objective: Objective, unloaded: Unloaded, runs: Sequence[Summary], capacity: Capacity
) -> Option:
    """The rate at which the wait's quantile reaches the limit: mean, relative error, reason."""
    spread = np.linspace(-3.2, 3.2, 65)
    rates = capacity.per_s * np.exp(spread * capacity.error)[:, None]
    factors = np.exp(np.linspace(-2.5, 2.5, 41) * FACTOR_SD)[None, :]
    log_weight = -0.5 * spread[:, None] ** 2 - 0.5 * (np.log(factors) / FACTOR_SD) ** 2
    limit_s = objective.ttft_s - unloaded.ttft_s
    for run in runs:
        if not is_measured(run):
            continue
        load = run.rate_per_s / rates
        expected = _over_share(load, rates, factors, limit_s, capacity)
        expected = np.clip(expected, 0.5 / max(run.window, 1), SATURATED_SHARE)
        # A queue forgets within about (1 + d) / (1 - rho)^2 requests: what is shorter says little.
        memory = (1 + capacity.dispersion) / np.square(np.maximum(1 - load, 1e-3))
        worth = np.minimum(run.effective_count, run.window / memory)
        log_weight = log_weight - worth * _divergence(run.over_share, expected)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    wanted = 1 - objective.ttft_quantile
    low, high = np.zeros_like(weight), np.ones_like(weight)
    for _ in range(30):
        middle = (low + high) / 2
        over_limit = _over_share(middle, rates, factors, limit_s, capacity) > wanted
        low, high = np.where(over_limit, low, middle), np.where(over_limit, middle, high)
    sustained = low * rates
    mean = float((weight * sustained).sum())
    deviation = math.sqrt(float((weight * (sustained - mean) ** 2).sum()))
    return mean, deviation / mean, "ttft"


def _divergence(seen: float, expected: Grid) -> Grid:
    """Kullback and Leibler's, of two shares: 0 where a run is just as expected."""
    seen = min(max(seen, 1e-9), 1 - 1e-9)
    divergence: Grid = seen * np.log(seen / expected) + (1 - seen) * np.log(
        (1 - seen) / (1 - expected)
    )
    return divergence


Grid = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _over_share(load: Grid, rates: Grid, factors: Grid, limit_s: float, capacity: Capacity) -> Grid:
    """P(W > limit) at a load (rho); 1 above the capacity."""
    load = np.minimum(load, 1.0)
    waits = load ** (math.sqrt(2 * (capacity.running + 1)) - 1)
    decay = 2 * factors * rates * (1 - load) / (1 + capacity.dispersion)
    shares: Grid = waits * np.exp(-decay * limit_s)
    return shares


def _curve(
    objective: Objective, runs: Sequence[Summary], ok: float, queue: Option | None
) -> tuple[Option | None, float]:
    """The crossing of a smooth limit, and the lowest rate that violated one."""
    violations = [
        (run, reason)
        for run in runs
        if (reason := why_not(objective, run)) is not None
        and (is_measured(run) or run.stop in {Stop.SLOW_TOKENS, Stop.SHED, Stop.OVERLOAD})
        and not _is_queues(run, reason, queue)
    ]
    if not violations:
        return None, math.inf
    worst, reason = min(violations, key=lambda pair: (pair[0].ramp, pair[0].rate_per_s))
    points = _points(objective, runs, reason)
    fitted = _fitted_crossing(points, worst.rate_per_s)
    if fitted is not None:
        rate, error = fitted
        return (rate, error, reason), worst.rate_per_s
    # Nothing measured above the limit yet, or nothing below: somewhere between.
    below = max((point.rate for point in points if point.log_ratio < 0), default=ok)
    rate = (min(below, worst.rate_per_s) + worst.rate_per_s) / 2
    return (rate, max(0.3 * (worst.rate_per_s - below) / rate, 0.1), reason), worst.rate_per_s


@dataclass(frozen=True, slots=True)
class _Point:
    """A latency quantile at a rate, as the logarithm of its ratio to the limit."""

    rate: float
    log_ratio: float
    error: float


def _points(objective: Objective, runs: Sequence[Summary], reason: str) -> list[_Point]:
    points = []
    for run in runs:
        value, error, limit = (
            (run.tbt_s, run.tbt_error, objective.tbt_s)
            if reason == "tbt"
            else (run.ttft_s, run.ttft_error, objective.ttft_s)
        )
        if is_measured(run) and value:
            points.append(
                _Point(run.rate_per_s, math.log(value / limit), max(error, LEAST_CURVE_ERROR))
            )
    return points


def _fitted_crossing(points: Sequence[_Point], high: float) -> tuple[float, float] | None:
    """Where a line through the nearest points, weighted by their errors, meets the limit.

    All of them: single runs near the limit fall on either side of it by chance.
    """
    above = [point for point in points if point.log_ratio >= 0]
    below = [point for point in points if point.log_ratio < 0]
    if not above or not below:
        return None
    near = min(points, key=lambda point: abs(point.log_ratio)).rate
    local = [point for point in points if abs(point.rate / near - 1) < CURVE_REACH]
    if not {*above} & {*local} or not {*below} & {*local}:
        local = [min(above, key=lambda point: point.rate), max(below, key=lambda point: point.rate)]
    rates = np.array([point.rate for point in local])
    ratios = np.array([point.log_ratio for point in local])
    weights = 1 / np.square([point.error for point in local])
    center = float((weights * rates).sum() / weights.sum())
    level = float((weights * ratios).sum() / weights.sum())
    spread = float((weights * (rates - center) ** 2).sum())
    slope = float((weights * (rates - center) * ratios).sum()) / spread if spread > 0 else 0.0
    slope = max(slope, LEAST_SLOPE / high)
    rate = center - level / slope
    low_end, high_end = float(rates.min()), float(rates.max())
    rate = min(max(rate, low_end), high_end)
    # Of the level, and of the slope times the distance; residuals where they are larger.
    residual = float((weights * (ratios - level - slope * (rates - center)) ** 2).sum())
    inflation = max(1.0, residual / max(1, len(local) - 2))
    variance = inflation * (1 / weights.sum() + (rate - center) ** 2 / max(spread, 1e-12))
    return rate, math.sqrt(float(variance)) / slope / rate


def _is_queues(run: Summary, reason: str, queue: Option | None) -> bool:
    """A late first token near or above the capacity is the queue's doing."""
    if reason != "ttft" or queue is None:
        return False
    rate, error, _ = queue
    return run.rate_per_s > rate * (1 - 2 * error) or any(
        backlog.starts >= LEAST_STARTS for backlog in run.backlogs
    )
