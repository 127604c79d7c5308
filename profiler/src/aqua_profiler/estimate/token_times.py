"""The rate that a limit of token times allows, from how tokens slow down as requests add up.

The p99 of a trial is what its few busiest moments were like: how many requests ran at once wanders
as slowly as requests come and go, a trial of minutes holds some tens of independent moments, and
its quantile is too low more often than not. So a trial is not asked for its quantile but for a
property of the server that it shows thousands of times: how fast tokens come while `n` requests are
in the system (`GapHistogram`, a table by level n). How often each level is visited at a rate then
follows: requests that share a server, each going on at a speed that depends on their number alone,
leave level n at the rate mu(n) = gaps per second at n / gaps per request, and with Poisson arrivals

    P(n) ~ rate^n / (mu(1) mu(2) ... mu(n)),

whatever the distribution of their lengths (processor sharing is insensitive to it). Of the gaps at
level n the share s(n) is too long; the sustained rate is where

    sum P(n) gaps(n) s(n) / sum P(n) gaps(n)

reaches what the objective allows.

Pure. Not promised: servers whose tokens slow down for a reason that neither the number of requests
nor the rate explains; there a run's own quantile knows better, and `rate` weighs both.

Source: Cohen 1979, "The multiple phase service network with generalized processor sharing". The
paper takes the p99 of each trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_profiler.measure.gap_histogram import GAP_BIN, GAP_REACH, PARTS, GapHistogram, level_sizes

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


KERNEL: Final = 0.08
"""Levels within that relative distance tell of each other's gaps."""

NEAR_RATE: Final = 0.25
FAR_WORTH: Final = 0.02
"""Trials at other rates count less: others' prompts slow tokens down too, and come with the
rate."""

FILLING_WORTH: Final = 0.3
"""Of a ramp, and of a trial that was ended because it was too much: requests pass through each
level once, on the way up, so that what is known of a level comes from a single moment."""

LEAST_LONG: Final = 20
LONG_BIN: Final = round(math.log(0.6) / GAP_BIN)
"""Gaps of more than 0.6 of the limit that must have been seen: from fast tokens alone it is not
guessed how they slow down."""

LEAST_GAPS: Final = 30.0
"""Of a level that counts as visited."""

LOWEST_LOG_RATE: Final = math.log(1e-5)
STIFFNESS: Final = 3000.0
KNOTS: Final = 60
MOST_LEVEL: Final = 3000
ROUNDS: Final = 3
"""Which trials are near depends on the answer; it settles at once."""

CLOSE_WORTH: Final = 0.3
LEAST_RUNS: Final = 3
LEAST_ERROR: Final = 0.01
REACH_ERROR: Final = 0.25
"""For each e-fold between the levels visited and those where gaps are slow: how wrong a straight
line may be there."""

UNTOLD_ERROR: Final = 0.3
"""Where a part of the trials alone would not have shown a limit at all."""


@dataclass(frozen=True, slots=True)
class TrialGaps:
    """A trial, as far as its paces go.

    Attributes:
        rate_per_s: Of its arrivals.
        is_filling: A ramp, or ended because it was too much: it passed each level on its way up.
        parts: Its tables.
    """

    rate_per_s: float
    is_filling: bool
    parts: tuple[GapHistogram, ...]


def token_time_rate(
    trials: Sequence[TrialGaps],
    gaps_per_request: float,
    allowed: float,
    *,
    ceiling_per_s: float = math.inf,
) -> tuple[float, float] | None:
    """The rate at which the share of slow gaps reaches `allowed`, and its relative error.

    None where no trial has had slow gaps enough to tell. Beyond `ceiling_per_s` another limit
    holds: how far beyond token times reach theirs is then no part of the error.
    """
    parts = [part for trial in trials for part in trial.parts]
    if sum(count for part in parts for _, gap, count in part.gaps if gap > LONG_BIN) < LEAST_LONG:
        return None
    near: float | None = None
    for _ in range(ROUNDS):
        weighted = [(part, _worth(trial, near)) for trial in trials for part in trial.parts]
        server = _Server.of(weighted, gaps_per_request)
        near = None if server is None else server.crossing(allowed)
        if server is None or near is None:
            return None
    assert server is not None
    assert near is not None
    reach = server.reach(near)
    # A trial that fills up is at each level once, so that it is left out as a whole or not at all.
    by_part = [
        (number if trial.is_filling else place) % PARTS
        for number, trial in enumerate(trials)
        for place in range(len(trial.parts))
    ]
    scatter = _scatter(weighted, by_part, gaps_per_request, allowed, ceiling_per_s)
    # Parts of a trial share its weather, and machines with neighbours have some: so whole trials,
    # too.
    close = [trial for trial in trials if _worth(trial, near) > CLOSE_WORTH]
    if len(close) >= LEAST_RUNS:
        whole = [(part, _worth(trial, near)) for trial in close for part in trial.parts]
        by_run = [place % PARTS for place, trial in enumerate(close) for _ in trial.parts]
        by_whole_run = _scatter(whole, by_run, gaps_per_request, allowed, ceiling_per_s)
        scatter = max(scatter, by_whole_run)
    return near, math.hypot(LEAST_ERROR, scatter, REACH_ERROR * reach)


def _scatter(
    weighted: Sequence[tuple[GapHistogram, float]],
    groups: Sequence[int],
    gaps_per_request: float,
    allowed: float,
    ceiling_per_s: float,
) -> float:
    """Relative standard error, from leaving out one group after the other (jackknife)."""
    logs = []
    for group in sorted(set(groups)):
        rest = [pair for pair, own in zip(weighted, groups, strict=True) if own != group]
        server = _Server.of(rest, gaps_per_request)
        if server is None:
            return UNTOLD_ERROR
        # Without these, tokens might not be a limit at all, and then something else is.
        found = min(server.crossing(allowed) or math.inf, ceiling_per_s)
        if found == math.inf:
            return UNTOLD_ERROR
        logs.append(math.log(found))
    apart = np.array(logs) - np.mean(logs)
    return min(1.0, math.sqrt((len(logs) - 1) / len(logs) * float(apart @ apart)))


def _worth(trial: TrialGaps, near_per_s: float | None) -> float:
    worth = FILLING_WORTH if trial.is_filling else 1.0
    if near_per_s is None:
        return worth
    distance = math.log(trial.rate_per_s / near_per_s) / NEAR_RATE
    return worth * max(FAR_WORTH, math.exp(-0.5 * distance**2))


@dataclass(frozen=True, slots=True)
class _Server:
    """What all trials together say, at every number of requests from 0 up.

    Attributes:
        log_leaving: Logarithm of mu(n), for n from 1.
        gaps: Per second, for n from 1.
        slow: Share of them beyond the limit, for n from 1.
        seen: Highest level of which enough gaps are known.
    """

    log_leaving: Floats
    gaps: Floats
    slow: Floats
    seen: int

    @classmethod
    def of(
        cls, weighted: Sequence[tuple[GapHistogram, float]], gaps_per_request: float
    ) -> _Server | None:
        """None where tokens have hardly been slow."""
        size = max((len(part.seconds) for part, _ in weighted), default=0)
        seconds = np.zeros(size)
        counts = np.zeros((size, 2 * GAP_REACH + 1))
        for part, worth in weighted:
            seconds[: len(part.seconds)] += worth * np.array(part.seconds)
            if part.gaps:
                levels, bins, many = np.array(part.gaps).T
                np.add.at(counts, (levels, bins + GAP_REACH), worth * many)
        total = counts.sum(axis=1)
        told = (seconds > 0) & (total > 0) & (np.arange(size) > 0)
        if not told.any() or gaps_per_request <= 0:
            return None
        centers, seconds, counts, total = (
            level_sizes(size)[told],
            seconds[told],
            counts[told],
            total[told],
        )
        top = int(min(MOST_LEVEL, max(3 * centers[-1], centers[-1] + 20)))
        level = np.arange(1, top + 1, dtype=float)
        # Seconds per gap, times the level: what one request sees, its time in a queue included.
        own = centers * seconds / total
        gaps = level / _smoothed(centers, own, total / own**2, level)
        # What gaps themselves last does not grow with a queue.
        lasts = counts @ np.exp(np.arange(-GAP_REACH, GAP_REACH + 1) * GAP_BIN) / total
        typical = _smoothed(centers, lasts, total / lasts**2, level)
        at_data = np.interp(centers, level, typical)
        slow = _slow_shares(level, typical, centers, at_data, counts)
        seen = int(centers[total >= min(LEAST_GAPS, total.max())][-1])
        return cls(np.log(gaps / gaps_per_request), gaps, slow, seen)

    def crossing(self, allowed: float) -> float | None:
        """The rate at which the share of slow gaps is `allowed`."""
        low, high = LOWEST_LOG_RATE, float(self.log_leaving.max())
        if self._share(high) <= allowed:
            return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self._share(middle) > allowed else (middle, high)
        return math.exp(low)

    def reach(self, rate_per_s: float) -> float:
        """How far beyond the levels visited the slow gaps at that rate are: mean of ln(n / seen).

        None of it counts where all gaps of the highest level visited are slow: so are those above.
        """
        mass = self._visits(math.log(rate_per_s)) * self.gaps * self.slow
        level = np.arange(1, len(mass) + 1)
        beyond = np.log(np.maximum(level / self.seen, 1.0))
        mean = float((mass * beyond).sum() / max(mass.sum(), 1e-300))
        return mean * (1 - float(self.slow[self.seen - 1]))

    def _visits(self, log_rate: float) -> Floats:
        level = np.arange(1, len(self.gaps) + 1)
        log_visits = level * log_rate - np.cumsum(self.log_leaving)
        visits: Floats = np.exp(log_visits - log_visits.max())
        return visits

    def _share(self, log_rate: float) -> float:
        gaps = self._visits(log_rate) * self.gaps
        return float((gaps * self.slow).sum() / gaps.sum())


def _slow_shares(
    level: Floats, typical: Floats, centers: Floats, at_data: Floats, counts: Floats
) -> Floats:
    """Of the gaps at every level, the share beyond the limit: from gaps nearby, to scale."""
    beyond = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    beyond = np.concatenate([beyond, np.zeros((len(centers), 1))], axis=1)
    # A gap at a level m would last typical(n) / typical(m) times as long at the level n.
    edge = (np.log(at_data)[None, :] - np.log(typical)[:, None]) / GAP_BIN + GAP_REACH + 1
    edge = np.clip(edge, 0, 2 * GAP_REACH + 1)
    whole = np.minimum(edge.astype(np.int64), 2 * GAP_REACH)
    rows = np.arange(len(centers))[None, :]
    part = edge - whole
    over = beyond[rows, whole] * (1 - part) + beyond[rows, whole + 1] * part
    width = np.maximum(KERNEL, 0.7 / level)[:, None]
    log_near = -0.5 * ((np.log(level)[:, None] - np.log(centers)[None, :]) / width) ** 2
    log_near = np.maximum(log_near, -600.0)
    near = np.exp(log_near - log_near.max(axis=1, keepdims=True))
    shares: Floats = (near * over).sum(axis=1) / (near * beyond[:, 0][None, :]).sum(axis=1)
    return shares


def _smoothed(at: Floats, values: Floats, weights: Floats, wanted: Floats) -> Floats:
    """A curve through weighted points, straight where nothing else is known (Whittaker, 1923)."""
    knots = np.unique(np.concatenate([np.linspace(0, at[-1], KNOTS), [wanted[-1]]]))
    place = np.clip(np.searchsorted(knots, at) - 1, 0, len(knots) - 2)
    share = (at - knots[place]) / (knots[place + 1] - knots[place])
    design = np.zeros((len(at), len(knots)))
    design[np.arange(len(at)), place] = 1 - share
    design[np.arange(len(at)), place + 1] = share
    steps = np.diff(knots)
    bend = np.zeros((len(knots) - 2, len(knots)))
    row = np.arange(len(knots) - 2)
    bend[row, row] = 1 / steps[:-1]
    bend[row, row + 1] = -1 / steps[:-1] - 1 / steps[1:]
    bend[row, row + 2] = 1 / steps[1:]
    scale = STIFFNESS * weights.sum() * (at[-1] / KNOTS) ** 2
    normal = design.T @ (weights[:, None] * design) + scale * bend.T @ bend
    fitted = np.linalg.solve(normal + 1e-12 * np.eye(len(knots)), design.T @ (weights * values))
    # More requests never make tokens faster, but for scatter.
    curve = np.maximum.accumulate(np.interp(wanted, knots, fitted))
    return np.maximum(curve, 0.2 * float(values.min()))
