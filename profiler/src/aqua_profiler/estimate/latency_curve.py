"""Where a latency that rises smoothly with the rate crosses its limit, from quantiles of trials.

What is left where nothing better is known of the server: neither a capacity (`heavy_traffic`) nor
how its tokens slow down (`token_times`). Near a limit a latency is a power of the rate, a line in
logarithms.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_profiler.measure.compliance import is_measured
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.objective import LatencyObjective

LEAST_CURVE_ERROR: Final = 0.02
CURVE_REACH: Final = 0.35
"""A latency curve counts as straight (in logarithms) within that relative distance."""

LEAST_SLOPE: Final = 0.3
"""Least growth of ln latency over ln rate at a limit: flatter is scatter."""


@dataclass(frozen=True, slots=True)
class Point:
    """A latency quantile at a rate, as the logarithm of its ratio to the limit."""

    rate: float
    log_ratio: float
    error: float


def points_of(
    objective: LatencyObjective, trials: Sequence[TrialSummary], reason: str
) -> list[Point]:
    """The objective's quantiles in all measured trials, of `tbt` or of `ttft`."""
    points = []
    for trial in trials:
        value, error, limit = (
            (trial.tbt_s, trial.tbt_error, objective.tbt_s)
            if reason == "tbt"
            else (trial.ttft_s, trial.ttft_error, objective.ttft_s)
        )
        if is_measured(trial) and value:
            points.append(
                Point(trial.rate_per_s, math.log(value / limit), max(error, LEAST_CURVE_ERROR))
            )
    return points


def crossing(points: Sequence[Point], high: float) -> tuple[float, float] | None:
    """Where a line through the nearest points, weighted by their errors, meets the limit.

    All of them: single trials near the limit fall on either side of it by chance.
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
