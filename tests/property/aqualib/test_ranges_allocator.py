from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aqualib.ranges import Range, RangeAllocator

CAPACITY = 24


class ExtentsAgainstASet(RuleBasedStateMachine):
    """The allocator beside the plainest model there is: the set of units that are taken."""

    ranges = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.room = RangeAllocator(CAPACITY)
        self.taken: set[int] = set()

    @rule(target=ranges, count=st.integers(1, CAPACITY))
    def take(self, count: int) -> Range:
        start = self.room.take(count)
        if start is None:
            assert count > self.longest_free()
            return Range(0, 0)
        return self.note(Range(start, count))

    @rule(target=ranges, count=st.integers(1, CAPACITY))
    def take_upto(self, count: int) -> Range:
        expected = min(count, self.longest_free())
        run = self.room.take_upto(count)
        if run is None:
            assert expected == 0
            return Range(0, 0)
        assert run.size == expected
        return self.note(run)

    @rule(run=consumes(ranges), cut=st.integers(0, CAPACITY))
    def free_in_two_pieces(self, run: Range, cut: int) -> None:
        middle = min(run.start + cut, run.end)
        for start, end in ((middle, run.end), (run.start, middle)):
            if end > start:
                self.room.free_range(start, end - start)
                self.taken -= set(range(start, end))

    @invariant()
    def agrees_with_the_set(self) -> None:
        assert self.room.taken == len(self.taken)
        assert self.room.free == CAPACITY - len(self.taken)
        units = [unit for run in self.room.ranges() for unit in range(run.start, run.end)]
        assert units == sorted(self.taken)

    def note(self, run: Range) -> Range:
        units = set(range(run.start, run.end))
        assert not units & self.taken, "a unit was given out twice"
        assert units <= set(range(CAPACITY))
        self.taken |= units
        return run

    def longest_free(self) -> int:
        longest = length = 0
        for unit in range(CAPACITY):
            length = 0 if unit in self.taken else length + 1
            longest = max(longest, length)
        return longest


TestExtents = ExtentsAgainstASet.TestCase
