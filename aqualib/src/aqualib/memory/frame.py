"""The frame: a slab-sized piece of the store, its states, and the slab of a peer under it.

A frame owns one slab of host memory from birth to death, faulted in before the frame exists, so
that a drain never waits for memory. A peer's slab comes and goes under it. While it is on a peer,
the host slab still has every byte as of the last move, so the frame only remembers which parts were
written since (`written`), and leaving the peer copies just those. Write-behind copies them earlier,
when no reclaim waits for it; then leaving the peer copies nothing.

The bytes live in exactly one of the two places, and `FRAME` is the whole protocol of moving them.
In the open states the frame may be pinned; in the moving states the gate is closed: pins taken
before are waited for, new ones wait until the frame has arrived. A move arrives, and only then do
the bytes live in the new place; or it is abandoned, and they never left the old one; or the old
place cannot be read any more, and the frame is lost until the last user has let go.

Nothing here locks or blocks. Frames are changed by the store that owns them, under its lock.

Source: Aqua section 6, "Reclaiming Aqua Tensors", moves tensors at iteration boundaries; the gate
is ours, so that frames can move while the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from aqua_protocol.machine import StateMachine
from aqualib.ranges import Range, RangeAllocator, intersection, merged

if TYPE_CHECKING:
    from aqualib.memory.copy_pace import CopyPace
    from aqualib.transports.base import MappedSlab

PARTS_PER_FRAME: Final = 64
"""Parts of a frame in which writes are remembered: 1 MiB of a 64 MiB frame. A bit mask of 64 is one
machine word, and copying a megabyte too much costs 0.1 ms. Doubled, half of that, for a mask of two
words."""

MERGE_GAP_BYTES: Final = 64 * 1024
"""Bytes. Ranges with a smaller gap are copied as one: a copy call costs as much as some 50 KB of
memcpy, and the bytes of a gap are unused or the same on both sides. Doubled, up to 128 KiB are
copied in vain to save a call."""


class FrameState(StrEnum):
    """Where a frame's bytes live."""

    HOST = "host"
    PROMOTING = "promoting"
    PEER = "peer"
    DRAINING = "draining"
    LOST = "lost"


class FrameEvent(StrEnum):
    """What can happen to a frame."""

    PROMOTE = "promote"
    DRAIN = "drain"
    ARRIVE_ON_PEER = "arrive_on_peer"
    ARRIVE_ON_HOST = "arrive_on_host"
    ABANDON = "abandon"
    LOSE = "lose"
    EMPTY = "empty"


_S, _E = FrameState, FrameEvent

FRAME: Final[StateMachine[FrameState, FrameEvent]] = StateMachine(
    noun="frame",
    initial=_S.HOST,
    terminal=frozenset(),
    transitions={
        (_S.HOST, _E.PROMOTE): _S.PROMOTING,
        (_S.PROMOTING, _E.ARRIVE_ON_PEER): _S.PEER,
        (_S.PROMOTING, _E.ABANDON): _S.HOST,
        (_S.PEER, _E.DRAIN): _S.DRAINING,
        (_S.DRAINING, _E.ARRIVE_ON_HOST): _S.HOST,
        (_S.DRAINING, _E.ARRIVE_ON_PEER): _S.PEER,
        (_S.DRAINING, _E.ABANDON): _S.PEER,
        (_S.DRAINING, _E.LOSE): _S.LOST,
        (_S.LOST, _E.EMPTY): _S.HOST,
    },
    meanings={
        _S.HOST: "The bytes are in the frame's own host slab.",
        _S.PROMOTING: "On the way from host memory to a peer; the gate is closed.",
        _S.PEER: "The bytes are in a slab of a peer.",
        _S.DRAINING: "On the way out of a peer's slab; the gate is closed.",
        _S.LOST: "The peer's slab could not be read; every access raises until all is released.",
        _E.PROMOTE: "A leased slab is free for the frame.",
        _E.DRAIN: "The slab under the frame is asked back, or its owner is gone.",
        _E.ARRIVE_ON_PEER: "The bytes are in the new slab, the old one is unmapped.",
        _E.ARRIVE_ON_HOST: "The bytes are in host memory, the peer's slab is unmapped.",
        _E.ABANDON: "Pins or views outlasted the patience of the move; nothing has changed.",
        _E.LOSE: "A transport error while reading the only copy.",
        _E.EMPTY: "Everything in the lost frame has been released.",
    },
)

OPEN_STATES: Final = frozenset({_S.HOST, _S.PEER})
"""States in which a frame may be pinned."""

MOVING_STATES: Final = frozenset({_S.PROMOTING, _S.DRAINING})
"""States in which the gate is closed."""


class Lender(Protocol):
    """The lender of a slab: an attachment, as far as frames need to know it."""

    @property
    def producer_id(self) -> str:
        """The producer whose memory it is."""

    @property
    def pace(self) -> CopyPace:
        """How fast it wants its memory copied to and from."""

    @property
    def is_reclaiming(self) -> bool:
        """Whether it wants memory back, or is gone: no place to move anything to."""

    def take_back(self, slab: PeerSlab) -> None:
        """The slab is unmapped here; tell the owner. Does not raise when the owner is gone."""

    def strand(self, slab: PeerSlab) -> None:
        """The slab could not be unmapped; the owner must never be told otherwise."""


@dataclass(slots=True, eq=False)
class PeerSlab:
    """A slab of a producer, mapped here.

    Attributes:
        slab_id: The producer's number for it.
        generation: Which lending of it this is.
        memory: The mapping.
        lender: The one that it goes back to.
        asked_at_s: When it was asked back, by the store's clock; None while it may be kept.
        is_overdue: Whether a pin that delays its return was reported already.
        retry_at_s: Not to be unmapped before, after that was refused.
    """

    slab_id: int
    generation: int
    memory: MappedSlab
    lender: Lender
    asked_at_s: float | None = None
    is_overdue: bool = False
    retry_at_s: float = 0.0

    def __repr__(self) -> str:
        asked = "" if self.asked_at_s is None else ", asked back"
        return f"<PeerSlab {self.slab_id}.{self.generation} of {self.lender.producer_id}{asked}>"


@dataclass(slots=True, eq=False)
class Frame:
    """One frame; see the module.

    Attributes:
        number: Names it in messages; never used twice within a store.
        host: Its own slab of host memory.
        unit_bytes: What `room` counts in.
        room: Which parts are taken.
        peer: The slab of a peer under it, while it has one. In `PROMOTING` it is not yet the place
            of the bytes, in `DRAINING` it still is.
        pins: Users of the present place; the gate waits for them.
        lingering: Views that outlived their pin, each of which still counts in `pins`.
        written: Bit i set: part i differs from the host slab, or is being changed.
        retry_at_s: Not to be moved before, after a move was abandoned.
        patient_until_s: When the gate opens again, if it was closed over pins.
        is_unwanted: No tensor or store refers to it any more; it is taken apart when it is at rest.
        failure: Why the frame is lost.
    """

    number: int
    host: MappedSlab
    unit_bytes: int
    room: RangeAllocator
    state: FrameState = FRAME.initial
    peer: PeerSlab | None = None
    pins: int = 0
    lingering: list[MappedSlab] = field(default_factory=list)
    written: int = 0
    retry_at_s: float = 0.0
    patient_until_s: float = 0.0
    is_unwanted: bool = False
    failure: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the frame and of any slab under it."""
        return self.host.nbytes

    @property
    def lender_id(self) -> str:
        """Who lends the slab under it; empty without one. It may change at any moment."""
        slab = self.peer
        return "" if slab is None else slab.lender.producer_id

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is taken."""
        return self.room.taken * self.unit_bytes

    @property
    def is_open(self) -> bool:
        """Whether it may be pinned now."""
        return self.state in OPEN_STATES

    @property
    def is_moving(self) -> bool:
        """Whether the gate is closed."""
        return self.state in MOVING_STATES

    @property
    def is_on_peer(self) -> bool:
        """Whether a peer holds the bytes."""
        return self.state in {FrameState.PEER, FrameState.DRAINING}

    @property
    def memory(self) -> MappedSlab:
        """The slab in which the bytes live."""
        if not self.is_on_peer:
            return self.host
        assert self.peer is not None, f"{self!r} has no peer slab"
        return self.peer.memory

    def advance(self, event: FrameEvent) -> None:
        """Take one step of the table."""
        self.state = FRAME.next(self.state, event)

    def release_dead_views(self) -> None:
        """End the pins of lingering views that have died since."""
        alive = still_alive(self.lingering)
        self.pins -= len(self.lingering) - len(alive)
        self.lingering = alive

    def note_written(self, run: Range) -> None:
        """Remember that these bytes are about to change."""
        if self.is_on_peer and run.size > 0:
            first, last = run.start // self._part_bytes, (run.end - 1) // self._part_bytes
            self.written |= (1 << (last + 1)) - (1 << first)

    def first_written(self, nbytes: int) -> int:
        """Choose the first parts of `written` with that many bytes, and one at least."""
        rest = self.written
        for _ in range(max(1, nbytes // self._part_bytes)):
            rest &= rest - 1  # Without its lowest bit.
        return self.written ^ rest

    def used_ranges(self) -> list[Range]:
        """What a promotion has to copy: everything taken, in bytes, ascending."""
        return merged(self._taken_bytes(), MERGE_GAP_BYTES)

    def unsaved_ranges(self, parts: int | None = None) -> list[Range]:
        """What only the peer has: taken and written since it was saved, in bytes, ascending.

        Args:
            parts: Bits of those that are meant; by default of all that were written.
        """
        parts = self.written if parts is None else parts
        if not parts:
            return []
        part_bytes = self._part_bytes
        written = [
            Range(part * part_bytes, min(part_bytes, self.nbytes - part * part_bytes))
            for part in range(-(-self.nbytes // part_bytes))
            if parts >> part & 1
        ]
        return merged(intersection(self._taken_bytes(), written), MERGE_GAP_BYTES)

    def __repr__(self) -> str:
        place = f" on {self.peer!r}" if self.peer is not None else ""
        return (
            f"<Frame {self.number} {self.state}{place}, "
            f"{self.used_bytes}/{self.nbytes} bytes used, {self.pins} pins>"
        )

    @property
    def _part_bytes(self) -> int:
        return -(-self.nbytes // PARTS_PER_FRAME)

    def _taken_bytes(self) -> list[Range]:
        return [taken.times(self.unit_bytes) for taken in self.room.ranges()]


def still_alive(views: Iterable[MappedSlab]) -> list[MappedSlab]:
    """Those that somebody still looks at; the others are closed."""
    alive = []
    for view in views:
        try:
            view.close()
        except BufferError:
            alive.append(view)
    return alive
