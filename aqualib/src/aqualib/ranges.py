"""Room inside one frame: an allocator of ranges, pure and bounded.

A frame is divided into equal units (256 bytes for tensors, one block for a block store), and this
class knows which ranges of units are taken. It holds no memory and no bytes; two users may count
in different units without this code knowing.

Free ranges are kept sorted and always merged with their neighbours, so there are at most half as
many as units plus one. Allocation is best fit: the smallest range that is large enough, which
keeps long ranges long, and long ranges are what makes paging fast. A search is linear in the
number of free ranges; `largest` lets a caller with many frames skip those that cannot serve.

Taking and freeing may differ in grain: a range taken at once may be freed in pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool


class Range(NamedTuple):
    """A contiguous range, in units or bytes as the context says."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first position after the range."""
        return self.start + self.size


def runs_of(mask: Bool[np.ndarray, " units"]) -> list[Range]:
    """Find the runs of True in a mask, ascending, as long as possible."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return [Range(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


class RangeAllocator:
    """Which ranges of `0 .. capacity - 1` are taken. Not thread-safe; the store's lock guards it.

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
        """Units taken."""
        return self._taken

    @property
    def free(self) -> int:
        """Units free, in ranges of any length."""
        return self.capacity - self._taken

    @property
    def largest(self) -> int:
        """Length of the longest free range."""
        return max(self._counts, default=0)

    def take(self, count: int) -> int | None:
        """Take `count` adjacent units; returns the first, or None when no range is long enough."""
        assert count > 0, f"count {count}"
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

    def free_run(self, start: int, count: int) -> None:
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

    def is_taken(self, start: int, count: int) -> bool:
        """Whether every unit of the range is taken."""
        if not 0 <= start <= self.capacity - count:
            return False
        position = bisect_right(self._starts, start)
        if position and self._starts[position - 1] + self._counts[position - 1] > start:
            return False
        return position == len(self._starts) or self._starts[position] >= start + count

    def runs(self) -> list[Range]:
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
        return f"<RangeAllocator {self._taken}/{self.capacity} taken, largest free {self.largest}>"

    def _cut(self, position: int, count: int) -> int:
        start = self._starts[position]
        if self._counts[position] == count:
            del self._starts[position], self._counts[position]
        else:
            self._starts[position] += count
            self._counts[position] -= count
        self._taken += count
        return start
