"""How fast tokens come while `n` requests are in the system: time and gaps, by level n.

A trial shows thousands of gaps between tokens. Kept by the number of requests in the system when
each began, in bins of its logarithm, they are a property of the server and not of the trial's few
busiest moments. Levels up to `EXACT_LEVELS` stand for themselves, those above in groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

PARTS: Final = 4
"""Of a trial, one after the other: what the error is estimated from."""

EXACT_LEVELS: Final = 48

LEVEL_GROWTH: Final = 0.03
"""Levels above are kept in groups of 3%."""

GAP_BIN: Final = 0.02

GAP_REACH: Final = 250
"""Bins of ln(gap / limit), and how many on each side: a factor of 148. Those above 0 are slow."""


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """One part of a trial: time spent and gaps between tokens, by requests in the system.

    Attributes:
        seconds: Spent at each level's index.
        gaps: (level's index, bin of the gap, count).
    """

    seconds: tuple[float, ...]
    gaps: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> GapHistogram:
        """Read what `asdict` wrote."""
        return cls(tuple(content["seconds"]), tuple((a, b, c) for a, b, c in content["gaps"]))


def gap_histograms(
    changes: tuple[Floats, Floats],
    gaps: tuple[Floats, Floats, Floats],
    limit_s: float,
    since_s: float,
    until_s: float,
) -> tuple[GapHistogram, ...]:
    """The tables of a trial, in parts of equal length.

    Args:
        changes: Times at which the number of requests in the system changed, ascending, and that
            number from then on.
        gaps: When each gap ended, how long it was, and how many requests there were then.
        limit_s: Of a gap.
        since_s: What was before is left out.
        until_s: What is after is left out.
    """
    times, counts = changes
    edges = np.linspace(since_s, max(since_s, until_s), PARTS + 1)
    ended_s, lasted_s, crowds = gaps
    levels = _indices(crowds)
    bins = np.clip(
        np.ceil(np.log(np.maximum(lasted_s, 1e-9) / limit_s) / GAP_BIN - 1e-6),
        -GAP_REACH,
        GAP_REACH,
    )
    tables = []
    for low, high in pairwise(edges):
        begins = np.clip(times, low, high)
        spent = np.diff(np.append(begins, high))
        seconds = np.bincount(_indices(counts), weights=spent) if counts.size else np.zeros(0)
        inside = (ended_s > low) & (ended_s <= high)
        pairs, many = np.unique(
            np.stack([levels[inside], bins[inside].astype(np.int64)]), axis=1, return_counts=True
        )
        tables.append(
            GapHistogram(
                tuple(float(round(value, 6)) for value in seconds),
                tuple(
                    (int(level), int(gap), int(count))
                    for level, gap, count in zip(*pairs, many, strict=True)
                ),
            )
        )
    return tuple(tables)


def _indices(levels: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Where a number of requests is kept."""
    above = np.log(np.maximum(levels, EXACT_LEVELS) / EXACT_LEVELS) / LEVEL_GROWTH
    return np.where(levels <= EXACT_LEVELS, levels, EXACT_LEVELS + np.ceil(above - 1e-9)).astype(
        np.int64
    )


def level_sizes(size: int) -> Floats:
    """The number of requests that each index stands for."""
    index = np.arange(size, dtype=float)
    grown = EXACT_LEVELS * np.exp((index - EXACT_LEVELS - 0.5) * LEVEL_GROWTH)
    return np.where(index <= EXACT_LEVELS, index, grown)
