"""The frame store: frames for many threads, behind one lock.

The table says where everything is, the migration policy says what moves next, and this module lets
engine threads and the migrator at them. Copies, unmapping and messages happen outside the lock, in
`aqualib.memory.migrator`. What it promises:

- A frame's bytes are where its state says, and a pin keeps them there.
- A pin waits only while a frame is really on its way, and never longer than `PIN_WAIT_LIMIT_S`.
- Host memory never exceeds `host_bytes`, and a frame has its host slab before it has anything
  else, so no migration ever waits for memory.

Not promised: that pins of several frames at once cannot wait for each other. A caller that moves
much pins one frame at a time; one that must hold several is let through when gates open again.

A finalizer may run at any moment, on any thread, in the middle of our own code; so all it does is
to `leave` its work in a queue that needs no lock, and a later call or the migrator does it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aqua_protocol import CapacityError, ConfigError, DataLostError, TransportError, format_bytes
from aqua_protocol.supervision import SerialExecutor, resting
from aqualib.memory.frame import FrameState
from aqualib.memory.frame_table import FrameTable, StoreStats
from aqualib.memory.migration_policy import WRITE_BEHIND_S, Migration, decide, wake_s
from aqualib.ranges import Range

if TYPE_CHECKING:
    from aqualib.memory.frame import Frame, PeerSlab
    from aqualib.transports.base import MappedSlab, Transport

logger = logging.getLogger("aqualib")

MAX_LEFTOVERS_PER_SWEEP: Final = 1024
"""Finalizers whose work one sweep does; the rest waits for the next. Bounds what a call does for
others to about a millisecond; doubled, to two."""

PINNING_THREADS: Final = 4
"""Threads that fault host slabs in and register them with a GPU: the kernel takes 1.55 s for 8 GiB
by four and 0.92 s by 32, as published. Doubled, an engine's start takes twice as many cores."""

PIN_WAIT_LIMIT_S: Final = 30.0
"""Seconds. Moving a frame takes milliseconds; a gate that stays closed this long is a fault.
Doubled, an engine hangs a minute before it hears of one."""


class FrameStore:
    """The frames of one consumer; every method may be called from any thread.

    Args:
        transport: Makes the host slabs.
        slab_bytes: Size of a frame.
        host_bytes: Upper bound of the host memory taken, and so of the whole store.
        clock: Seconds, monotonic.
        writes_behind: Whether what is written on peers is copied to host memory ahead of a reclaim.

    Raises:
        ConfigError: `host_bytes` has no room for a single frame.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        slab_bytes: int,
        host_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        writes_behind: bool = False,
    ) -> None:
        self.slab_bytes: Final = slab_bytes
        self.frame_limit: Final = host_bytes // slab_bytes
        if self.frame_limit < 1:
            raise ConfigError(
                f"host_bytes={host_bytes} leaves no room for one slab of {slab_bytes} bytes",
                remedy="Raise it: every byte on a peer needs a landing place in host memory.",
            )
        self._transport = transport
        self._clock = clock
        self._writes_behind = writes_behind
        # The hot methods take the lock itself: a condition's own enter and exit are Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._table = FrameTable(slab_bytes)
        self._closed = ""
        self._is_stopped = False
        self._leftovers: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._sweeping = threading.RLock()

    # --- Frames ---------------------------------------------------------------------------

    def reserve(self, count: int) -> None:
        """Prepare host slabs so that `count` frames could exist, or as many as the limit allows.

        Slow, since it faults memory in: for start-up and background threads.

        Raises:
            TransportError: Memory ran out.
        """
        target = min(count, self.frame_limit)
        count = min(target - self._table.host_count, PINNING_THREADS)
        if count <= 1 or self._transport.device.type == "cpu":
            self._reserve(target)
            return
        # Each is made by one thread: page faults, and then a call of the driver's.
        threads = [SerialExecutor("aqua-pin") for _ in range(count)]
        try:
            for made in [thread.submit(self._reserve, target) for thread in threads]:
                made.result()
        finally:
            for thread in threads:
                thread.shutdown()

    def _reserve(self, target: int) -> None:
        while True:
            with self._changed:
                if self._closed or self._table.host_count >= target:
                    return
                self._table.host_count += 1
            slab = self._make_host_slab()
            with self._changed:
                self._table.spare_hosts.append(slab)
                self._changed.notify_all()

    def claim(self, unit_bytes: int) -> Frame:
        """A new, empty frame, on a peer if a slab is spare; its room is counted in `unit_bytes`.

        A host slab that another thread is making, or that the migrator is about to set free, is
        waited for: it was counted already, so the store only looks full.

        Raises:
            CapacityError: `host_bytes` is used up.
            TransportError: Memory ran out.
            ConfigError: The store is closed.
        """
        assert 0 < unit_bytes <= self.slab_bytes, f"unit of {unit_bytes} bytes"
        with self._changed:
            self._changed.wait_for(self._knows_whether_full, PIN_WAIT_LIMIT_S)
            self._require_open()
            table = self._table
            if table.spare_hosts:
                return table.add_frame(table.spare_hosts.pop(), unit_bytes)
            if table.host_count >= self.frame_limit:
                raise CapacityError(
                    f"the store's {format_bytes(self.frame_limit * self.slab_bytes)} of host "
                    "memory are used up",
                    remedy="Release something, or raise host_bytes.",
                )
            table.host_count += 1
        host = self._make_host_slab()
        with self._changed:
            self._changed.notify_all()
            return self._table.add_frame(host, unit_bytes)

    def dissolve(self, frame: Frame) -> None:
        """Drop what is in the frame and take it apart; its slabs are spare once it is at rest."""
        with self._changed:
            self._table.discard(frame)
            self._changed.notify_all()

    # --- Room -----------------------------------------------------------------------------

    def take(self, frames: Iterable[Frame], count: int) -> tuple[Frame, int] | None:
        """Take `count` adjacent units in one of `frames`, on peers first; None: no such room."""
        with self._changed:
            for frame in _by_preference(frames):
                if (start := frame.room.take(count)) is not None:
                    self._table.note_taken(frame, count)
                    return frame, start
        return None

    def take_runs(
        self, frames: Sequence[Frame], count: int, *, lender_count: int = 1
    ) -> list[tuple[Frame, Range]] | None:
        """Take `count` units, in runs as long as possible, on peers first; None: no such room.

        Lenders with room, at most so many, give equal shares; the runs of one follow each other.
        """
        found: list[tuple[Frame, Range]] = []
        with self._lock:
            left = count
            if lender_count > 1 and len(lenders := _with_room(frames)) > 1:
                lenders = lenders[:lender_count]
                for waiting, own in zip(range(len(lenders), 0, -1), lenders, strict=True):
                    left -= self._take_upto(own, left // waiting, found)
            left -= self._take_upto(_by_preference(frames), left, found)
            if not left:
                return found
            self._give_back(found)
        return None

    def give_back(self, runs: Iterable[tuple[Frame, Range]]) -> None:
        """Give taken ranges back, whole or in pieces; after the end there is nothing to give."""
        with self._changed:
            if not self._closed:
                self._give_back(runs)

    # --- Pins -----------------------------------------------------------------------------

    def pin(self, frame: Frame, written: Range | None = None) -> MappedSlab:
        """Keep the frame where it is until `unpin`, waiting while it moves; the slab it is in.

        Args:
            written: Bytes of the frame that the caller is going to change.

        Raises:
            DataLostError: The bytes cannot be read any more.
            TransportError: The frame did not arrive within `PIN_WAIT_LIMIT_S`.
            ConfigError: The store is closed.
        """
        with self._lock:
            if self._closed or not frame.is_open:
                self._wait_until_open(frame)
            frame.pins += 1
            if written is not None:
                frame.note_written(written)
                if self._writes_behind and frame.written and frame not in self._table.unsaved:
                    # Once a frame and copy: the migrator learns when to wake.
                    self._table.unsaved[frame] = self._clock() + WRITE_BEHIND_S
                    self._changed.notify_all()
            return frame.memory

    def try_pin(self, frame: Frame, written: Range | None = None) -> MappedSlab | None:
        """Like `pin`, but None instead of waiting."""
        with self._lock:
            return None if frame.is_moving else self.pin(frame, written)

    def unpin(self, frame: Frame) -> None:
        """Let the frame move again."""
        with self._lock:
            frame.pins -= 1
            if frame.is_unwanted:
                self._table.settle(frame)
            # Waking the migrator for nothing would cost the engine the interpreter lock.
            if not frame.pins and (frame.is_moving or self._table.may_move(frame)):
                self._changed.notify_all()

    def linger(self, frame: Frame, view: MappedSlab) -> None:
        """Take over a pin whose view is still alive: it ends when the view has died."""
        with self._changed:
            frame.lingering.append(view)
            self._changed.notify_all()

    # --- Slabs of peers -------------------------------------------------------------------

    def adopt(self, slabs: Sequence[PeerSlab]) -> None:
        """Take freshly mapped slabs; frames in host memory move into them."""
        with self._changed:
            for slab in slabs:
                assert slab.memory.nbytes == self.slab_bytes, f"{slab!r} of {slab.memory.nbytes}"
                self._table.spare_peers[slab] = None
            if self._closed:
                self._table.ask_back(slabs, self._clock())
            self._changed.notify_all()

    def ask_back(self, slabs: Iterable[PeerSlab]) -> None:
        """Start giving slabs back, in this order; harmless when repeated."""
        with self._changed:
            self._table.ask_back(slabs, self._clock())
            self._changed.notify_all()

    def ask_back_unused(self, count: int) -> int:
        """Start giving back up to `count` slabs that hold nothing; returns how many."""
        with self._changed:
            slabs = self._table.unused(count)
            self.ask_back(slabs)
            return len(slabs)

    # --- For the migrator -----------------------------------------------------------------

    def next_migration(self) -> Migration | None:
        """Wait for the next thing to move and close its gate; None once the store has stopped.

        The caller tells the table what has become of it, inside `answering`.
        """
        table = self._table
        while True:
            self.sweep()  # Without the lock: it may wait for a device.
            with self._changed:
                if self._is_stopped:
                    return None
                table.sweep()
                now_s = self._clock()
                while (effect := decide(table, now_s)) is not None:
                    if (migration := table.apply(effect)) is not None:
                        return migration
                until_s = wake_s(table, now_s)
                # Closed gates may have opened above; tell those who wait at them.
                self._changed.notify_all()
                with resting():
                    self._changed.wait(None if until_s is None else until_s - now_s)

    @contextmanager
    def answering(self) -> Iterator[tuple[FrameTable, float]]:
        """The table and the time, to note what has become of a migration."""
        with self._changed:
            yield self._table, self._clock()
            self._changed.notify_all()

    def nudge(self) -> None:
        """A lender may have got all that it asked for: its other slabs may be filled again."""
        with self._changed:
            self._changed.notify_all()

    # --- What finalizers leave ---------------------------------------------------------

    def leave(self, work: Callable[[], bool]) -> None:
        """Have `work` done soon; it says whether it is done. For finalizers: takes no lock."""
        self._leftovers.put(work)

    def sweep(self, max_count: int = MAX_LEFTOVERS_PER_SWEEP) -> None:
        """Do what finalizers left behind; what another thread is at is done when it returns."""
        with self._sweeping, suppress(queue.Empty):
            for _ in range(min(self._leftovers.qsize(), max_count)):
                work = self._leftovers.get_nowait()
                is_done = False
                try:
                    is_done = work()
                finally:
                    if not is_done:
                        self._leftovers.put(work)

    # --- The whole ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The table's, which says what it counts; may be read without the lock."""
        return self._table.version

    def states_of(self, frames: Iterable[Frame]) -> set[FrameState]:
        """The states of `frames`, at one instant."""
        with self._changed:
            return {frame.state for frame in frames}

    def snapshot(self) -> StoreStats:
        """A copy of the statistics."""
        with self._changed:
            return replace(self._table.stats)

    def counts(self) -> tuple[int, int]:
        """Frames, and mapped slabs of peers."""
        with self._changed:
            return len(self._table.frames), self._table.peer_count

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition`, a question to this store, holds; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def audit(self) -> None:
        """Recount everything and compare; for tests."""
        with self._changed:
            self._table.audit()

    def close(self, reason: str, *, timeout_s: float) -> bool:
        """Drop every byte, give everything back and stop the migrator.

        Args:
            reason: What later callers are told.
            timeout_s: How long to wait for slabs that are still pinned or moving.

        Returns:
            Whether every slab of a peer is unmapped. Those that are not stay mapped until the
            process ends, and their owners are not told otherwise.
        """
        with self._changed:
            table = self._table
            self._closed = self._closed or reason
            for frame in list(table.frames.values()):
                table.discard(frame)
            self._table.sweep()
            table.ask_back([*table.under, *table.spare_peers], self._clock())
            self._changed.notify_all()
            is_empty = self._changed.wait_for(
                lambda: not (table.peer_count or table.moves_out), timeout_s
            )
            self._is_stopped = True
            self._table.sweep()
            hosts, table.spare_hosts = table.spare_hosts, []
            table.host_count -= len(hosts)
            self._changed.notify_all()
        for slab in hosts:
            try:
                slab.close()
            except BufferError:
                logger.warning("a view of %r is still alive; its memory stays mapped", slab)
        return is_empty

    def forbid(self, reason: str) -> None:
        """Refuse all use in a forked child, where threads that hold the locks do not exist."""
        self._lock, self._sweeping = threading.RLock(), threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = reason
        self._is_stopped = True

    def __repr__(self) -> str:
        with self._changed:
            table = self._table
            return (
                f"<FrameStore {format_bytes(table.stats.used_bytes)} used, "
                f"{len(table.frames)} of {self.frame_limit} frames, {table.peer_count} peer slabs>"
            )

    # --- Inside the lock ------------------------------------------------------------------

    def _wait_until_open(self, frame: Frame) -> None:
        def is_settled() -> bool:
            return bool(self._closed) or not frame.is_moving

        if not self._changed.wait_for(is_settled, PIN_WAIT_LIMIT_S):
            raise TransportError(
                f"{frame!r} has been on its way for {PIN_WAIT_LIMIT_S:.0f} s",
                remedy="Look for an earlier error in the log; release the data and recompute it.",
            )
        self._require_open()
        if frame.state is FrameState.LOST:
            raise DataLostError(
                f"frame {frame.number} could not be read from its producer: {frame.failure}",
                frame=frame.number,
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError(self._closed, remedy="Call aqualib.connect() again.")

    def _take_upto(
        self, frames: Iterable[Frame], count: int, found: list[tuple[Frame, Range]]
    ) -> int:
        """Take up to `count` units of frames in this order; returns how many."""
        left = count
        for frame in frames:
            if not left:
                break
            while left and frame.room.free and (run := frame.room.take_upto(left)) is not None:
                self._table.note_taken(frame, run.size)
                found.append((frame, run))
                left -= run.size
        return count - left

    def _give_back(self, runs: Iterable[tuple[Frame, Range]]) -> None:
        for frame, run in runs:
            frame.room.free_range(run.start, run.size)
            self._table.note_taken(frame, -run.size)

    def _knows_whether_full(self) -> bool:
        """Whether the host slabs counted as taken are: none is being made, or moves to be freed."""
        table = self._table
        if self._closed or table.spare_hosts or table.host_count < self.frame_limit:
            return True
        table.sweep()
        frames = table.frames.values()
        is_making = table.host_count > len(frames)
        is_freeing = any(frame.is_unwanted and frame.is_moving for frame in frames)
        return bool(table.spare_hosts) or not (is_making or is_freeing)

    # --- Outside the lock -----------------------------------------------------------------

    def _make_host_slab(self) -> MappedSlab:
        """Make a host slab that `host_count` already includes."""
        try:
            return self._transport.create_host(self.slab_bytes)
        except BaseException:
            with self._changed:
                self._table.host_count -= 1
                self._changed.notify_all()
            raise


def _by_preference(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Frames on a peer that may stay there, then all others that can be used."""
    others = []
    for frame in frames:
        if _may_stay(frame):
            yield frame
        elif frame.state is not FrameState.LOST:
            others.append(frame)
    yield from others


def _with_room(frames: Iterable[Frame]) -> list[list[Frame]]:
    """Frames with room on a peer that may stay there, by lender."""
    found: dict[str, list[Frame]] = {}
    for frame in frames:
        if frame.room.free and _may_stay(frame):
            found.setdefault(frame.lender_id, []).append(frame)
    return list(found.values())


def _may_stay(frame: Frame) -> bool:
    peer = frame.peer
    return frame.state is FrameState.PEER and peer is not None and peer.asked_at_s is None
