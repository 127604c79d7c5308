"""Whether a machine changed its speed between trials, and what each trial would have been without.

Machines with neighbours are faster in one minute than in the next, by a tenth and more. Trials then
contradict each other, and two profiles of one deployment differ by what weather each had. The speed
of a trial is seen apart from its load: how long the median gap between tokens was with `n` requests
in the system, over all n that other trials have visited too. The median, for a long prompt makes
some gaps slow and says nothing about the machine. A server whose speed is constant shows
differences of a percent, by chance and by other prompts; what is beyond that is drift.

With drift, every trial is put to the scale of the median speed, so that the rate found is what the
machine sustains in a usual minute; that this median is itself uncertain is a part of the error.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aqua_profiler.estimate.token_times import TrialGaps
from aqua_profiler.measure.gap_histogram import GAP_BIN, GAP_REACH, Floats, GapHistogram

LEAST_DRIFT: Final = 0.025
"""Standard deviation of the logarithm of speed between trials that counts as drift. Of servers
whose speed is constant it was 0.011 at most."""

LEAST_RUNS: Final = 3
LEAST_GAPS: Final = 10
"""Of a level in a trial, for its median to count."""

MEDIAN_FACTOR: Final = 1.2533
"""Standard error of a median over that of a mean."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How trials differ in speed.

    Attributes:
        slowness: Of each trial, the logarithm of its gaps over the median trial's.
        spread: Standard deviation of that.
    """

    slowness: tuple[float, ...]
    spread: float

    @property
    def error(self) -> float:
        """Of the median speed, as a standard error of its logarithm."""
        return MEDIAN_FACTOR * self.spread / math.sqrt(len(self.slowness))


def drift_of(trials: Sequence[Sequence[GapHistogram]]) -> Drift | None:
    """None where the speed was constant as far as can be seen.

    Args:
        trials: Tables of each, of trials at rates not far from each other.
    """
    if len(trials) < LEAST_RUNS:
        return None
    size = max((len(part.seconds) for trial in trials for part in trial), default=0)
    tables = [_counts(trial, size) for trial in trials]
    typical = _medians(np.sum(tables, axis=0))
    slowness = []
    for table in tables:
        total = table.sum(axis=1)
        told = total >= LEAST_GAPS
        if not told.any():
            return None
        apart = (_medians(table) - typical)[told]
        slowness.append(float(total[told] @ apart) / float(total[told].sum()))
    relative = np.array(slowness) - np.median(slowness)
    spread = float(relative.std(ddof=1))
    if spread < LEAST_DRIFT:
        return None
    return Drift(tuple(float(value) for value in relative), spread)


def rescaled(trial: TrialGaps, slowness: float) -> TrialGaps:
    """The trial, had its machine been at the usual speed: every time divided by exp(slowness)."""
    shift = round(slowness / GAP_BIN)
    factor = math.exp(-slowness)
    return replace(
        trial,
        parts=tuple(
            GapHistogram(
                tuple(value * factor for value in part.seconds),
                tuple(
                    (level, max(-GAP_REACH, min(GAP_REACH, gap - shift)), count)
                    for level, gap, count in part.gaps
                ),
            )
            for part in trial.parts
        ),
    )


def _counts(parts: Sequence[GapHistogram], size: int) -> Floats:
    """Gaps by level and bin."""
    counts = np.zeros((size, 2 * GAP_REACH + 1))
    for part in parts:
        if part.gaps:
            levels, bins, many = np.array(part.gaps).T
            np.add.at(counts, (levels, bins + GAP_REACH), many)
    return counts


def _medians(counts: Floats) -> Floats:
    """Of each level, the logarithm of the median gap over the limit."""
    below = np.cumsum(counts, axis=1)
    half = 0.5 * counts.sum(axis=1, keepdims=True)
    medians: Floats = ((below < half).sum(axis=1) - GAP_REACH) * GAP_BIN
    return medians
