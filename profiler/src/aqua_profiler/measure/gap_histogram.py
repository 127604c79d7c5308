"""How fast tokens come while `n` requests are in the system: time and gaps, by level n.

A trial shows thousands of gaps between tokens. Kept by the number of requests in the system when
each began, in bins of its logarithm, they are a property of the server and not of the trial's few
busiest moments. Low levels stand for themselves, high ones in groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

PARTS: Final = 4
"""Equal parts of a trial, one after the other; leaving out each in turn gives the error. With twice
as many each is too short to hold a busy moment of its own, and the error is found too small."""

LEVELS: Final = np.concatenate([[0], np.unique(np.geomspace(1, 1e5, 380).round())])
"""Requests in the system that are told apart: each number up to 33, then in steps of 3%, which
moves a gap by less than a bin. Twice as many levels double the journal and change nothing."""

GAP_BIN: Final = 0.02
"""Width of a bin of ln(gap / limit), about the profile's own precision of 1.8%. Three times as
wide, the rate of a server whose tokens hardly slow down was 7% lower."""

GAP_REACH: Final = 250
"""Bins on each side of the limit, a factor of 148: what is beyond counts as that. Twice as many
change nothing."""


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """One part of a trial: time spent and gaps between tokens, by requests in the system.

    Attributes:
        seconds: Spent at each index of `LEVELS`, up to the highest level visited.
        gaps: (index of the level, bin of the gap, count); bins above 0 exceed the limit.
    """

    seconds: tuple[float, ...]
    gaps: tuple[tuple[int, int, int], ...]


def gap_histograms(
    changes: tuple[Float64[np.ndarray, " changes"], Float64[np.ndarray, " changes"]],
    gaps: tuple[
        Float64[np.ndarray, " gaps"], Float64[np.ndarray, " gaps"], Float64[np.ndarray, " gaps"]
    ],
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
        since_s, until_s: What is before or after is left out.
    """
    times, counts = changes
    ended_s, lasted_s, crowds = gaps
    levels = _indices(crowds)
    bins = np.ceil(np.log(np.maximum(lasted_s, 1e-9) / limit_s) / GAP_BIN - 1e-6)
    bins = np.clip(bins, -GAP_REACH, GAP_REACH).astype(np.int64)
    tables = []
    for low, high in pairwise(np.linspace(since_s, max(since_s, until_s), PARTS + 1)):
        spent = np.diff(np.append(np.clip(times, low, high), high))
        seconds = np.bincount(_indices(counts), weights=spent)
        inside = (ended_s > low) & (ended_s <= high)
        pairs, many = np.unique(
            np.stack([levels[inside], bins[inside]]), axis=1, return_counts=True
        )
        gaps_of_part = np.vstack([pairs, many]).T.tolist()
        tables.append(
            GapHistogram(
                tuple(seconds.round(6).tolist()),
                tuple((level, gap, count) for level, gap, count in gaps_of_part),
            )
        )
    return tuple(tables)


def pooled(
    weighted: Iterable[tuple[GapHistogram, float]],
) -> tuple[Float64[np.ndarray, " levels"], Float64[np.ndarray, "levels bins"]]:
    """Seconds by level and gaps by level and bin, of several parts with their weights."""
    parts = list(weighted)
    size = max((len(part.seconds) for part, _ in parts), default=0)
    seconds, counts = np.zeros(size), np.zeros((size, 2 * GAP_REACH + 1))
    for part, weight in parts:
        seconds[: len(part.seconds)] += weight * np.array(part.seconds)
        if part.gaps:
            levels, bins, many = np.array(part.gaps).T
            np.add.at(counts, (levels, bins + GAP_REACH), weight * many)
    return seconds, counts


def _indices(levels: Float64[np.ndarray, " events"]) -> Int64[np.ndarray, " events"]:
    """The index of the nearest of `LEVELS`."""
    indices: Int64[np.ndarray, " events"]
    indices = np.digitize(levels, (LEVELS[1:] + LEVELS[:-1]) / 2)
    return indices
