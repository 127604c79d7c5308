"""The rate that a queue allows, from its capacity and from steady trials near it.

Requests wait because the server admits no more: TTFT is flat until the rate comes close to the
capacity and leaps there. The capacity C is measured where requests queued (`measure.recorder`). How
far below it the objective holds follows from the heavy-traffic law of queues: with Poisson arrivals
the wait W exceeds t with probability

    P(W > t) = P(wait) exp(-2 v C (1 - rho) t / (1 + d)),   rho = rate / C,

d the measured dispersion of first tokens, P(wait) as in Sakasegawa's formula for as many servers as
requests run at once, v a factor around 1 for all that this leaves out. Every steady trial near the
capacity is evidence about C and v, on either side of it: requests that do not queue where they
should refute a capacity as well as those that do where they should not. A posterior over a grid of
both gives the rate at which the objective's quantile is met, with an error that contains everything
not known.

Pure.

Source: Kingman 1962, Sakasegawa 1977.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_profiler.measure.compliance import is_measured
from aqua_profiler.measure.recorder import DISPERSION_STARTS, SPREAD_WINDOWS
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.objective import LatencyObjective, UnloadedLatency

LEAST_STARTS: Final = 12
PRIOR_DISPERSION: Final = 0.5
PRIOR_WINDOWS: Final = 4.0
LEAST_DISPERSION: Final = 0.02
FILL_UNCERTAINTY: Final = 0.25
"""Of a residence, in seconds of backlog: requests that filled an empty server leave in rhythm."""

FACTOR_SD: Final = 0.4
"""Of ln v: the law is within a factor of 1.5 for all queues tried, two times out of three."""

SATURATED_SHARE: Final = 0.97
"""Requests beyond the limit that are expected above the capacity in a trial of finite length."""


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


def capacity_of(trials: Sequence[TrialSummary]) -> Capacity | None:
    """All backlogs of all trials together; None when requests have hardly queued."""
    found = [
        (backlog, trial)
        for trial in trials
        for backlog in trial.backlogs
        if backlog.starts >= LEAST_STARTS and backlog.seconds > 0
    ]
    if not found:
        return None
    # A ramp's backlog is short and follows a rising load: use it only while there is nothing else.
    settled = [(backlog, trial) for backlog, trial in found if not trial.ramp]
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
    residence_s = max(trial.residence_s for _, trial in found)
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


def queue_rate(
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    trials: Sequence[TrialSummary],
    capacity: Capacity,
    *,
    spread: float = 0.0,
) -> tuple[float, float]:
    """The rate at which the wait's quantile reaches the limit: mean and relative error.

    Args:
        objective: Which quantile and limit.
        unloaded: What is no wait.
        trials: The steady ones among them are evidence.
        capacity: As measured.
        spread: Of the machine's speed between trials, as a standard deviation of its logarithm: a
            trial closer to the capacity than that says nothing about it.
    """
    deviations = np.linspace(-3.2, 3.2, 65)
    rates = capacity.per_s * np.exp(deviations * capacity.error)[:, None]
    factors = np.exp(np.linspace(-2.5, 2.5, 41) * FACTOR_SD)[None, :]
    log_weight = -0.5 * deviations[:, None] ** 2 - 0.5 * (np.log(factors) / FACTOR_SD) ** 2
    limit_s = objective.ttft_s - unloaded.ttft_s
    for trial in trials:
        if not is_measured(trial):
            continue
        load = trial.rate_per_s / rates
        expected = _over_share(load, rates, factors, limit_s, capacity)
        expected = np.clip(expected, 0.5 / max(trial.window, 1), SATURATED_SHARE)
        # A queue forgets, or above the capacity becomes endless, within about (1 + d) / (1 - rho)^2
        # requests: what is shorter says little.
        distance = np.maximum(np.abs(1 - load) - spread, 1e-3)
        memory = (1 + capacity.dispersion) / np.square(distance)
        worth = np.minimum(trial.effective_count, trial.window / memory)
        log_weight = log_weight - worth * _divergence(trial.over_share, expected)
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
    return mean, deviation / mean


def _divergence(seen: float, expected: Grid) -> Grid:
    """Kullback and Leibler's, of two shares: 0 where a trial is just as expected."""
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
