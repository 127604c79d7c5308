"""The rate that a queue allows, from its capacity and from steady trials near it.

Requests wait because the server admits no more: TTFT is flat until the rate comes close to the
capacity and leaps there. The capacity C is measured where requests queued (`measure.recorder`). How
far below it the objective holds follows from the heavy-traffic law of queues: with Poisson arrivals
the wait W exceeds t with probability

    P(W > t) = rho^(sqrt(2 (c + 1)) - 1) exp(-2 C (1 - rho) t / (1 + d)),   rho = rate / C,

d the measured dispersion of first tokens, and the first factor, that a request waits at all, as in
Sakasegawa's formula for as many servers c as requests run at once. Every steady trial near the
capacity is evidence about it, on either side: requests that do not queue where they should refute a
capacity as well as those that do where they should not. A posterior over a grid of capacities gives
the rate at which the objective's quantile is met, with an error that contains what is not known.

Pure.

Source: Kingman 1962, Sakasegawa 1977.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.optimize.elementwise import find_root
from scipy.special import rel_entr

from aqua_profiler.measure.summary import COUNT_WINDOWS, STARTS_PER_WINDOW, TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

LEAST_STARTS: Final = 12
"""First tokens of a backlog that counts, and a quarter of those that make a ramp's dispensable.
With twice as many, ramps on small engines bracket nothing."""

PRIOR_DISPERSION: Final = 0.5
"""Variance over mean of counts of first tokens, before any is measured: slots that serve one
request after the other have 0.2 to 0.8. Doubled, rates are found a percent lower."""

PRIOR_WINDOWS: Final = 4.0
"""Windows of counts that the prior dispersion is worth: a search measures dozens. Chosen by hand;
doubled, the first trials of a search say half as much of their own dispersion."""

LEAST_DISPERSION: Final = 0.02
"""Variance over mean that is never gone below: a server of constant times still has an error.
Chosen by hand; doubled, such a server needs longer backlogs."""

FILL_UNCERTAINTY: Final = 0.25
"""Of a residence, in seconds of backlog: requests that filled an empty server leave in rhythm, so
that much of the time is not known to be the server's. Without it 1 of 110 searches took a guess
from a ramp for a capacity; twice as much costs another backlog."""

SATURATED_SHARE: Final = 0.97
"""Requests beyond the limit that are expected above the capacity: in a trial of finite length the
first do not wait yet. Chosen by hand; with twice the share of misses allowed (0.94), trials above
the capacity count less against it."""

NEAREST_LOAD: Final = 1e-3
"""Least distance |1 - rho| from the capacity of which a queue's memory is computed: a bound on a
division, far below anything measured, also when doubled."""


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

    def late_share(
        self,
        load: Float64[np.ndarray, " rates"],
        per_s: Float64[np.ndarray, " rates"],
        limit_s: float,
    ) -> Float64[np.ndarray, " rates"]:
        """P(W > limit) at a load (rho) of a server of capacity `per_s`; 1 above the capacity."""
        load = np.minimum(load, 1.0)
        waits = load ** (math.sqrt(2 * (self.running + 1)) - 1)
        decay = 2 * per_s * (1 - load) / (1 + self.dispersion)
        shares: Float64[np.ndarray, " rates"] = waits * np.exp(-decay * limit_s)
        return shares


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
        (backlog.dispersion, backlog.starts / STARTS_PER_WINDOW) for backlog, _ in found
    )
    spread = _pooled(
        (backlog.spread, min(COUNT_WINDOWS, backlog.starts / STARTS_PER_WINDOW))
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
    told = [(value, weight) for value, weight in found if value is not None]
    values, weights = zip((PRIOR_DISPERSION, PRIOR_WINDOWS), *told, strict=True)
    return max(LEAST_DISPERSION, float(np.average(values, weights=weights)))


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
    deviations = np.linspace(-3.2, 3.2, 65)  # Standard errors; what is beyond has no weight.
    per_s = capacity.per_s * np.exp(deviations * capacity.error)
    log_weight = -0.5 * deviations**2
    limit_s = objective.ttft_s - unloaded.ttft_s
    for trial in trials:
        if not trial.is_measured:
            continue
        load = trial.rate_per_s / per_s
        expected = np.clip(
            capacity.late_share(load, per_s, limit_s), 0.5 / trial.window, SATURATED_SHARE
        )
        # A queue forgets, or above the capacity becomes endless, within about (1 + d) / (1 - rho)^2
        # requests: what is shorter says little.
        distance = np.maximum(np.abs(1 - load) - spread, NEAREST_LOAD)
        independent = np.minimum(
            trial.window, trial.window * distance**2 / (1 + capacity.dispersion)
        )
        seen = trial.over_share
        log_weight -= independent * (
            rel_entr(seen, expected) + rel_entr(1 - seen, 1 - expected)  # Kullback and Leibler's
        )
    weight = np.exp(log_weight - log_weight.max())
    wanted = 1 - objective.ttft_quantile
    # P(W > limit) rises from 0 to 1 with the load, whatever the capacity.
    found = find_root(
        lambda load, c: capacity.late_share(load, c, limit_s) - wanted, (0.0, 1.0), args=(per_s,)
    )
    sustained = found.x * per_s
    mean = float(np.average(sustained, weights=weight))
    deviation = math.sqrt(float(np.average((sustained - mean) ** 2, weights=weight)))
    return mean, deviation / mean
