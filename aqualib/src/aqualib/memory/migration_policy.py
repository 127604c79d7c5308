"""The itinerary: which frame moves next, and when to look again. Pure choices over the table.

Slabs asked back are served before anything else: spare ones first, then those under frames with
nothing in them, then the others in the order asked. A frame goes to a spare slab of another lender
if there is one, else to its own host slab. Only when nothing more can be done for those, spare
slabs that nobody asks back are filled from host memory, frames with most in them first.

A pinned frame cannot move. Its gate is closed for `PATIENCE_S`, so that users who come and go do
not hold it in place for ever by taking turns; then it opens again for `BREATHER_S`, so that a
thread which holds one frame and waits for another cannot lock itself out. A pin that delays a slab
for longer than `OVERDUE_S` is reported once. Nothing is ever unmapped under it: what the owner does
about a late slab is the owner's policy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqualib.memory.frame_state import FrameEvent, FrameState

if TYPE_CHECKING:
    from aqualib.memory.frame import Frame, PeerSlab
    from aqualib.memory.frame_table import FrameTable
    from aqualib.ranges import Range

logger = logging.getLogger("aqualib")

PATIENCE_S: Final = 0.05
"""How long a gate stays closed over pins: several copies of a whole frame."""

BREATHER_S: Final = 0.01
"""How long it then stays open at least."""

UNMAP_RETRY_S: Final = 0.05
"""Before a frame whose slab could not be unmapped is moved again."""

LINGER_POLL_S: Final = 0.05
"""How often views that outlived their pin are looked at, while they are in the way of a move:
torch does not tell when a storage dies."""

OVERDUE_S: Final = 1.0
"""A pin that delays a slab for longer is reported."""

MAX_CLOSING: Final = 4
"""Gates closed over pins at once: enough to keep the mover busy, few enough that the rest of the
store stays usable."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Copy `runs` out of `source`, to `target` or (None) to the frame's host slab; unmap it."""

    frame: Frame
    source: PeerSlab
    target: PeerSlab | None
    runs: list[Range]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copy `runs` from the frame's host slab to `target`."""

    frame: Frame
    target: PeerSlab
    runs: list[Range]


@dataclass(frozen=True, slots=True)
class SlabReturn:
    """Unmap a slab that holds nothing."""

    slab: PeerSlab


Migration = Drain | Promotion | SlabReturn


def pick(table: FrameTable, now_s: float) -> Migration | None:
    """Choose the next move and close its gate, or None when nothing can move now."""
    return _pick_closing(table, now_s) or _pick_asked(table, now_s) or _pick_home(table, now_s)


def wake_s(table: FrameTable, now_s: float) -> float | None:
    """When to pick again although nothing will have been announced; None for never."""
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
        times += [frame.retry_at_s for frame in table.at_home if frame.retry_at_s > now_s]
    times += [frame.patient_until_s for frame in table.closing]
    if any(frame.lingering for frame in blocked):
        times.append(now_s + LINGER_POLL_S)
    return min((time for time in times if time > now_s), default=None)


def release_dead_views(frame: Frame) -> None:
    """End the pins of lingering views that have died since."""
    if not frame.lingering:
        return
    from aqualib.memory.pinned_view import (
        still_alive,  # Needs torch, which whoever made a view has.
    )

    alive = still_alive(frame.lingering)
    frame.pins -= len(frame.lingering) - len(alive)
    frame.lingering = alive


def reopen(table: FrameTable, frame: Frame, retry_at_s: float) -> None:
    """Call a move off: nothing has changed, and it is not tried again before `retry_at_s`."""
    table.closing.pop(frame, None)
    if frame.state is FrameState.PROMOTING and frame.peer is not None:
        table.put_aside(frame.peer)
        frame.peer = None
    table.advance(frame, FrameEvent.ABANDON)
    frame.retry_at_s = retry_at_s
    table.stats.moves_abandoned += 1


def _pick_closing(table: FrameTable, now_s: float) -> Migration | None:
    for frame in list(table.closing):
        release_dead_views(frame)
        assert frame.peer is not None, frame
        is_moot = frame.state is FrameState.PROMOTING and frame.peer.asked_at_s is not None
        if is_moot or (frame.pins and now_s >= frame.patient_until_s):
            reopen(table, frame, now_s + BREATHER_S)
        elif not frame.pins:
            del table.closing[frame]
            return _start(table, frame)
    return None


def _pick_asked(table: FrameTable, now_s: float) -> Migration | None:
    for slab in table.asked:
        if slab in table.spare_peers and slab.retry_at_s <= now_s:
            return _start_giving_back(table, slab)
    waiting = [frame for frame in _asked_frames(table, now_s) if frame.retry_at_s <= now_s]
    for frame in [frame for frame in waiting if frame.pins][: MAX_CLOSING - len(table.closing)]:
        table.advance(frame, FrameEvent.DRAIN)
        _close_gate(table, frame, now_s)
    movable = [frame for frame in waiting if not frame.pins]
    if not movable:
        return None
    frame = min(movable, key=lambda frame: frame.used_bytes > 0)  # The first, if all have bytes.
    table.advance(frame, FrameEvent.DRAIN)
    return _start(table, frame)


def _asked_frames(table: FrameTable, now_s: float) -> list[Frame]:
    """Frames at rest on slabs that are asked back, in that order."""
    found = []
    for slab in table.asked:
        frame = table.under.get(slab)
        if frame is not None and frame.peer is slab and frame.state is FrameState.PEER:
            release_dead_views(frame)
            if frame.pins:
                _report_overdue(table, frame, slab, now_s)
            found.append(frame)
    return found


def _pick_home(table: FrameTable, now_s: float) -> Migration | None:
    slab = table.spare_for()
    if slab is None:
        return None
    ready = [
        frame
        for frame in table.at_home
        if frame.state is FrameState.HOST and frame.retry_at_s <= now_s and not frame.is_unwanted
    ]
    if not ready:
        return None
    for frame in ready:
        release_dead_views(frame)
    chosen = max(ready, key=lambda frame: (not frame.pins, frame.used_bytes))
    if chosen.pins and table.closing:
        return None  # One at a time: a promotion is a favour, not a duty.
    table.promise(slab, chosen)
    chosen.peer = slab
    table.advance(chosen, FrameEvent.PROMOTE)
    if chosen.pins:
        _close_gate(table, chosen, now_s)
        return None
    return _start(table, chosen)


def _start(table: FrameTable, frame: Frame) -> Migration:
    assert frame.peer is not None, frame
    table.moves_out += 1
    if frame.state is FrameState.PROMOTING:
        return Promotion(frame=frame, target=frame.peer, runs=frame.used_runs())
    target = table.spare_for(frame.peer) if frame.used_bytes else None
    if target is None:
        return Drain(frame=frame, source=frame.peer, target=None, runs=frame.unsaved_runs())
    table.promise(target, frame)
    return Drain(frame=frame, source=frame.peer, target=target, runs=frame.used_runs())


def _start_giving_back(table: FrameTable, slab: PeerSlab) -> SlabReturn:
    # Kept out of the spares, so that nobody fills it, and in `asked`, since it is still mapped.
    del table.spare_peers[slab]
    table.moves_out += 1
    return SlabReturn(slab)


def _close_gate(table: FrameTable, frame: Frame, now_s: float) -> None:
    frame.patient_until_s = now_s + PATIENCE_S
    table.closing[frame] = None


def _report_overdue(table: FrameTable, frame: Frame, slab: PeerSlab, now_s: float) -> None:
    assert slab.asked_at_s is not None, slab
    if slab.is_overdue or now_s < slab.asked_at_s + OVERDUE_S:
        return
    slab.is_overdue = True
    table.stats.pins_overdue += 1
    kept_by = "a view that outlived its pinned()" if frame.lingering else "a pinned() or a transfer"
    logger.warning(
        "%s wants slab %d back since %.1f s, and %s keeps %r in place; end it, or the producer "
        "will act by its policy",
        slab.lender.producer_id,
        slab.slab_id,
        now_s - slab.asked_at_s,
        kept_by,
        frame,
    )
