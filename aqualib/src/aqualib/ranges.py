"""Range arithmetic: ranges, room made of ranges, and runs in arrays of indices.

The only module that does it; transports, frames and block stores lie above. Numbers only: no
memory, no locks, no torch.

- `Range`, `merged`, `intersection`, `split`: ascending lists of ranges, in units or bytes.
- `RangeAllocator`: which ranges of one frame are taken.
- `lie_within`, `are_ascending`, `are_neighbours`, `run_starts`, `runs_of`: arrays.
- `slot_runs`, `frame_runs`: slots of a block store as they lie in its frames.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64


class Range(NamedTuple):
    """A contiguous range, in units or bytes as the context says."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first position after the range."""
        return self.start + self.size

    def times(self, unit: int) -> Range:
        """The same range in a unit that is `unit` times smaller."""
        return Range(self.start * unit, self.size * unit)


def size_of(ranges: list[Range]) -> int:
    """Positions that ranges cover together."""
    return sum(part.size for part in ranges)


def merged(ranges: list[Range], gap: int) -> list[Range]:
    """Ascending ranges, joined where their distance is below `gap`."""
    joined: list[Range] = []
    for part in ranges:
        if joined and part.start - joined[-1].end < gap:
            joined[-1] = Range(joined[-1].start, part.end - joined[-1].start)
        else:
            joined.append(part)
    return joined


def intersection(left: list[Range], right: list[Range]) -> list[Range]:
    """Positions that both ascending lists cover."""
    found: list[Range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i].start, right[j].start)
        end = min(left[i].end, right[j].end)
        if start < end:
            found.append(Range(start, end - start))
        if left[i].end <= right[j].end:
            i += 1
        else:
            j += 1
    return found


def split(ranges: list[Range], count: int, least: int) -> list[list[Range]]:
    """Ascending ranges, cut into up to `count` parts of about equal size, none below `least`.

    Returns:
        At least one part, which may be empty; together they cover the same positions in order.
    """
    total = size_of(ranges)
    count = max(1, min(count, total // least))
    parts: list[list[Range]] = [[]]
    room = share = -(-total // count)
    for start, left in ranges:
        at, rest = start, left
        while rest:
            if not room:
                parts.append([])
                room = share
            size = min(rest, room)
            parts[-1].append(Range(at, size))
            at, rest, room = at + size, rest - size, room - size
    return parts


class RangeAllocator:
    """Takes and frees ranges of `0 .. capacity - 1`; not thread-safe.

    Holds no memory and no bytes; a frame counts in units of 256 bytes for tensors, in blocks for a
    block store. Free ranges are sorted and always merged with their neighbours. Allocation is best
    fit: the smallest range that is large enough, which keeps long ranges long, and long ranges are
    what makes paging fast. A search is linear in the number of free ranges. What was taken at once
    may be freed in pieces.

    Args:
        capacity: Units in total, at least one.
    """

    __slots__ = ("_counts", "_starts", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"capacity {capacity}"
        self.capacity = capacity
        self._starts = [0]
        self._counts = [capacity]
        self._taken = 0

    @property
    def taken(self) -> int:
        """Units that are taken."""
        return self._taken

    @property
    def free(self) -> int:
        """Units free, in ranges of any length."""
        return self.capacity - self._taken

    def take(self, count: int) -> int | None:
        """Take `count` adjacent units; returns the first, or None when no range is long enough."""
        assert count > 0, f"count {count}"
        if len(self._counts) == 1:  # Nothing to choose between, as in a store that is not torn.
            return self._cut(0, count) if self._counts[0] >= count else None
        best = -1
        for position, free in enumerate(self._counts):
            if free >= count and (best < 0 or free < self._counts[best]):
                best = position
                if free == count:
                    break
        return None if best < 0 else self._cut(best, count)

    def take_upto(self, count: int) -> Range | None:
        """Take `count` adjacent units, or the longest free range if none is that long.

        Returns None only when nothing is free.
        """
        start = self.take(count)
        if start is not None:
            return Range(start, count)
        if not self._counts:
            return None
        longest = max(self._counts)
        return Range(self._cut(self._counts.index(longest), longest), longest)

    def free_range(self, start: int, count: int) -> None:
        """Give a taken range back; it may be part of a longer one that was taken at once."""
        assert count > 0, f"count {count}"
        assert 0 <= start <= self.capacity - count, f"range {start}+{count} of {self.capacity}"
        after = bisect_left(self._starts, start)
        before = after - 1
        before_end = self._starts[before] + self._counts[before] if before >= 0 else 0
        after_start = self._starts[after] if after < len(self._starts) else self.capacity
        assert before_end <= start, f"range {start}+{count} is free already"
        assert start + count <= after_start, f"range {start}+{count} is free already"
        self._taken -= count
        joins_before = before >= 0 and before_end == start
        joins_after = after < len(self._starts) and after_start == start + count
        if joins_before and joins_after:
            self._counts[before] += count + self._counts[after]
            del self._starts[after], self._counts[after]
        elif joins_before:
            self._counts[before] += count
        elif joins_after:
            self._starts[after] = start
            self._counts[after] += count
        else:
            self._starts.insert(after, start)
            self._counts.insert(after, count)

    def ranges(self) -> list[Range]:
        """The taken ranges, ascending, as long as possible."""
        found: list[Range] = []
        position = 0
        for start, count in zip(self._starts, self._counts, strict=True):
            if start > position:
                found.append(Range(position, start - position))
            position = start + count
        if position < self.capacity:
            found.append(Range(position, self.capacity - position))
        return found

    def clear(self) -> None:
        """Give everything back."""
        self._starts[:] = [0]
        self._counts[:] = [self.capacity]
        self._taken = 0

    def __repr__(self) -> str:
        return f"<RangeAllocator {self._taken}/{self.capacity} taken>"

    def _cut(self, position: int, count: int) -> int:
        start = self._starts[position]
        if self._counts[position] == count:
            del self._starts[position], self._counts[position]
        else:
            self._starts[position] += count
            self._counts[position] -= count
        self._taken += count
        return start


# --- Arrays of indices ------------------------------------------------------------------------


def lie_within(indices: Int64[np.ndarray, " n"], limit: int) -> bool:
    """Whether all are in `0 .. limit - 1`; in one pass, since negative ones are huge unsigned."""
    if len(indices) == 1:  # A reduction costs more than a page's other checks together.
        return 0 <= int(indices[0]) < limit
    return not len(indices) or int(indices.view(np.uint64).max()) < limit


def are_ascending(indices: Int64[np.ndarray, " n"]) -> bool:
    """Whether each is above the one before it, so that none repeats."""
    return len(indices) < 2 or bool((indices[1:] > indices[:-1]).all())  # noqa: PLR2004 - a pair


def are_neighbours(indices: Int64[np.ndarray, " n"]) -> bool:
    """Whether each is one above the one before it: a single run."""
    return len(indices) < 2 or (  # noqa: PLR2004 - a pair
        int(indices[-1] - indices[0]) == len(indices) - 1 and are_ascending(indices)
    )


def runs_of(mask: Bool[np.ndarray, " units"]) -> list[Range]:
    """The runs of True in a mask, ascending, as long as possible."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return [Range(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def run_starts(indices: Int64[np.ndarray, " n"], multiple: int = 0) -> Int64[np.ndarray, " runs"]:
    """Positions in a non-empty array at which a run of consecutive numbers begins.

    Args:
        multiple: No run goes across a multiple of it; 0 for no such bound.
    """
    breaks = np.diff(indices) != 1
    if multiple:
        breaks |= indices[1:] % multiple == 0
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


class SlotRun(NamedTuple):
    """Slots of a block store that lie next to each other in one frame.

    Attributes:
        ordinal: Which frame of the store.
        slots: Which slots within that frame.
        at: Position of the first in the caller's order.
    """

    ordinal: int
    slots: Range
    at: int


def slot_runs(slots: Int64[np.ndarray, " n"], per_frame: int) -> Iterator[SlotRun]:
    """Runs of consecutive slots, none across frames, in the order given."""
    if not len(slots):
        return
    bounds = [*run_starts(slots, per_frame).tolist(), len(slots)]
    for first, last in pairwise(bounds):
        ordinal, start = divmod(int(slots[first]), per_frame)
        yield SlotRun(ordinal, Range(start, last - first), first)


def frame_runs(ordinals: Int64[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
    """Positions `first .. last - 1` of equal values."""
    if len(ordinals):
        starts = [0, *(np.flatnonzero(np.diff(ordinals)) + 1).tolist(), len(ordinals)]
        yield from pairwise(starts)
