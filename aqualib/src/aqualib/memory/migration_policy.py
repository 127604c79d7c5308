"""The migration policy: which frame moves next, and when to look again.

Pure: it reads a frame table and the time, changes neither, and answers with one effect, which
`FrameTable.apply` carries out. It is asked again until it starts a migration or has no effect.

Slabs asked back are served before anything else: spare ones first, then those under frames with
nothing in them, then the others in the order asked. A frame goes to a spare slab of another lender
if there is one, else to its own host slab. Only when nothing more can be done for those, spare
slabs that are not asked back are filled from host memory, frames with most in them first. A
frame of which host memory has everything goes nowhere else: it leaves without a copy, and is moved
to another lender when nothing is asked back any more.

Last comes write-behind: parts that were written on a peer are copied to host memory, so that a
reclaim finds nothing to copy. It begins `WRITE_BEHIND_S` after a frame was first written, in pieces
of `PIECE_BYTES`, and only while the frame is not pinned: a writer had pinned it before, or marks
what it writes as written anew.

Promotions and write-behind wait until the lender's pace allows them (`copy_pace`); drains do not.

A pinned frame cannot move. Its gate is closed for `PATIENCE_S`, so that users who come and go do
not hold it in place for ever by taking turns; then it opens again for `BREATHER_S`, so that a
thread which holds one frame and waits for another cannot lock itself out. A pin that delays a slab
for longer than `OVERDUE_S` is reported once. Nothing is ever unmapped under it: what the owner does
about a late slab is the owner's policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqua_protocol import MIB
from aqualib.memory.frame import FrameState

if TYPE_CHECKING:
    from aqualib.memory.frame import Frame, PeerSlab
    from aqualib.memory.frame_table import FrameTable
    from aqualib.ranges import Range

PATIENCE_S: Final = 0.05
"""Seconds that a gate stays closed over pins: several copies of a whole frame. Doubled, engine
threads wait twice as long for a frame that a long pin keeps from moving."""

BREATHER_S: Final = 0.01
"""Seconds that it then stays open at least: many pins' worth. Doubled, a slab under a frame with
changing users comes back up to 10 ms later."""

LINGER_POLL_S: Final = 0.05
"""Seconds between looks at views that outlived their pin and are in the way: torch does not tell
when a storage dies. Doubled, such a slab is late by up to 50 ms more."""

OVERDUE_S: Final = 1.0
"""Seconds after which a pin that delays a slab is reported; a pin in order lasts milliseconds.
Doubled, an operator hears of it a second later."""

WRITE_BEHIND_S: Final = 0.1
"""Seconds from the first write to a frame to its copy: what is written again soon is copied once.
Doubled, a reclaim finds what was written in the last 0.2 s uncopied."""

PIECE_BYTES: Final = 8 * MIB
"""Bytes of a piece of write-behind, which a reclaim may have to wait for: 0.15 ms over PCIe 5, 1 ms
by a CPU core. Doubled, a reclaim may begin as much later."""

MAX_CLOSING: Final = 4
"""Frames whose gates are closed over pins at once: enough to keep the migrator busy, few enough
that the rest of the store stays usable. Doubled, twice as many users may wait in vain."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Copy `ranges` out of `source`, to `target` or (None) to the frame's host slab; unmap it."""

    frame: Frame
    source: PeerSlab
    target: PeerSlab | None
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copy `ranges` from the frame's host slab to `target`."""

    frame: Frame
    target: PeerSlab
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class WriteBehind:
    """Copy `ranges`, all that is taken of the `parts` written, to the frame's host slab.

    The frame stays where it is and may be pinned meanwhile, by writers as well.
    """

    frame: Frame
    source: PeerSlab
    parts: int
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class SlabReturn:
    """Unmap a slab that holds nothing."""

    source: PeerSlab


Migration = Drain | Promotion | SlabReturn | WriteBehind


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Let a pinned frame take no more pins until `until_s`; `target` is promised to a promotion."""

    frame: Frame
    until_s: float
    target: PeerSlab | None = None


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Call a migration off: nothing has changed, and it is not tried again before `retry_at_s`."""

    frame: Frame
    retry_at_s: float


@dataclass(frozen=True, slots=True)
class ReportOverdue:
    """Tell, once, that a pin has delayed `slab` for `late_s`."""

    slab: PeerSlab
    frame: Frame
    late_s: float


Effect = Migration | CloseGate | OpenGate | ReportOverdue


def decide(table: FrameTable, now_s: float) -> Effect | None:
    """What to do now, or None when nothing can be done before `wake_s`."""
    return (
        _for_closed_gates(table, now_s)
        or _for_asked_slabs(table, now_s)
        or _for_spare_slabs(table, now_s)
        or _for_unsaved_frames(table, now_s)
    )


def wake_s(table: FrameTable, now_s: float) -> float | None:
    """When to decide again although nothing will have been announced; None for never."""
    times: list[float] = []
    blocked = list(table.closing)
    for slab in table.asked:
        frame = table.under.get(slab)
        if frame is None:
            times.append(slab.retry_at_s)
        elif frame.state is FrameState.PEER:
            blocked.append(frame)
            times.append(frame.retry_at_s)
            if frame.pins and not slab.is_overdue and slab.asked_at_s is not None:
                times.append(slab.asked_at_s + OVERDUE_S)
    if table.spare_for() is not None:
        blocked += table.at_home
        times += [frame.retry_at_s for frame in table.at_home]
    times += [frame.patient_until_s for frame in table.closing]
    lenders = {slab.lender for slab in (*table.spare_peers, *table.under)}
    times += [lender.pace.ready_at_s(now_s) for lender in lenders]
    # A frame that is due and pinned: the migrator does not hear when its users leave.
    times += [max(due_s, now_s + PATIENCE_S) for due_s in table.unsaved.values()]
    if any(frame.lingering for frame in blocked):
        times.append(now_s + LINGER_POLL_S)
    return min((time for time in times if time > now_s), default=None)


def _for_closed_gates(table: FrameTable, now_s: float) -> Effect | None:
    for frame in table.closing:
        target = frame.peer if frame.state is FrameState.PROMOTING else None
        is_moot = target is not None and target.asked_at_s is not None
        if is_moot or (frame.pins and now_s >= frame.patient_until_s):
            return OpenGate(frame, now_s + BREATHER_S)
        if not frame.pins:
            return _drain(table, frame) if target is None else _promotion(frame, target)
    return None


def _for_asked_slabs(table: FrameTable, now_s: float) -> Effect | None:
    for slab in table.asked:
        if slab in table.spare_peers and slab.retry_at_s <= now_s:
            return SlabReturn(slab)
    at_rest = [
        (slab, frame)
        for slab in table.asked
        if (frame := table.under.get(slab)) is not None
        and frame.peer is slab
        and frame.state is FrameState.PEER
    ]
    for slab, frame in at_rest:
        assert slab.asked_at_s is not None, slab
        if frame.pins and not slab.is_overdue and now_s >= slab.asked_at_s + OVERDUE_S:
            return ReportOverdue(slab, frame, now_s - slab.asked_at_s)
    waiting = [frame for _, frame in at_rest if frame.retry_at_s <= now_s]
    pinned = next((frame for frame in waiting if frame.pins), None)
    if pinned is not None and len(table.closing) < MAX_CLOSING:
        return CloseGate(pinned, now_s + PATIENCE_S)
    # Empty ones first; then the first, in the order asked.
    movable = (frame for frame in waiting if not frame.pins)
    chosen = min(movable, key=lambda frame: frame.used_bytes > 0, default=None)
    return None if chosen is None else _drain(table, chosen)


def _for_spare_slabs(table: FrameTable, now_s: float) -> Effect | None:
    slab = table.spare_for()
    if slab is None or slab.lender.pace.ready_at_s(now_s) > now_s:
        return None
    ready = [
        frame
        for frame in table.at_home
        if frame.state is FrameState.HOST and frame.retry_at_s <= now_s and not frame.is_unwanted
    ]
    # An empty frame would take the slab that a full one, pinned for a moment, is about to need.
    chosen = max(ready, default=None, key=lambda f: (f.used_bytes > 0, not f.pins, f.used_bytes))
    if chosen is None:
        return None
    if not chosen.pins:
        return _promotion(chosen, slab)
    # One gate at a time: a promotion is a favour, not a duty.
    return None if table.closing else CloseGate(chosen, now_s + PATIENCE_S, target=slab)


def _for_unsaved_frames(table: FrameTable, now_s: float) -> Effect | None:
    for frame, due_s in table.unsaved.items():
        slab = frame.peer
        is_due = due_s <= now_s and frame.state is FrameState.PEER and not frame.pins
        if slab is None or slab.asked_at_s is not None or not is_due:
            continue
        if slab.lender.pace.ready_at_s(now_s) <= now_s:
            parts = frame.first_written(PIECE_BYTES)
            return WriteBehind(frame, slab, parts, frame.unsaved_ranges(parts))
    return None


def _drain(table: FrameTable, frame: Frame) -> Drain:
    assert frame.peer is not None, frame
    unsaved = frame.unsaved_ranges()
    target = table.spare_for(frame.peer) if unsaved else None
    return Drain(frame, frame.peer, target, unsaved if target is None else frame.used_ranges())


def _promotion(frame: Frame, target: PeerSlab) -> Promotion:
    return Promotion(frame, target, frame.used_ranges())
