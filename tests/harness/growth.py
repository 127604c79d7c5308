"""Whether a series of counts grows: the slope of Theil and Sen, with what its noise leaves certain.

A leak adds something in every period; a restart, a slow member or a full cache adds something
once. So the slope is the median of the slopes between all pairs of periods, which up to 29% of
outliers cannot move, and a series *grows* if the lower end of the slope's confidence interval
(Sen 1968, from the distribution of Kendall's S; no assumption on the noise) is above what is
allowed. A constant series never grows, and noise widens the interval until it says nothing.

Counts of one process say nothing about those of its successor in another run: a series may come in
several stretches, and only pairs within a stretch count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

Z: Final = 2.326
"""Of a one-sided confidence of 99%: one of a hundred series of pure noise has its bound above 0,
and far fewer have it above what is allowed."""
MIN_PAIRS: Final = 23
"""Pairs that a verdict needs: half of those of ten periods without interruption."""


@dataclass(frozen=True)
class Trend:
    """How a series changes.

    Attributes:
        per_period: Median slope.
        at_least: Its lower bound, with a confidence of 99%.
        noise: Median absolute distance of the values from that slope's line.
    """

    per_period: float
    at_least: float
    noise: float


def trend_of(stretches: Sequence[Sequence[float]]) -> Trend | None:
    """The trend of values taken at equal distances; None of too few."""
    slopes = sorted(
        (later - earlier) / (j - i)
        for values in stretches
        for (i, earlier), (j, later) in combinations(enumerate(values), 2)
    )
    if len(slopes) < MIN_PAIRS:
        return None
    slope = _quantile(slopes, (len(slopes) - 1) / 2)
    # Of Kendall's S, which is the number of rising pairs less that of falling ones.
    variance = sum(n * (n - 1) * (2 * n + 5) / 18 for n in map(len, stretches))
    lower = _quantile(slopes, (len(slopes) - Z * math.sqrt(variance)) / 2 - 1)
    noise = sorted(distance for values in stretches for distance in _distances(values, slope))
    return Trend(slope, lower, _quantile(noise, (len(noise) - 1) / 2))


def _distances(values: Sequence[float], slope: float) -> list[float]:
    rests = sorted(value - slope * i for i, value in enumerate(values))
    middle = _quantile(rests, (len(rests) - 1) / 2)
    return [abs(rest - middle) for rest in rests]


def _quantile(ordered: Sequence[float], at: float) -> float:
    """The value at a position, between two by their weights; the ends at positions beyond them."""
    at = min(max(at, 0.0), len(ordered) - 1.0)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
