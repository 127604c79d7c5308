from __future__ import annotations

import pytest

from aqualib.ranges import Range, RangeAllocator


def test_the_smallest_range_that_is_large_enough_is_taken() -> None:
    room = RangeAllocator(16)
    assert room.take(16) == 0
    room.free_range(2, 3)
    room.free_range(8, 6)
    assert room.take(3) == 2
    assert room.take(3) == 8


def test_no_range_is_taken_when_none_is_long_enough() -> None:
    room = RangeAllocator(8)
    assert room.take(8) == 0
    room.free_range(0, 3)
    room.free_range(5, 3)
    assert room.take(4) is None
    assert room.taken == 2


def test_the_longest_range_is_taken_when_the_wish_is_longer() -> None:
    room = RangeAllocator(8)
    room.take(8)
    room.free_range(0, 2)
    room.free_range(4, 3)
    assert room.take_upto(5) == Range(4, 3)
    assert room.take_upto(5) == Range(0, 2)
    assert room.take_upto(5) is None


def test_neighbours_merge_whatever_the_order_in_which_they_are_freed() -> None:
    room = RangeAllocator(12)
    room.take(12)
    for start in (4, 0, 8):
        room.free_range(start, 4)
    assert room.ranges() == []
    assert room.take(12) == 0


def test_a_range_taken_at_once_may_be_freed_in_pieces() -> None:
    room = RangeAllocator(10)
    room.take(10)
    room.free_range(3, 1)
    room.free_range(6, 2)
    assert room.ranges() == [Range(0, 3), Range(4, 2), Range(8, 2)]


@pytest.mark.parametrize(("start", "size"), [(0, 1), (3, 2), (4, 4), (0, 9)])
def test_freeing_what_is_free_is_refused(start: int, size: int) -> None:
    room = RangeAllocator(8)
    assert room.take(4) == 0
    room.free_range(0, 1)
    with pytest.raises(AssertionError):
        room.free_range(start, size)
