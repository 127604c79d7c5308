"""Whether a machine changed its speed between trials, and what each would have been without.

Machines with neighbours are faster in one minute than in the next, by a tenth and more. Trials then
contradict each other, and two profiles of one deployment differ by the minutes that each had. The
speed of a trial is seen apart from its load: how long the median gap between tokens was with `n`
requests in the system, over all n that other trials have visited too. The median, for a long prompt
makes some gaps slow and says nothing about the machine. A server whose speed is constant shows
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
from jaxtyping import Float64

from aqua_profiler.measure.gap_histogram import GAP_BIN, GAP_REACH, GapHistogram, pooled
from aqua_profiler.measure.summary import TrialSummary

LEAST_DRIFT: Final = 0.025
"""Standard deviation of the logarithm of speed between trials that counts as drift. Of servers
whose speed is constant it was 0.011 at most; twice as much would hide 5%, which moves a rate by 6
to 8%."""

LEAST_TRIALS: Final = 3
"""Trials from which a spread is computed; of two, one is as likely to be the odd one. Doubled, a
search on a drifting machine would end before the drift is seen."""

LEAST_GAPS: Final = 10
"""Gaps of a level in a trial for its median to count, chosen by hand. Doubled, rare levels drop
out, which had little weight."""

MEDIAN_FACTOR: Final = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of normal values."""


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
        """Standard error of the logarithm of the median speed."""
        return MEDIAN_FACTOR * self.spread / math.sqrt(len(self.slowness))


def drift_of(trials: Sequence[Sequence[GapHistogram]]) -> Drift | None:
    """None where the speed was constant as far as can be seen.

    Args:
        trials: Tables of each, of trials at rates not far from each other.
    """
    if len(trials) < LEAST_TRIALS:
        return None
    _, together = pooled((part, 1.0) for parts in trials for part in parts)
    typical = _log_medians(together)
    slowness = []
    for parts in trials:
        _, counts = pooled((part, 1.0) for part in parts)
        total = counts.sum(axis=1)
        told = np.flatnonzero(total >= LEAST_GAPS)
        if not told.size:
            return None
        apart = _log_medians(counts)[told] - typical[told]
        slowness.append(float(np.average(apart, weights=total[told])))
    relative = np.array(slowness) - np.median(slowness)
    spread = float(relative.std(ddof=1))
    return Drift(tuple(relative.tolist()), spread) if spread >= LEAST_DRIFT else None


def rescaled(trial: TrialSummary, slowness: float) -> TrialSummary:
    """The trial, had its machine been at the usual speed: every time divided by exp(slowness)."""
    shift, factor = round(slowness / GAP_BIN), math.exp(-slowness)
    parts = tuple(
        GapHistogram(
            tuple(value * factor for value in part.seconds),
            tuple(
                (level, max(-GAP_REACH, min(GAP_REACH, gap - shift)), count)
                for level, gap, count in part.gaps
            ),
        )
        for part in trial.paces
    )
    return replace(trial, paces=parts)


def _log_medians(counts: Float64[np.ndarray, "levels bins"]) -> Float64[np.ndarray, " levels"]:
    """Of each level, the logarithm of the median gap over the limit."""
    half = 0.5 * counts.sum(axis=1, keepdims=True)
    medians: Float64[np.ndarray, " levels"] = (
        (np.cumsum(counts, axis=1) < half).sum(axis=1) - GAP_REACH
    ) * GAP_BIN
    return medians
