"""The rate that a limit of token times allows, from how tokens slow down as requests add up.

The p99 of a trial is what its few busiest moments were like: how many requests ran at once wanders
as slowly as requests come and go, a trial of minutes holds some tens of independent moments, and
its quantile is too low more often than not. So a trial is not asked for its quantile but for a
property of the server that it shows thousands of times: how fast tokens come while `n` requests are
in the system (`GapHistogram`). A gap lasts a + b n, times a factor of chance whose distribution is
the same at every n. How often each n is visited at a rate then follows: requests that share a
server, each going on at a speed that depends on their number alone, leave level n at the rate
mu(n) = gaps per second at n / gaps per request, and with Poisson arrivals

    P(n) ~ rate^n / (mu(1) mu(2) ... mu(n)),

whatever the distribution of their lengths (processor sharing is insensitive to it). Of the gaps at
level n the share s(n) is too long; the sustained rate is where

    sum P(n) gaps(n) s(n) / sum P(n) gaps(n)

reaches what the objective allows.

Pure. Not promised: servers whose tokens slow down for a reason that neither the number of requests
nor the rate explains.

Source: Cohen 1979, "The multiple phase service network with generalized processor sharing". The
paper takes the p99 of each trial. A straight line does as well as smoothers of any stiffness
(docs/measurements/profiling.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq

from aqua_profiler.measure.gap_histogram import (
    GAP_BIN,
    GAP_REACH,
    LEVELS,
    PARTS,
    GapHistogram,
    pooled,
)
from aqua_profiler.measure.summary import TrialSummary

NEAR_RATE: Final = 0.25
"""Distance in ln(rate) at which a trial counts for exp(-1/2): prompts of others slow tokens down
too, and come with the rate. At twice that, rates of small engines are 3% too high."""

FAR_WEIGHT: Final = 0.02
"""Weight of any other trial, however far: it says where the straight line leads. Without it 2 of 20
searches of a server whose tokens hardly slow down found no limit; ten times as much is too near."""

FILLING_WEIGHT: Final = 0.3
"""Weight of a ramp, or a trial that was ended because it was too much: requests pass each level
once, on the way up, so that what is known of a level comes from a single moment. Weights of 1 put 2
of 110 searches beyond 5%, of 0 put 3 there; anything between, doubled too, does."""

# Gaps of more than 0.6 of the limit that must have been seen: from fast tokens alone it is not
# guessed how they slow down. Doubled, a search steps up once more.
LEAST_LONG_GAPS: Final = 20
LONG_BIN: Final = round(math.log(0.6) / GAP_BIN)

LEAST_ERROR: Final = 0.01
"""Relative error that parts of the same trials cannot show: of the straight line. Doubled, searches
never reach the default precision of 1.8% and spend all their requests."""

REACH_ERROR: Final = 0.25
"""Relative error for each e-fold of requests between the levels visited and those where gaps are
slow: how wrong a straight line may be there. Without it a search stops at an extrapolation, and one
in 20 of a small engine's was 7% too high; doubled, it takes another trial."""

LEAST_GAPS: Final = 30.0
"""Gaps of a level that counts as visited, chosen by hand: a level passed once does not. Doubled,
levels at the edge count as extrapolated."""

UNKNOWN_ERROR: Final = 0.3
"""Relative error where a part of the trials alone would not have shown a limit at all. Doubled,
nothing changes: anything far above the precision asked for makes the search go on."""


def _weight(trial: TrialSummary, near_per_s: float | None) -> float:
    """What a trial's gaps count at a rate."""
    weight = 1.0 if trial.is_measured else FILLING_WEIGHT
    if near_per_s is None:
        return weight
    distance = math.log(trial.rate_per_s / near_per_s) / NEAR_RATE
    return weight * max(FAR_WEIGHT, math.exp(-0.5 * distance**2))


def token_time_rate(
    trials: Sequence[TrialSummary],
    gaps_per_request: float,
    allowed: float,
    *,
    ceiling_per_s: float = math.inf,
) -> tuple[float, float] | None:
    """The rate at which the share of slow gaps reaches `allowed`, and its relative error.

    None where no trial has had slow gaps enough to tell. Beyond `ceiling_per_s` another limit
    holds: how far beyond token times reach theirs is then no part of the error.
    """
    parts = [part for trial in trials for part in trial.paces]
    if sum(count for part in parts for _, gap, count in part.gaps if gap > LONG_BIN) < (
        LEAST_LONG_GAPS
    ):
        return None
    weighted = [(part, _weight(trial, None)) for trial in trials for part in trial.paces]
    first = _crossing(weighted, gaps_per_request, allowed)
    if first is None:
        return None
    # Which trials are near depends on the answer, which settles at once.
    weighted = [(part, _weight(trial, first[0])) for trial in trials for part in trial.paces]
    found = _crossing(weighted, gaps_per_request, allowed)
    if found is None:
        return None
    rate, reach = found
    # A trial that fills up is at each level once, so that it is left out as a whole or not at all.
    groups = [
        (part if trial.is_measured else number) % PARTS
        for number, trial in enumerate(trials)
        for part in range(len(trial.paces))
    ]
    logs = []
    for left_out in set(groups):
        rest = [pair for pair, group in zip(weighted, groups, strict=True) if group != left_out]
        without, _ = _crossing(rest, gaps_per_request, allowed) or (math.inf, 0.0)
        if min(without, ceiling_per_s) == math.inf:
            return rate, UNKNOWN_ERROR
        logs.append(math.log(min(without, ceiling_per_s)))
    jackknife = math.sqrt((len(logs) - 1) * float(np.var(logs)))
    return rate, math.hypot(LEAST_ERROR, min(1.0, jackknife), REACH_ERROR * reach)


def _crossing(
    weighted: Sequence[tuple[GapHistogram, float]], gaps_per_request: float, allowed: float
) -> tuple[float, float] | None:
    """The rate at which the share of slow gaps is `allowed`; None where there is none.

    And how far beyond the levels visited the slow gaps at that rate are: the mean of ln(n / seen).
    None of it counts where all gaps of the highest level visited are slow: so are those above.
    """
    seconds, counts = pooled(weighted)
    told = (seconds > 0) & (counts.sum(axis=1) > 0) & (LEVELS[: seconds.size] > 0)
    if not told.any() or gaps_per_request <= 0:
        return None
    requests, seconds, counts = LEVELS[: seconds.size][told], seconds[told], counts[told]
    total = counts.sum(axis=1)
    # Three times the highest level visited is as far as a straight line is trusted.
    level = np.arange(1, 3 * int(requests[-1]) + 20, dtype=float)
    # What one request sees, its time in a queue included: seconds per gap, times the level.
    gaps_per_s = level / _line(requests, requests * seconds / total, total, level)
    # What gaps themselves last, in limits, does not grow with a queue.
    log_gap = (np.arange(-GAP_REACH, GAP_REACH + 1) - 0.5) * GAP_BIN
    lasts = counts @ np.exp(log_gap) / total
    factors = (log_gap - np.log(_line(requests, lasts, total, requests))[:, None]).ravel()
    order = np.argsort(factors)
    each = counts.ravel()[order]
    below = (np.cumsum(each) - each / 2) / each.sum()
    too_long = -np.log(_line(requests, lasts, total, level))
    slow = 1 - np.interp(too_long, factors[order], below, left=0.0, right=1.0)
    log_leaving = np.cumsum(np.log(gaps_per_s / gaps_per_request))

    def gaps_at(log_rate: float) -> Float64[np.ndarray, " levels"]:
        log_visits = level * log_rate - log_leaving
        gaps = np.exp(log_visits - log_visits.max()) * gaps_per_s
        shares: Float64[np.ndarray, " levels"] = gaps / gaps.sum()
        return shares

    def excess(log_rate: float) -> float:
        return float(gaps_at(log_rate) @ slow) - allowed

    low, high = math.log(1e-5), math.log(float(gaps_per_s.max()) / gaps_per_request)
    if excess(high) <= 0:
        return None
    found = low if excess(low) >= 0 else brentq(excess, low, high, xtol=1e-6)
    seen = requests[total >= min(LEAST_GAPS, total.max())][-1]
    beyond = np.average(np.log(np.maximum(level / seen, 1)), weights=gaps_at(found) * slow + 1e-300)
    return math.exp(found), float(beyond) * (1 - float(slow[int(seen) - 1]))


def _line(
    at: Float64[np.ndarray, " seen"],
    values: Float64[np.ndarray, " seen"],
    counts: Float64[np.ndarray, " seen"],
    wanted: Float64[np.ndarray, " levels"],
) -> Float64[np.ndarray, " levels"]:
    """A straight line through values known to a share 1/sqrt(count); it never falls."""
    if at.size == 1:
        return np.full(wanted.shape, values[0])
    slope, start = np.polyfit(at, values, 1, w=np.sqrt(counts) / values)
    if slope < 0:  # More requests never make tokens faster, but for scatter.
        return np.full(wanted.shape, float(counts @ values / counts.sum()))
    # Where the line begins below zero, a fifth of the fastest level seen bounds it.
    line: Float64[np.ndarray, " levels"] = np.maximum(start + slope * wanted, 0.2 * values.min())
    return line
