"""The frame table: every frame, every spare slab, and where each byte is.

Plain state without a lock, a clock or a thread; `aqualib.memory.frame_store` serialises the calls.
The only module that changes a frame's state: by an effect of the migration policy (`apply`) or by
the answer of the migrator (`arrived`, `abandoned`, `lost`, `returned`, `kept`). Each method is one
step that keeps what `audit` checks: a slab of a peer is under one frame or spare, a frame stands
where its state says, and the sums equal a recount.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from aqualib.memory.frame import Frame, FrameEvent, FrameState, PeerSlab
from aqualib.memory.migration_policy import (
    CloseGate,
    Drain,
    Effect,
    Migration,
    OpenGate,
    Promotion,
    ReportOverdue,
    SlabReturn,
    WriteBehind,
)
from aqualib.ranges import RangeAllocator, size_of

if TYPE_CHECKING:
    from aqualib.transports.base import MappedSlab

logger = logging.getLogger("aqualib")

HOME_STATES: Final = frozenset({FrameState.HOST, FrameState.PROMOTING})
"""States in which the bytes are in host memory."""

UNMAP_RETRY_S: Final = 0.05
"""Seconds before a slab that could not be unmapped is tried again; a view in the way dies when its
program likes. Doubled, the slab is late by up to 50 ms more."""


WRITE_BEHIND_RETRY_S: Final = 1.0
"""Seconds before write-behind is tried again after a copy failed: what fails once mostly fails
again, and the drain will say so. Doubled, a passing fault leaves a frame unsaved a second longer.
"""


@dataclass(slots=True)
class StoreStats:
    """What the store has seen so far and where its bytes are now.

    Attributes:
        used_bytes: In all frames.
        spilled_bytes: Part of it in host memory.
        spilled_bytes_peak: The most that ever was.
        lost_bytes: Part of `used_bytes` that cannot be read any more.
        drained_bytes: Used bytes that left a slab of a peer, copied or not.
        drain_copied_bytes: Bytes really copied for that; the others were on the host already.
        promoted_bytes: Used bytes that went from host memory to a peer.
        written_behind_bytes: Bytes copied to host memory ahead of a reclaim.
        returned_bytes: Size of all slabs that went back to their owners.
        pins_overdue: Slabs that were late because a pin was held.
        moves_abandoned: Migrations given up because of pins or surviving views.
    """

    used_bytes: int = 0
    spilled_bytes: int = 0
    spilled_bytes_peak: int = 0
    lost_bytes: int = 0
    drained_bytes: int = 0
    drain_copied_bytes: int = 0
    promoted_bytes: int = 0
    written_behind_bytes: int = 0
    returned_bytes: int = 0
    pins_overdue: int = 0
    moves_abandoned: int = 0


@dataclass(slots=True)
class FrameTable:
    """Mutable state of one store.

    Attributes:
        slab_bytes: Size of every slab and frame.
        stats: Sums over everything here.
        frames: By number.
        at_home: Frames whose bytes are in host memory, oldest arrival first.
        under: Which frame a peer's slab is under, or is promised to by a migration under way.
        spare_peers: Slabs of peers with no frame.
        asked: Slabs asked back and still mapped, in the order asked; under a frame or spare.
        closing: Frames whose gate is closed over pins.
        unsaved: Frames on peers that were written, with when their write-behind may begin, in the
            store's clock; those written first come first. Empty where there is no write-behind.
        spare_hosts: Host slabs with no frame.
        host_count: Host slabs that exist or are being made.
        moves_out: Migrations that have been started and not been answered.
        version: Goes up whenever a frame has arrived somewhere, stayed after all, is lost, or can
            be used again after that.
    """

    slab_bytes: int
    stats: StoreStats = field(default_factory=StoreStats)
    frames: dict[int, Frame] = field(default_factory=dict)
    at_home: dict[Frame, None] = field(default_factory=dict)
    under: dict[PeerSlab, Frame] = field(default_factory=dict)
    spare_peers: dict[PeerSlab, None] = field(default_factory=dict)
    asked: dict[PeerSlab, None] = field(default_factory=dict)
    closing: dict[Frame, None] = field(default_factory=dict)
    unsaved: dict[Frame, float] = field(default_factory=dict)
    spare_hosts: list[MappedSlab] = field(default_factory=list)
    host_count: int = 0
    moves_out: int = 0
    version: int = 0
    _next_number: int = 0

    @property
    def peer_count(self) -> int:
        """Slabs of peers that are mapped, or are being unmapped."""
        return len(self.under) + len(self.spare_peers)

    # --- Frames ---------------------------------------------------------------------------

    def add_frame(self, host: MappedSlab, unit_bytes: int) -> Frame:
        """A new, empty frame, on a peer if a slab is spare."""
        room = RangeAllocator(self.slab_bytes // unit_bytes)
        frame = Frame(self._next_number, host, unit_bytes, room)
        self._next_number += 1
        self.frames[frame.number] = frame
        self.at_home[frame] = None
        if (slab := self.spare_for()) is not None:
            self._promise(slab, frame)
            self._advance(frame, FrameEvent.PROMOTE)
            self._advance(frame, FrameEvent.ARRIVE_ON_PEER)
        return frame

    def discard(self, frame: Frame) -> None:
        """Drop what is in the frame; it is taken apart as soon as that is possible."""
        taken = frame.room.taken
        frame.room.clear()
        self.note_taken(frame, -taken)
        frame.is_unwanted = True
        self.settle(frame)

    def settle(self, frame: Frame) -> None:
        """Take an unwanted frame apart, once it is at rest and without pins."""
        if not frame.is_unwanted or frame.pins or frame.is_moving:
            return
        assert not frame.room.taken, f"{frame!r} is in use"
        if self.frames.pop(frame.number, None) is None:
            return
        self.at_home.pop(frame, None)
        self.unsaved.pop(frame, None)
        self._put_aside(frame)
        self.spare_hosts.append(frame.host)

    def sweep(self) -> None:
        """End the pins of views that have died since, and take apart what they held together."""
        for frame in list(self.frames.values()):
            if frame.lingering:
                frame.release_dead_views()
            self.settle(frame)

    def note_taken(self, frame: Frame, units: int) -> None:
        """Account for `units` more (or fewer) units taken in the frame."""
        nbytes, stats = units * frame.unit_bytes, self.stats
        stats.used_bytes += nbytes
        if frame.state in HOME_STATES:
            stats.spilled_bytes += nbytes
            stats.spilled_bytes_peak = max(stats.spilled_bytes_peak, stats.spilled_bytes)
        elif frame.state is FrameState.LOST:
            stats.lost_bytes += nbytes
            if not frame.room.taken:
                self._advance(frame, FrameEvent.EMPTY)
                frame.failure = ""
                self.version += 1

    # --- Slabs of peers -------------------------------------------------------------------

    def ask_back(self, slabs: Iterable[PeerSlab], now_s: float) -> None:
        """Note that slabs are wanted back, unless they were before."""
        for slab in slabs:
            if slab.asked_at_s is None and (slab in self.under or slab in self.spare_peers):
                slab.asked_at_s = now_s
                self.asked[slab] = None

    def unused(self, count: int) -> list[PeerSlab]:
        """Up to `count` slabs that hold nothing and are not asked back, spare ones first."""
        empty = [slab for slab, frame in self.under.items() if not frame.used_bytes]
        return [s for s in (*self.spare_peers, *empty) if s.asked_at_s is None][:count]

    def spare_for(self, leaving: PeerSlab | None = None) -> PeerSlab | None:
        """A spare slab that may be filled, or None; not one of the lender that `leaving` leaves.

        A lender that is taking memory back does not count: the bytes would soon move again.
        """
        for slab in self.spare_peers:
            is_own = leaving is not None and slab.lender is leaving.lender
            if slab.asked_at_s is None and not slab.lender.is_reclaiming and not is_own:
                return slab
        return None

    def may_move(self, frame: Frame) -> bool:
        """Whether there is anywhere to go for a frame at rest, or a reason to leave."""
        if frame.peer is not None:
            return frame.peer.asked_at_s is not None
        return self.spare_for() is not None

    # --- What the policy decides ----------------------------------------------------------

    def apply(self, effect: Effect) -> Migration | None:
        """Carry out an effect of the migration policy; the migration, if it starts one."""
        match effect:
            case CloseGate(frame=frame, until_s=until_s, target=target):
                self._close_gate(frame, target)
                frame.patient_until_s = until_s
                self.closing[frame] = None
            case OpenGate(frame=frame, retry_at_s=retry_at_s):
                self._abandon(frame, retry_at_s)
            case ReportOverdue():
                self._report_overdue(effect)
            case SlabReturn(source=slab):
                # Kept out of the spares, so that it is not filled, and in `asked`: still mapped.
                del self.spare_peers[slab]
                self.moves_out += 1
                return effect
            case WriteBehind(frame=frame, parts=parts):
                # What is written from now on is marked again; the pin keeps both slabs in place.
                frame.written &= ~parts
                frame.pins += 1
                return effect
            case Drain(frame=frame, target=target) | Promotion(frame=frame, target=target):
                if not frame.is_moving:
                    self._close_gate(frame, target if isinstance(effect, Promotion) else None)
                self.closing.pop(frame, None)
                if isinstance(effect, Drain) and target is not None:
                    del self.spare_peers[target]
                    self.under[target] = frame
                self.moves_out += 1
                return effect
        return None

    # --- What the migrator answers --------------------------------------------------------

    def arrived(self, move: Drain | Promotion) -> None:
        """The bytes are in the new place, and the old one, if a peer's, is unmapped."""
        frame = move.frame
        if isinstance(move, Promotion):
            self.stats.promoted_bytes += frame.used_bytes
        else:
            self._forget(move.source)
            frame.peer = move.target
            self.stats.drained_bytes += frame.used_bytes
            self.stats.drain_copied_bytes += size_of(move.ranges)
        is_on_peer = move.target is not None
        event = FrameEvent.ARRIVE_ON_PEER if is_on_peer else FrameEvent.ARRIVE_ON_HOST
        self._advance(frame, event)
        self._answered(frame)

    def written_behind(self, move: WriteBehind, failure: str, now_s: float) -> None:
        """The parts are in host memory as well, or (`failure`) are not."""
        frame = move.frame
        frame.pins -= 1
        move.source.lender.pace.copied(size_of(move.ranges), now_s, is_awaited=False)
        if failure:
            frame.written |= move.parts
        else:
            self.stats.written_behind_bytes += size_of(move.ranges)
        if frame in self.unsaved:
            if frame.written:
                self.unsaved[frame] = now_s + (WRITE_BEHIND_RETRY_S if failure else 0.0)
            else:
                del self.unsaved[frame]
        self.settle(frame)

    def abandoned(self, move: Drain | Promotion, now_s: float) -> None:
        """Nothing has changed; the migration is tried again after a while."""
        if isinstance(move, Drain):
            self._free_target(move)
        self._abandon(move.frame, now_s + UNMAP_RETRY_S)
        self._answered(move.frame)

    def lost(self, move: Drain, failure: str) -> None:
        """The only copy cannot be read, and its slab is unmapped or stranded."""
        self._forget(move.source)
        self._free_target(move)
        move.frame.peer = None
        move.frame.failure = failure
        self._advance(move.frame, FrameEvent.LOSE)
        self.note_taken(move.frame, 0)
        self._answered(move.frame)

    def returned(self, slab: PeerSlab) -> None:
        """A slab that held nothing is unmapped."""
        self._forget(slab)
        self.moves_out -= 1

    def kept(self, slab: PeerSlab, now_s: float) -> None:
        """A slab that holds nothing cannot be unmapped yet; that is tried again after a while."""
        slab.retry_at_s = now_s + UNMAP_RETRY_S
        self.spare_peers[slab] = None
        self.stats.moves_abandoned += 1
        self.moves_out -= 1

    def rerouted(self, move: Drain) -> Drain:
        """The same drain to the host slab instead, because the target cannot be written."""
        self._free_target(move)
        return replace(move, target=None, ranges=move.frame.unsaved_ranges())

    # --- Check ----------------------------------------------------------------------------

    def audit(self) -> None:
        """Recount everything and compare; for tests."""
        frames, stats = self.frames.values(), self.stats
        assert stats.used_bytes == sum(f.used_bytes for f in frames), stats
        spilled = sum(f.used_bytes for f in frames if f.state in HOME_STATES)
        assert stats.spilled_bytes == spilled, (stats, spilled)
        lost = sum(f.used_bytes for f in frames if f.state is FrameState.LOST)
        assert stats.lost_bytes == lost, (stats, lost)
        assert len(self.frames) + len(self.spare_hosts) <= self.host_count, self.host_count
        assert not self.under.keys() & self.spare_peers.keys(), (self.under, self.spare_peers)
        for slab, frame in self.under.items():
            assert self.frames.get(frame.number) is frame, (slab, frame)
        for frame in frames:
            assert frame.pins >= len(frame.lingering) >= 0, frame
            assert (frame in self.at_home) == (frame.state in HOME_STATES), frame
            assert frame.state is not FrameState.HOST or frame.peer is None, frame
            if frame.is_on_peer:
                assert frame.peer is not None, frame
                assert self.under[frame.peer] is frame, frame
            else:
                assert not frame.written, frame
        for frame in self.closing:
            assert frame.is_moving, frame
        for frame in self.unsaved:
            assert frame.is_on_peer, frame

    # --- Inside ---------------------------------------------------------------------------

    def _advance(self, frame: Frame, event: FrameEvent) -> None:
        """Take one step of the frame's table of states and keep the sums right."""
        before = frame.state
        frame.advance(event)
        used, stats = frame.used_bytes, self.stats
        stats.spilled_bytes += used * ((frame.state in HOME_STATES) - (before in HOME_STATES))
        stats.spilled_bytes_peak = max(stats.spilled_bytes_peak, stats.spilled_bytes)
        stats.lost_bytes += used * ((frame.state is FrameState.LOST) - (before is FrameState.LOST))
        if frame.state in HOME_STATES:
            self.at_home.setdefault(frame)
        else:
            self.at_home.pop(frame, None)
        if not frame.is_on_peer:
            frame.written = 0
            self.unsaved.pop(frame, None)

    def _close_gate(self, frame: Frame, target: PeerSlab | None) -> None:
        if target is not None:
            self._promise(target, frame)
        self._advance(frame, FrameEvent.DRAIN if target is None else FrameEvent.PROMOTE)

    def _abandon(self, frame: Frame, retry_at_s: float) -> None:
        self.closing.pop(frame, None)
        if frame.state is FrameState.PROMOTING:
            self._put_aside(frame)
        self._advance(frame, FrameEvent.ABANDON)
        frame.retry_at_s = retry_at_s
        self.stats.moves_abandoned += 1

    def _promise(self, slab: PeerSlab, frame: Frame) -> None:
        """Put a spare slab under a frame."""
        del self.spare_peers[slab]
        self.under[slab] = frame
        frame.peer = slab

    def _put_aside(self, frame: Frame) -> None:
        """The slab under a frame is spare again, or next to be given back."""
        if frame.peer is not None:
            del self.under[frame.peer]
            self.spare_peers[frame.peer] = None
            frame.peer = None

    def _free_target(self, move: Drain) -> None:
        """The slab that a drain was to fill is spare again."""
        if move.target is not None:
            del self.under[move.target]
            self.spare_peers[move.target] = None

    def _forget(self, slab: PeerSlab) -> None:
        """A slab is not mapped any more."""
        self.under.pop(slab, None)
        self.asked.pop(slab, None)
        self.stats.returned_bytes += self.slab_bytes

    def _answered(self, frame: Frame) -> None:
        self.moves_out -= 1
        self.version += 1
        self.settle(frame)

    def _report_overdue(self, overdue: ReportOverdue) -> None:
        slab, frame = overdue.slab, overdue.frame
        slab.is_overdue = True
        self.stats.pins_overdue += 1
        holder = "a view that outlived its pinned()" if frame.lingering else "a pin or a transfer"
        logger.warning(
            "%r is late by %.1f s, because %s keeps %r in place; end it, or the producer will act "
            "by its policy",
            *(slab, overdue.late_s, holder, frame),
        )
