"""What is copied to host memory ahead of a reclaim, and when; over tables without memory."""

from __future__ import annotations

import pytest

from aqualib.memory.frame import Frame
from aqualib.memory.frame_table import WRITE_BEHIND_RETRY_S
from aqualib.memory.migration_policy import (
    PATIENCE_S,
    PIECE_BYTES,
    Drain,
    Promotion,
    WriteBehind,
    wake_s,
)
from aqualib.ranges import Range
from harness.memory import PaperLender
from harness.paper_store import NOW_S, SLAB_BYTES, UNIT_BYTES, PaperStore


@pytest.fixture
def store() -> PaperStore:
    return PaperStore()


def written(store: PaperStore, *units: int, lender: PaperLender | None = None) -> Frame:
    """A full frame on a peer of which these units were written, and whose write-behind is due."""
    frame = store.peer_frame(SLAB_BYTES // UNIT_BYTES, lender)
    for unit in units:
        frame.note_written(Range(unit, 1).times(UNIT_BYTES))
    store.table.unsaved[frame] = NOW_S
    return frame


def begun(store: PaperStore, now_s: float = NOW_S) -> WriteBehind:
    move = store.pick(now_s)
    assert isinstance(move, WriteBehind)
    return move


def test_what_was_written_on_a_peer_is_copied_once_nobody_waits_for_anything(
    store: PaperStore,
) -> None:
    frame = written(store, 0)
    store.table.unsaved[frame] = NOW_S + 1.0
    assert store.pick() is None
    assert wake_s(store.table, NOW_S) == NOW_S + 1.0
    move = begun(store, NOW_S + 1.0)
    assert move.ranges == frame.unsaved_ranges(1)
    assert frame.is_open
    store.table.written_behind(move, "", NOW_S)
    store.table.audit()
    assert not store.table.unsaved
    assert store.table.stats.written_behind_bytes == SLAB_BYTES // 64


def test_a_reclaim_of_what_was_copied_before_copies_nothing_and_goes_to_no_other_lender(
    store: PaperStore,
) -> None:
    frame = written(store, 0, 2000)
    while isinstance(move := store.pick(), WriteBehind):
        store.table.written_behind(move, "", NOW_S)
    store.lend(1)
    store.ask(frame)
    move = store.pick()
    assert isinstance(move, Drain)
    assert (move.target, move.ranges) == (None, [])
    store.table.arrived(move)
    assert isinstance(store.pick(), Promotion), "there is room at another lender, in its own time"


def test_what_was_written_on_a_peer_is_no_matter_any_more_once_it_is_in_host_memory(
    store: PaperStore,
) -> None:
    frame = written(store, 0)
    store.ask(frame)
    move = store.pick()
    assert isinstance(move, Drain)
    store.table.arrived(move)
    assert not frame.written, "a pin for writing would have it copied ahead for ever"
    store.table.audit()


def test_what_is_written_while_it_is_copied_counts_as_not_copied(store: PaperStore) -> None:
    frame = written(store, 0)
    move = begun(store)
    frame.pins += 1
    frame.note_written(Range(0, 1))
    frame.pins -= 1
    store.table.written_behind(move, "", NOW_S)
    assert frame.unsaved_ranges() == move.ranges
    assert begun(store).frame is frame


def test_a_pinned_frame_is_left_to_who_has_pinned_it(store: PaperStore) -> None:
    first, second = written(store, 0), written(store, 0)
    first.pins += 1
    assert begun(store).frame is second
    assert store.pick() is None
    assert wake_s(store.table, NOW_S) == NOW_S + PATIENCE_S


def test_a_frame_stays_where_it_is_until_the_copy_has_ended(store: PaperStore) -> None:
    frame = written(store, 0)
    move = begun(store)
    host = frame.host
    store.table.discard(frame)
    assert host not in store.table.spare_hosts, "it would be another frame's, and overwritten"
    store.table.written_behind(move, "", NOW_S)
    assert host in store.table.spare_hosts
    store.table.audit()


def test_a_copy_that_failed_is_tried_again_after_a_while(store: PaperStore) -> None:
    frame = written(store, 0)
    move = begun(store)
    store.table.written_behind(move, "no such memory", NOW_S)
    assert frame.unsaved_ranges() == move.ranges
    assert store.pick() is None
    assert begun(store, NOW_S + WRITE_BEHIND_RETRY_S).frame is frame
    assert not store.table.stats.written_behind_bytes


def test_large_writes_are_copied_in_pieces_between_which_others_may_go(store: PaperStore) -> None:
    frame = written(store, *range(0, SLAB_BYTES // UNIT_BYTES, 64))
    assert frame.first_written(3 * SLAB_BYTES // 64) == 0b111
    assert frame.first_written(1) == 1
    assert frame.first_written(PIECE_BYTES) == frame.written
    store.ask(store.peer_frame())
    assert isinstance(store.pick(), Drain), "what is asked back goes first"
    assert isinstance(store.pick(), WriteBehind)
