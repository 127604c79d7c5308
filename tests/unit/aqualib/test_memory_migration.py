"""Which frame moves next, decided over table without memory, threads or time."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from aqualib.memory.frame import MERGE_GAP_BYTES, FrameState, PeerSlab
from aqualib.memory.migration_policy import (
    BREATHER_S,
    MAX_CLOSING,
    OVERDUE_S,
    PATIENCE_S,
    CloseGate,
    Drain,
    Promotion,
    SlabReturn,
    decide,
    wake_s,
)
from aqualib.ranges import Range
from aqualib.transports.base import MappedSlab
from harness.memory import PaperLender
from harness.paper_store import (
    NOW_S,
    SLAB_BYTES,
    UNIT_BYTES,
    PaperStore,
    PaperView,
)


@pytest.fixture
def store() -> PaperStore:
    return PaperStore()


def test_a_new_frame_takes_a_spare_slab_and_lives_in_host_memory_without_one(
    store: PaperStore,
) -> None:
    store.lend(1)
    assert store.frame().state is FrameState.PEER
    assert store.frame().state is FrameState.HOST


def test_nothing_moves_while_nothing_is_asked_back_and_nothing_is_spare(store: PaperStore) -> None:
    store.peer_frame()
    store.frame()
    assert store.pick() is None
    assert wake_s(store.table, NOW_S) is None


def test_spare_slabs_go_back_before_empty_frames_and_empty_frames_before_full_ones(
    store: PaperStore,
) -> None:
    full, empty = store.peer_frame(), store.peer_frame(used_units=0)
    (spare,) = store.lend(1)
    store.ask(full, empty)
    store.table.ask_back([spare], NOW_S)
    assert store.pick() == SlabReturn(spare)
    moves = [store.pick(), store.pick()]
    assert [move.frame for move in moves if isinstance(move, Drain)] == [empty, full]
    assert store.pick() is None


def test_full_frames_leave_in_the_order_in_which_their_slabs_were_asked_back(
    store: PaperStore,
) -> None:
    frames = [store.peer_frame() for _ in range(4)]
    order = [frames[i] for i in (2, 0, 3, 1)]
    store.ask(*order)
    moves = [store.pick() for _ in order]
    assert [move.frame for move in moves if isinstance(move, Drain)] == order


def test_a_frame_moves_to_a_spare_slab_of_another_lender_rather_than_to_host_memory(
    store: PaperStore,
) -> None:
    frame = store.peer_frame()
    (elsewhere,) = store.lend(1, PaperLender("other"))
    frame.note_written(Range(0, 1))
    store.ask(frame)
    move = store.pick()
    assert isinstance(move, Drain)
    assert move.target is elsewhere


@pytest.mark.parametrize("why", ["own", "reclaiming", "asked"])
def test_a_frame_does_not_move_to_a_slab_that_would_soon_be_asked_back(
    store: PaperStore, why: str
) -> None:
    lender = PaperLender()
    frame = store.peer_frame(lender=lender)
    other = PaperLender("other", is_reclaiming=why == "reclaiming")
    (spare,) = store.lend(1, lender if why == "own" else other)
    store.ask(frame)
    if why == "asked":
        store.table.ask_back([spare], NOW_S)
        assert store.pick() == SlabReturn(spare)
    move = store.pick()
    assert isinstance(move, Drain)
    assert move.target is None


def test_an_empty_frame_takes_no_spare_slab_along(store: PaperStore) -> None:
    frame = store.peer_frame(used_units=0)
    store.lend(1, PaperLender("other"))
    store.ask(frame)
    move = store.pick()
    assert isinstance(move, Drain)
    assert (move.target, move.ranges) == (None, [])


def test_spare_slabs_are_filled_from_host_memory_fullest_frame_first(store: PaperStore) -> None:
    little, much = store.frame(1), store.frame(9)
    slabs = store.lend(2)
    moves = [store.pick(), store.pick()]
    assert moves == [
        Promotion(much, slabs[0], [Range(0, 9 * UNIT_BYTES)]),
        Promotion(little, slabs[1], [Range(0, UNIT_BYTES)]),
    ]


def test_an_empty_frame_does_not_take_the_slab_that_a_pinned_full_one_waits_for(
    store: PaperStore,
) -> None:
    full, empty = store.frame(), store.frame(used_units=0)
    full.pins = 1
    first, second = store.lend(2)
    assert store.pick() == Promotion(empty, second, [])
    full.pins = 0
    assert store.pick() == Promotion(full, first, [Range(0, UNIT_BYTES)])


def test_giving_back_comes_before_promoting(store: PaperStore) -> None:
    asked = store.peer_frame()
    store.frame()
    lender = cast("PeerSlab", asked.peer).lender
    store.lend(1, cast("PaperLender", lender))
    store.ask(asked)
    assert isinstance(store.pick(), Drain)
    assert isinstance(store.pick(), Promotion)


def test_a_pinned_frame_closes_its_gate_and_moves_when_the_pin_ends(store: PaperStore) -> None:
    frame = store.peer_frame()
    frame.pins = 1
    store.ask(frame)
    assert store.pick() is None
    assert frame.is_moving
    frame.pins = 0
    move = store.pick()
    assert isinstance(move, Drain)
    assert move.frame is frame


def test_deciding_changes_nothing(store: PaperStore) -> None:
    frames = [store.peer_frame(), store.peer_frame(), store.frame()]
    frames[0].pins = 1
    frames[1].note_written(Range(0, 1))
    store.lend(1, PaperLender("other"))
    store.ask(*frames[:2])
    seen = []
    while True:
        before = repr(store.table)
        effect = decide(store.table, NOW_S)
        assert decide(store.table, NOW_S) == effect
        assert repr(store.table) == before
        if effect is None:
            break
        seen.append(type(effect))
        store.table.apply(effect)
    assert seen == [CloseGate, Drain]


def test_an_unpinned_frame_does_not_wait_for_a_pinned_one_that_was_asked_first(
    store: PaperStore,
) -> None:
    pinned, free = store.peer_frame(), store.peer_frame()
    pinned.pins = 1
    store.ask(pinned, free)
    move = store.pick()
    assert isinstance(move, Drain)
    assert move.frame is free


def test_a_gate_opens_again_when_patience_runs_out_and_closes_after_a_breather(
    store: PaperStore,
) -> None:
    frame = store.peer_frame()
    frame.pins = 1
    store.ask(frame)
    store.pick()
    assert wake_s(store.table, NOW_S) == pytest.approx(NOW_S + PATIENCE_S)
    over_s = NOW_S + PATIENCE_S
    store.pick(over_s)
    assert frame.is_open
    assert wake_s(store.table, over_s) == pytest.approx(over_s + BREATHER_S)
    store.pick(over_s + BREATHER_S)
    assert frame.is_moving


def test_only_a_few_gates_are_closed_over_pins_at_once(store: PaperStore) -> None:
    frames = [store.peer_frame() for _ in range(MAX_CLOSING + 3)]
    for frame in frames:
        frame.pins = 1
    store.ask(*frames)
    store.pick()
    store.pick()
    assert sum(frame.is_moving for frame in frames) == MAX_CLOSING


def test_a_promotion_closes_one_gate_at_most_and_is_off_when_its_slab_is_asked_back(
    store: PaperStore,
) -> None:
    frames = [store.frame(), store.frame()]
    slabs = store.lend(2)
    for frame in frames:
        frame.pins = 1
    assert store.pick() is None
    assert sum(frame.is_moving for frame in frames) == 1
    assert store.pick() is None
    assert sum(frame.is_moving for frame in frames) == 1
    store.table.ask_back(slabs, NOW_S)
    assert {store.pick(), store.pick()} == {SlabReturn(slab) for slab in slabs}
    assert all(frame.state is FrameState.HOST for frame in frames)


def test_a_slab_promised_to_a_promotion_under_way_is_drained_after_it_arrived(
    store: PaperStore,
) -> None:
    store.frame()
    slabs = store.lend(1)
    promotion = store.pick()
    assert isinstance(promotion, Promotion)
    store.table.ask_back(slabs, NOW_S)
    assert store.pick() is None
    store.table.arrived(promotion)
    move = store.pick()
    assert isinstance(move, Drain)
    assert move.source is slabs[0]


def test_a_view_that_outlived_its_pin_keeps_the_frame_until_it_dies(store: PaperStore) -> None:
    frame, view = store.peer_frame(), PaperView()
    frame.pins = 1
    frame.lingering.append(cast("MappedSlab", view))
    store.ask(frame)
    assert store.pick() is None
    assert wake_s(store.table, NOW_S) is not None
    view.is_alive = False
    move = store.pick()
    assert isinstance(move, Drain)
    assert (frame.pins, frame.lingering) == (0, [])


def test_a_pin_that_delays_a_slab_is_reported_once(
    store: PaperStore, caplog: pytest.LogCaptureFixture
) -> None:
    frame = store.peer_frame()
    frame.pins = 1
    store.ask(frame)
    now_s = NOW_S
    with caplog.at_level(logging.WARNING, "aqualib"):
        while now_s < NOW_S + 3 * OVERDUE_S:
            store.pick(now_s)
            next_s = wake_s(store.table, now_s)
            assert next_s is not None
            assert next_s > now_s
            now_s = next_s
    assert store.table.stats.pins_overdue == 1
    assert len(caplog.records) == 1
    assert "producer" in caplog.text


def test_a_lost_frame_is_neither_moved_nor_filled(store: PaperStore) -> None:
    frame = store.peer_frame()
    store.ask(frame)
    move = store.pick()
    assert isinstance(move, Drain)
    store.table.lost(move, "the device is gone")
    store.lend(1)
    assert store.pick() is None
    assert store.table.stats.lost_bytes == UNIT_BYTES


def test_only_what_was_written_on_the_peer_has_to_be_copied_back(store: PaperStore) -> None:
    frame = store.peer_frame(used_units=SLAB_BYTES // UNIT_BYTES)
    part_bytes = SLAB_BYTES // 64
    frame.note_written(Range(3 * part_bytes + 1, 1))
    frame.note_written(Range(40 * part_bytes - 1, 2))
    assert frame.unsaved_ranges() == [
        Range(3 * part_bytes, part_bytes),
        Range(39 * part_bytes, 2 * part_bytes),
    ]


def test_what_was_written_and_freed_since_is_not_copied(store: PaperStore) -> None:
    units = SLAB_BYTES // UNIT_BYTES
    frame = store.peer_frame(used_units=units)
    frame.note_written(Range(0, SLAB_BYTES))
    half = units // 2
    frame.room.free_range(0, half)
    store.table.note_taken(frame, -half)
    assert frame.unsaved_ranges() == [Range(half * UNIT_BYTES, SLAB_BYTES // 2)]


def test_runs_with_a_small_gap_are_copied_as_one(store: PaperStore) -> None:
    frame = store.frame(SLAB_BYTES // UNIT_BYTES)
    small = MERGE_GAP_BYTES // UNIT_BYTES - 1
    frame.room.free_range(10, small)
    assert frame.used_ranges() == [Range(0, SLAB_BYTES)]
    frame.room.free_range(10 + small, 1)
    assert len(frame.used_ranges()) == 2


def test_spilled_bytes_follow_every_arrival_and_every_release(store: PaperStore) -> None:
    frame = store.frame(8)
    stats = store.table.stats
    assert stats.spilled_bytes == 8 * UNIT_BYTES
    store.lend(1)
    move = store.pick()
    assert isinstance(move, Promotion)
    store.table.arrived(move)
    assert (stats.spilled_bytes, stats.spilled_bytes_peak) == (0, 8 * UNIT_BYTES)
    frame.room.free_range(0, 3)
    store.table.note_taken(frame, -3)
    assert (stats.spilled_bytes, stats.used_bytes) == (0, 5 * UNIT_BYTES)
    store.table.audit()


def test_an_unwanted_frame_gives_its_slabs_to_the_next_once_its_pins_end(
    store: PaperStore,
) -> None:
    frame = store.peer_frame()
    frame.pins = 1
    store.table.discard(frame)
    assert store.table.frames
    frame.pins = 0
    store.table.settle(frame)
    assert not store.table.frames
    assert (len(store.table.spare_peers), len(store.table.spare_hosts)) == (1, 1)
    store.table.audit()
