"""Slots of a block store as they lie in its frames: where one copy ends and the next begins.

Slots are numbered through all frames of a store, `per_frame` to each. Arithmetic on numbers only:
what a slot holds and whether it is in use is the store's affair (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqualib.transports.rows import are_neighbours

if TYPE_CHECKING:
    import numpy.typing as npt

    Index = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """Blocks that lie next to each other: `size` from slot `start` of a frame.

    Attributes:
        ordinal: Which frame.
        start: First slot within it.
        size: How many.
        at: Position of the first in the caller's order.
    """

    ordinal: int
    start: int
    size: int
    at: int


def segments(slots: Index, per_frame: int) -> Iterator[Segment]:
    """Runs of consecutive slots, none across frames, in the order given."""
    if not len(slots):
        return
    ordinal, start = divmod(int(slots[0]), per_frame)
    if start + len(slots) <= per_frame and are_neighbours(slots):
        # What was paged out together usually lies together.
        yield Segment(ordinal=ordinal, start=start, size=len(slots), at=0)
        return
    breaks = (slots[1:] - slots[:-1] != 1) | (slots[1:] % per_frame == 0)
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
    for first, last in pairwise(starts):
        ordinal, start = divmod(int(slots[first]), per_frame)
        yield Segment(ordinal=ordinal, start=start, size=last - first, at=first)


def stretches(ordinals: Index) -> Iterator[tuple[int, int]]:
    """Positions `first .. last - 1` of equal values."""
    if len(ordinals):
        starts = [0, *(np.flatnonzero(np.diff(ordinals)) + 1).tolist(), len(ordinals)]
        yield from pairwise(starts)
