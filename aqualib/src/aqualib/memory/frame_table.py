"""The frame table: every frame, every spare slab, and where each byte is.

Plain state without a lock, a clock or a thread; `aqualib.memory.frame_store` serialises the calls.
Each method is one step that keeps what `audit` checks: a slab of a peer is under one frame or
spare, a frame stands where its state says, and the sums equal a recount.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from aqualib.memory.frame import Frame, PeerSlab
from aqualib.memory.frame_state import FrameEvent, FrameState
from aqualib.ranges import RangeAllocator

if TYPE_CHECKING:
    from aqualib.transports.base import MappedSlab

HOME_STATES: Final = frozenset({FrameState.HOST, FrameState.PROMOTING})
"""States in which the bytes are in host memory."""


@dataclass(slots=True)
class StoreStats:
    """What the store has seen so far and where its bytes are now.

    Attributes:
        used_bytes: In all frames.
        spilled_bytes: Part of it in host memory.
        spilled_bytes_peak: The most that ever was.
        lost_bytes: Part of `used_bytes` that nobody can read any more.
        drained_bytes: Used bytes that left a slab of a peer, copied or not.
        drain_copied_bytes: Bytes really copied for that; the others were on the host already.
        promoted_bytes: Used bytes that went from host memory to a peer.
        returned_bytes: Size of all slabs that went back to their owners.
        pins_overdue: Slabs that were late because a pin was held.
        moves_abandoned: Moves given up because of pins or surviving views.
    """

    used_bytes: int = 0
    spilled_bytes: int = 0
    spilled_bytes_peak: int = 0
    lost_bytes: int = 0
    drained_bytes: int = 0
    drain_copied_bytes: int = 0
    promoted_bytes: int = 0
    returned_bytes: int = 0
    pins_overdue: int = 0
    moves_abandoned: int = 0

    def copy(self) -> StoreStats:
        """A snapshot."""
        return replace(self)


@dataclass(slots=True)
class FrameTable:
    """Mutable state of one store.

    Attributes:
        slab_bytes: Size of every slab and frame.
        stats: Sums over everything here.
        frames: By number.
        at_home: Frames whose bytes are in host memory, oldest arrival first.
        under: Which frame a peer's slab is under, or is promised to by a move under way.
        spare_peers: Slabs of peers with no frame.
        asked: Slabs asked back and still mapped, in the order asked; under a frame or spare.
        closing: Frames whose gate is closed over pins.
        spare_hosts: Host slabs with no frame.
        host_count: Host slabs that exist or are being made.
        moves_out: Moves that have been picked and not been answered.
    """

    slab_bytes: int
    stats: StoreStats = field(default_factory=StoreStats)
    frames: dict[int, Frame] = field(default_factory=dict)
    at_home: dict[Frame, None] = field(default_factory=dict)
    under: dict[PeerSlab, Frame] = field(default_factory=dict)
    spare_peers: dict[PeerSlab, None] = field(default_factory=dict)
    asked: dict[PeerSlab, None] = field(default_factory=dict)
    closing: dict[Frame, None] = field(default_factory=dict)
    spare_hosts: list[MappedSlab] = field(default_factory=list)
    host_count: int = 0
    moves_out: int = 0
    _next_number: int = 0

    @property
    def peer_count(self) -> int:
        """Slabs of peers that are mapped, or are being unmapped."""
        return len(self.under) + len(self.spare_peers)

    # --- Frames ---------------------------------------------------------------------------

    def add_frame(self, host: MappedSlab, unit_bytes: int) -> Frame:
        """A new, empty frame, on a peer if a slab is spare."""
        frame = Frame(
            number=self._next_number,
            host=host,
            unit_bytes=unit_bytes,
            room=RangeAllocator(self.slab_bytes // unit_bytes),
        )
        self._next_number += 1
        self.frames[frame.number] = frame
        self.at_home[frame] = None
        if (slab := self.spare_for()) is not None:
            self.promise(slab, frame)
            frame.peer = slab
            self.advance(frame, FrameEvent.PROMOTE)
            self.advance(frame, FrameEvent.ARRIVE_ON_PEER)
        return frame

    def discard(self, frame: Frame) -> None:
        """Drop what is in the frame; it is taken apart as soon as that is possible."""
        taken = frame.room.taken
        frame.room.clear()
        self.note_taken(frame, -taken)
        frame.is_unwanted = True
        self.settle(frame)

    def settle(self, frame: Frame) -> None:
        """Take an unwanted frame apart, once it is at rest and nobody has it pinned."""
        if not frame.is_unwanted or frame.pins or frame.is_moving:
            return
        assert not frame.room.taken, f"{frame!r} is in use"
        if self.frames.pop(frame.number, None) is None:
            return
        self.at_home.pop(frame, None)
        if frame.peer is not None:
            self.put_aside(frame.peer)
            frame.peer = None
        self.spare_hosts.append(frame.host)

    def advance(self, frame: Frame, event: FrameEvent) -> None:
        """Take one step of the residency table and keep the sums right."""
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
                self.advance(frame, FrameEvent.EMPTY)
                frame.failure = ""

    # --- Slabs of peers -------------------------------------------------------------------

    def ask_back(self, slabs: Iterable[PeerSlab], now_s: float) -> None:
        """Note that slabs are wanted back, unless they were before."""
        for slab in slabs:
            if slab.asked_at_s is None and (slab in self.under or slab in self.spare_peers):
                slab.asked_at_s = now_s
                self.asked[slab] = None

    def spare_for(self, leaving: PeerSlab | None = None) -> PeerSlab | None:
        """A spare slab that may be filled, or None.

        A lender that is taking memory back does not count: the bytes would soon move again.

        Args:
            leaving: A slab whose bytes have to go elsewhere, and not to its own lender.
        """
        for slab in self.spare_peers:
            if slab.asked_at_s is not None or slab.lender.is_reclaiming:
                continue
            if leaving is None or slab.lender is not leaving.lender:
                return slab
        return None

    def may_move(self, frame: Frame) -> bool:
        """Whether there is anywhere to go for a frame at rest, or a reason to leave."""
        if frame.peer is not None:
            return frame.peer.asked_at_s is not None
        return self.spare_for() is not None

    def promise(self, slab: PeerSlab, frame: Frame) -> None:
        """Take a spare slab for a frame."""
        del self.spare_peers[slab]
        self.under[slab] = frame

    def put_aside(self, slab: PeerSlab) -> None:
        """A slab has no frame any more; it is spare again, or next to be given back."""
        del self.under[slab]
        self.spare_peers[slab] = None

    def forget(self, slab: PeerSlab) -> None:
        """A slab is not mapped any more."""
        self.under.pop(slab, None)
        self.asked.pop(slab, None)
        self.stats.returned_bytes += self.slab_bytes

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
        for frame in self.closing:
            assert frame.is_moving, frame
