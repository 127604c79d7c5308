"""Histograms as Prometheus keeps them: counts up to bounds, by window.

Values between two bounds are spread evenly in logarithms. A histogram without a bound below
infinity says how many values there were, and nothing of them.
"""

from __future__ import annotations

from math import inf, isfinite, isnan

import numpy as np
from jaxtyping import Float64

Windows = Float64[np.ndarray, " windows"]


def is_bound(text: str) -> bool:
    """Whether a label of a bucket is one."""
    try:
        return not isnan(float(text))
    except ValueError:
        return False


def _cumulated(buckets: dict[str, Windows]) -> tuple[list[float], Float64[np.ndarray, " bounds"]]:
    """Bounds of a histogram, and how many are up to each."""
    sums = sorted((float(le), float(np.nansum(values))) for le, values in buckets.items())
    return [bound for bound, _ in sums], np.maximum.accumulate([count for _, count in sums])


def tells(buckets: dict[str, Windows]) -> bool:
    """Whether a histogram counted something, and has a bound below infinity to place it by."""
    bounds, sums = _cumulated(buckets)
    return bool(sums.size and sums[-1] > 0 and isfinite(bounds[0]))


def drawn_values(
    buckets: dict[str, Windows], count: int, generator: np.random.Generator
) -> Float64[np.ndarray, " count"]:
    """Lengths from a histogram, even in logarithms between its bounds; stratified."""
    bounds, sums = _cumulated(buckets)
    if not count or not tells(buckets):
        return np.ones(count)
    levels = (generator.permutation(count) + generator.random(count)) / count * sums[-1]
    highest = max(bound for bound in bounds if isfinite(bound))
    ends = np.log([min(max(bound, 1.0), 2.0 * highest) for bound in bounds])
    drawn = np.interp(levels, np.append(0.0, sums), np.append(0.0, ends))
    return np.asarray(np.exp(drawn), dtype=np.float64)


def quantile(buckets: dict[str, Windows], level: float) -> float:
    """A quantile of a histogram, as Prometheus reckons it."""
    bounds, sums = _cumulated(buckets)
    if not tells(buckets):
        return 0.0
    index = int(np.searchsorted(sums, level * sums[-1]))
    if bounds[index] == inf:
        return bounds[index - 1]
    low, before = (bounds[index - 1], sums[index - 1]) if index else (0.0, 0.0)
    return float(low + (bounds[index] - low) * (level * sums[-1] - before) / (sums[index] - before))
