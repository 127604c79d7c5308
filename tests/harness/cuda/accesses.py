"""Who touched which bytes last, and whether what follows is ordered after it.

Order is what CUDA promises and no more: within a stream, by an event that was waited for, or by the
host, which learned that work had ended before it queued more. Each piece of work carries a vector
clock; another one is ordered after it if its own clock has seen it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.cuda.streams import Work


class AccessLog:
    """The last write and the reads since, for each stretch of some memory.

    Args:
        nbytes: Size of the memory.
        is_set: Whether someone else has written it all, as with memory of another process.
    """

    def __init__(self, nbytes: int, *, is_set: bool = False) -> None:
        self._end = nbytes
        self._starts = [0]
        # Of each stretch: whether it was written, by whom (None: ordered before all), and readers.
        self._cells: list[tuple[bool, Work | None, tuple[Work, ...]]] = [(is_set, None, ())]

    def forget(self, start: int, end: int) -> None:
        """Nothing is in these bytes any more; who touched them last stays known."""
        for index in self._stretches(start, end):
            _, writer, readers = self._cells[index]
            self._cells[index] = (False, writer, readers)

    def settle(self) -> None:
        """All that has run is ordered before what comes, by whoever now has the memory."""
        self._starts, self._cells = [0], [(True, None, ())]

    def note(
        self, start: int, end: int, work: Work, *, is_write: bool
    ) -> Iterator[tuple[str, Work | None, list[tuple[int, int]]]]:
        """Add an access; yields what is wrong with it, the other work, if any, and where."""
        found: dict[Any, tuple[str, Work | None, list[tuple[int, int]]]] = {}

        def add(what: str, other: Work | None) -> None:
            stretch = self._starts[index], (*self._starts, self._end)[index + 1]
            found.setdefault(id(other), (what, other, []))[2].append(stretch)

        indexes = self._stretches(start, end)
        for index in indexes:
            is_set, writer, readers = self._cells[index]
            if not is_write and not is_set:
                add("reads bytes that nobody wrote", None)
            if writer is not None and not work.is_after(writer):
                add(f"is not ordered after the write of {writer}", writer)
            later = tuple(reader for reader in readers if not work.is_after(reader))
            if is_write:
                for reader in later:
                    add(f"is not ordered after the read of {reader}", reader)
            self._cells[index] = (True, work, ()) if is_write else (is_set, writer, (*later, work))
        if is_write and indexes:
            self._starts[indexes.start + 1 : indexes.stop] = []
            self._cells[indexes.start + 1 : indexes.stop] = []
        yield from found.values()

    def _stretches(self, start: int, end: int) -> range:
        """Indexes of the stretches that make up [start, end), cut at both ends."""
        assert 0 <= start <= end <= self._end, (start, end, self._end)
        if start == end:
            return range(0)
        first = self._cut(start)
        last = len(self._starts) if end == self._end else self._cut(end)
        return range(first, last)

    def _cut(self, at: int) -> int:
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        self._starts.insert(index + 1, at)
        self._cells.insert(index + 1, self._cells[index])
        return index + 1
