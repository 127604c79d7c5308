"""Which frame moves next, decided over books without memory, threads or time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import cast

import pytest

from aqualib.consumer.books import Books
from aqualib.consumer.extents import Run
from aqualib.consumer.frame import MERGE_GAP_BYTES, Frame, PeerSlab
from aqualib.consumer.itinerary import (
    BREATHER_S,
    MAX_CLOSING,
    OVERDUE_S,
    PATIENCE_S,
    Drain,
    GiveBack,
    Move,
    Promotion,
    pick,
    wake_s,
)
from aqualib.consumer.residency import FrameEvent, FrameState
from aqualib.consumer.view import View
from harness.memory import PaperSlab

SLAB_BYTES = 1 << 20
UNIT_BYTES = 256
NOW_S = 100.0


@dataclass(eq=False)
class PaperLender:
    """A lender that only counts."""

    producer_id: str = "producer"
    is_reclaiming: bool = False
    returned: list[PeerSlab] = field(default_factory=list)

    def take_back(self, slab: PeerSlab) -> None:
        self.returned.append(slab)

    def strand(self, slab: PeerSlab) -> None:
        raise NotImplementedError


class PaperView:
    """A view that is alive until told otherwise."""

    def __init__(self) -> None:
        self.is_alive = True

    def close(self) -> None:
        if self.is_alive:
            raise BufferError


class Desk:
    """Books with the few moves that tests need."""

    def __init__(self) -> None:
        self.books = Books(SLAB_BYTES)
        self._slab_ids = iter(range(1000))

    def lend(self, count: int, lender: PaperLender | None = None) -> list[PeerSlab]:
        lender = lender or PaperLender()
        slabs = [
            PeerSlab(next(self._slab_ids), 1, PaperSlab(SLAB_BYTES), lender) for _ in range(count)
        ]
        self.books.spare_peers |= dict.fromkeys(slabs)
        return slabs

    def frame(self, used_units: int = 1) -> Frame:
        self.books.host_count += 1
        frame = self.books.add_frame(PaperSlab(SLAB_BYTES), UNIT_BYTES)
        if used_units:
            frame.room.take(used_units)
            self.books.note_taken(frame, used_units)
        return frame

    def peer_frame(self, used_units: int = 1, lender: PaperLender | None = None) -> Frame:
        self.lend(1, lender)
        frame = self.frame(used_units)
        assert frame.state is FrameState.PEER
        return frame

    def ask(self, *frames: Frame) -> None:
        self.books.ask_back([cast("PeerSlab", frame.peer) for frame in frames], NOW_S)

    def pick(self, now_s: float = NOW_S) -> Move | None:
        move = pick(self.books, now_s)
        self.books.audit()
        return move


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_new_frame_takes_a_spare_slab_and_lives_in_host_memory_without_one(desk: Desk) -> None:
    desk.lend(1)
    assert desk.frame().state is FrameState.PEER
    assert desk.frame().state is FrameState.HOST


def test_nothing_moves_while_nothing_is_asked_back_and_nothing_is_spare(desk: Desk) -> None:
    desk.peer_frame()
    desk.frame()
    assert desk.pick() is None
    assert wake_s(desk.books, NOW_S) is None


def test_spare_slabs_go_back_before_empty_frames_and_empty_frames_before_full_ones(
    desk: Desk,
) -> None:
    full, empty = desk.peer_frame(), desk.peer_frame(used_units=0)
    (spare,) = desk.lend(1)
    desk.ask(full, empty)
    desk.books.ask_back([spare], NOW_S)
    assert desk.pick() == GiveBack(spare)
    moves = [desk.pick(), desk.pick()]
    assert [move.frame for move in moves if isinstance(move, Drain)] == [empty, full]
    assert desk.pick() is None


def test_full_frames_leave_in_the_order_in_which_their_slabs_were_asked_back(desk: Desk) -> None:
    frames = [desk.peer_frame() for _ in range(4)]
    order = [frames[i] for i in (2, 0, 3, 1)]
    desk.ask(*order)
    moves = [desk.pick() for _ in order]
    assert [move.frame for move in moves if isinstance(move, Drain)] == order


def test_a_frame_moves_to_a_spare_slab_of_another_lender_rather_than_to_host_memory(
    desk: Desk,
) -> None:
    frame = desk.peer_frame()
    (elsewhere,) = desk.lend(1, PaperLender("other"))
    desk.ask(frame)
    move = desk.pick()
    assert isinstance(move, Drain)
    assert move.target is elsewhere


@pytest.mark.parametrize("why", ["own", "reclaiming", "asked"])
def test_a_frame_does_not_move_to_a_slab_that_would_soon_be_asked_back(
    desk: Desk, why: str
) -> None:
    lender = PaperLender()
    frame = desk.peer_frame(lender=lender)
    other = PaperLender("other", is_reclaiming=why == "reclaiming")
    (spare,) = desk.lend(1, lender if why == "own" else other)
    desk.ask(frame)
    if why == "asked":
        desk.books.ask_back([spare], NOW_S)
        assert desk.pick() == GiveBack(spare)
    move = desk.pick()
    assert isinstance(move, Drain)
    assert move.target is None


def test_an_empty_frame_takes_no_spare_slab_along(desk: Desk) -> None:
    frame = desk.peer_frame(used_units=0)
    desk.lend(1, PaperLender("other"))
    desk.ask(frame)
    move = desk.pick()
    assert isinstance(move, Drain)
    assert (move.target, move.runs) == (None, [])


def test_spare_slabs_are_filled_from_host_memory_fullest_frame_first(desk: Desk) -> None:
    little, much = desk.frame(1), desk.frame(9)
    slabs = desk.lend(2)
    moves = [desk.pick(), desk.pick()]
    assert moves == [
        Promotion(much, slabs[0], [Run(0, 9 * UNIT_BYTES)]),
        Promotion(little, slabs[1], [Run(0, UNIT_BYTES)]),
    ]


def test_giving_back_comes_before_promoting(desk: Desk) -> None:
    asked = desk.peer_frame()
    desk.frame()
    lender = cast("PeerSlab", asked.peer).lender
    desk.lend(1, cast("PaperLender", lender))
    desk.ask(asked)
    assert isinstance(desk.pick(), Drain)
    assert isinstance(desk.pick(), Promotion)


def test_a_pinned_frame_closes_its_gate_and_moves_when_the_pin_ends(desk: Desk) -> None:
    frame = desk.peer_frame()
    frame.pins = 1
    desk.ask(frame)
    assert desk.pick() is None
    assert frame.is_moving
    frame.pins = 0
    move = desk.pick()
    assert isinstance(move, Drain)
    assert move.frame is frame


def test_an_unpinned_frame_does_not_wait_for_a_pinned_one_that_was_asked_first(desk: Desk) -> None:
    pinned, free = desk.peer_frame(), desk.peer_frame()
    pinned.pins = 1
    desk.ask(pinned, free)
    move = desk.pick()
    assert isinstance(move, Drain)
    assert move.frame is free


def test_a_gate_opens_again_when_patience_runs_out_and_closes_after_a_breather(
    desk: Desk,
) -> None:
    frame = desk.peer_frame()
    frame.pins = 1
    desk.ask(frame)
    desk.pick()
    assert wake_s(desk.books, NOW_S) == pytest.approx(NOW_S + PATIENCE_S)
    over_s = NOW_S + PATIENCE_S
    desk.pick(over_s)
    assert frame.is_open
    assert wake_s(desk.books, over_s) == pytest.approx(over_s + BREATHER_S)
    desk.pick(over_s + BREATHER_S)
    assert frame.is_moving


def test_only_a_few_gates_are_closed_over_pins_at_once(desk: Desk) -> None:
    frames = [desk.peer_frame() for _ in range(MAX_CLOSING + 3)]
    for frame in frames:
        frame.pins = 1
    desk.ask(*frames)
    desk.pick()
    desk.pick()
    assert sum(frame.is_moving for frame in frames) == MAX_CLOSING


def test_a_promotion_closes_one_gate_at_most_and_is_off_when_its_slab_is_asked_back(
    desk: Desk,
) -> None:
    frames = [desk.frame(), desk.frame()]
    slabs = desk.lend(2)
    for frame in frames:
        frame.pins = 1
    assert desk.pick() is None
    assert sum(frame.is_moving for frame in frames) == 1
    assert desk.pick() is None
    assert sum(frame.is_moving for frame in frames) == 1
    desk.books.ask_back(slabs, NOW_S)
    assert {desk.pick(), desk.pick()} == {GiveBack(slab) for slab in slabs}
    assert all(frame.state is FrameState.HOST for frame in frames)


def test_a_slab_promised_to_a_promotion_under_way_is_drained_after_it_arrived(desk: Desk) -> None:
    frame = desk.frame()
    slabs = desk.lend(1)
    assert isinstance(desk.pick(), Promotion)
    desk.books.ask_back(slabs, NOW_S)
    assert desk.pick() is None
    desk.books.advance(frame, FrameEvent.ARRIVE_ON_PEER)
    move = desk.pick()
    assert isinstance(move, Drain)
    assert move.source is slabs[0]


def test_a_view_that_outlived_its_pin_keeps_the_frame_until_it_dies(desk: Desk) -> None:
    frame, view = desk.peer_frame(), PaperView()
    frame.pins = 1
    frame.lingering.append(cast("View", view))
    desk.ask(frame)
    assert desk.pick() is None
    assert wake_s(desk.books, NOW_S) is not None
    view.is_alive = False
    move = desk.pick()
    assert isinstance(move, Drain)
    assert (frame.pins, frame.lingering) == (0, [])


def test_a_pin_that_delays_a_slab_is_reported_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    frame = desk.peer_frame()
    frame.pins = 1
    desk.ask(frame)
    now_s = NOW_S
    with caplog.at_level(logging.WARNING, "aqualib"):
        while now_s < NOW_S + 3 * OVERDUE_S:
            desk.pick(now_s)
            next_s = wake_s(desk.books, now_s)
            assert next_s is not None
            assert next_s > now_s
            now_s = next_s
    assert desk.books.tally.pins_overdue == 1
    assert len(caplog.records) == 1
    assert "producer" in caplog.text


def test_a_lost_frame_is_neither_moved_nor_filled(desk: Desk) -> None:
    frame = desk.peer_frame()
    desk.ask(frame)
    move = desk.pick()
    assert isinstance(move, Drain)
    desk.books.forget(move.source)
    frame.peer = None
    desk.books.advance(frame, FrameEvent.LOSE)
    desk.lend(1)
    assert desk.pick() is None
    assert desk.books.tally.lost_bytes == UNIT_BYTES


def test_only_what_was_written_on_the_peer_has_to_be_copied_back(desk: Desk) -> None:
    frame = desk.peer_frame(used_units=SLAB_BYTES // UNIT_BYTES)
    part_bytes = SLAB_BYTES // 64
    frame.note_written(Run(3 * part_bytes + 1, 1))
    frame.note_written(Run(40 * part_bytes - 1, 2))
    assert frame.unsaved_runs() == [
        Run(3 * part_bytes, part_bytes),
        Run(39 * part_bytes, 2 * part_bytes),
    ]


def test_what_was_written_and_freed_since_is_not_copied(desk: Desk) -> None:
    units = SLAB_BYTES // UNIT_BYTES
    frame = desk.peer_frame(used_units=units)
    frame.note_written(Run(0, SLAB_BYTES))
    half = units // 2
    frame.room.free_run(0, half)
    desk.books.note_taken(frame, -half)
    assert frame.unsaved_runs() == [Run(half * UNIT_BYTES, SLAB_BYTES // 2)]


def test_runs_with_a_small_gap_are_copied_as_one(desk: Desk) -> None:
    frame = desk.frame(SLAB_BYTES // UNIT_BYTES)
    small = MERGE_GAP_BYTES // UNIT_BYTES - 1
    frame.room.free_run(10, small)
    assert frame.used_runs() == [Run(0, SLAB_BYTES)]
    frame.room.free_run(10 + small, 1)
    assert len(frame.used_runs()) == 2


def test_spilled_bytes_follow_every_arrival_and_every_release(desk: Desk) -> None:
    frame = desk.frame(8)
    tally = desk.books.tally
    assert tally.spilled_bytes == 8 * UNIT_BYTES
    desk.lend(1)
    desk.pick()
    desk.books.advance(frame, FrameEvent.ARRIVE_ON_PEER)
    assert (tally.spilled_bytes, tally.spilled_bytes_peak) == (0, 8 * UNIT_BYTES)
    frame.room.free_run(0, 3)
    desk.books.note_taken(frame, -3)
    assert (tally.spilled_bytes, tally.used_bytes) == (0, 5 * UNIT_BYTES)
    desk.books.audit()


def test_an_unwanted_frame_gives_its_slabs_to_the_next_once_its_pins_end(desk: Desk) -> None:
    frame = desk.peer_frame()
    frame.pins = 1
    desk.books.discard(frame)
    assert desk.books.frames
    frame.pins = 0
    desk.books.settle(frame)
    assert not desk.books.frames
    assert (len(desk.books.spare_peers), len(desk.books.spare_hosts)) == (1, 1)
    desk.books.audit()
