"""The migrator: carries out a store's migrations, on two threads that form a pipeline.

The first takes the next migration, copies and fences; the second unmaps the slab that was left,
lets the frame arrive and tells the owner. Unmapping walks page tables and can take a noticeable
part of a copy's time, and it needs no memory bandwidth, so the two overlap.

The order within one migration is what keeps bytes right: copy, fence, unmap, arrive, tell.
Unmapping comes before arriving because it can be refused: a view that outlived its pin may still
write to the old place, so the frame must then stay there, and the copy is thrown away. Telling
comes last because the owner may reuse the slab at once.

Write-behind moves nothing: it copies and fences, and the frame stays open meanwhile.

A peer's death is nothing special here: its slabs are asked back, the surviving mappings still read,
and there is only no owner to tell. If they do not read, the frame is lost, and says so.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Final

from aqua_protocol import MIB, TransportError
from aqua_protocol.supervision import SerialExecutor, SupervisedThread, resting
from aqualib.memory.migration_policy import (
    Drain,
    Migration,
    Promotion,
    SlabReturn,
    WriteBehind,
)
from aqualib.memory.transfers import RenewableCopier
from aqualib.ranges import Range, size_of, split
from aqualib.thread_slice import run_promptly

if TYPE_CHECKING:
    from aqualib.memory.frame import PeerSlab
    from aqualib.memory.frame_store import FrameStore
    from aqualib.transports.base import Copier, MappedSlab, Transport

logger = logging.getLogger("aqualib")

PIPELINE_DEPTH: Final = 2
"""Migrations between the two threads: one being unmapped and one ready. Doubled, two more frames
are kept from engine threads for as long as unmapping takes."""

CPU_COPIERS: Final = 2
"""Threads that copy one frame on a CPU. 16 slabs of 64 MiB on a 2-core virtual machine (Xeon, Linux
6.18): one thread 157 ms, two 96 ms, and a single memcpy of 1 GiB 109 ms. Doubled, four threads
share what two get out of the memory."""

DEVICE_COPIERS: Final = 1
"""Threads that feed a GPU's copy engine. Doubled, a second one waits for the same engine."""

MIN_PART_BYTES: Final = 2 * MIB
"""Bytes below which a part is not handed over: that costs some 50 us, in which a core copies half a
MiB. Doubled, frames of 2 to 4 MiB are copied by one core."""


class Migrator:
    """The two threads of one store, ended by `FrameStore.close`.

    They are daemons, since no byte outlives the process.
    """

    def __init__(self, store: FrameStore, transport: Transport) -> None:
        self._store = store
        self._copier = SlabCopier(transport)
        self._copied: queue.Queue[tuple[Drain | SlabReturn, str] | None]
        self._copied = queue.Queue(maxsize=PIPELINE_DEPTH)
        self._warned: set[int] = set()
        # What each thread has in hand, for its next run if this one crashes.
        self._copying: Migration | None = None
        self._finishing: tuple[Drain | SlabReturn, str] | None = None
        self._untold: tuple[Callable[[PeerSlab], None], PeerSlab] | None = None
        self._threads = [
            SupervisedThread(self._copy_moves, "aqua-migrator"),
            SupervisedThread(self._finish_moves, "aqua-unmapper"),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads after the store has been closed."""
        for thread in self._threads:
            thread.join(timeout_s)

    # --- The copying thread ---------------------------------------------------------------

    def _copy_moves(self) -> None:
        self._call_off()
        while (move := self._store.next_migration()) is not None:
            self._copying = move
            if isinstance(move, SlabReturn):
                self._copied.put((move, ""))
            elif isinstance(move, Promotion):
                self._promote(move)
            elif isinstance(move, WriteBehind):
                self._write_behind(move)
            else:
                self._copied.put(self._drain(move))
            self._copying = None
        self._copied.put(None)
        self._copier.close()

    def _call_off(self) -> None:
        """Give up what a run that crashed was copying: nothing has changed, it is tried again."""
        move, self._copying = self._copying, None
        if move is not None:
            with self._store.answering() as (table, now_s):
                if isinstance(move, SlabReturn):
                    table.kept(move.source, now_s)
                elif isinstance(move, WriteBehind):
                    table.written_behind(move, "the migrator crashed", now_s)
                else:
                    table.abandoned(move, now_s)

    def _promote(self, move: Promotion) -> None:
        failure = self._copier.copy(move.target.memory, move.frame.host, move.ranges)
        if failure:
            logger.warning("%r cannot be filled, bytes stay on the host: %s", move.target, failure)
        with self._store.answering() as (table, now_s):
            move.target.lender.pace.copied(size_of(move.ranges), now_s, is_awaited=False)
            if failure:
                table.abandoned(move, now_s)
            else:
                table.arrived(move)
            self._copying = None

    def _write_behind(self, move: WriteBehind) -> None:
        failure = self._copier.copy(move.frame.host, move.source.memory, move.ranges)
        if failure:
            logger.warning("%r cannot be copied ahead of a reclaim: %s", move.source, failure)
        with self._store.answering() as (table, now_s):
            table.written_behind(move, failure, now_s)
            self._copying = None

    def _drain(self, move: Drain) -> tuple[Drain, str]:
        """The drain as it was carried out, and why its copy is no good, if it is not."""
        source = move.source.memory
        if move.target is not None:
            failure = self._copier.copy(move.target.memory, source, move.ranges)
            if not failure:
                return move, ""
            # Either end may have failed; the host slab will tell which.
            logger.warning("cannot move %r to %r: %s", move.frame, move.target, failure)
            with self._store.answering() as (table, _):
                self._copying = move = table.rerouted(move)
        failure = self._copier.copy(move.frame.host, source, move.ranges)
        if failure:
            logger.error("%r cannot be read, its bytes are lost: %s", move.source, failure)
        return move, failure

    # --- The unmapping thread -------------------------------------------------------------

    def _finish_moves(self) -> None:
        run_promptly()
        self._tell()
        while (copied := self._finishing or self._next_copied()) is not None:
            self._finishing = copied
            self._finish(*copied)

    def _next_copied(self) -> tuple[Drain | SlabReturn, str] | None:
        with resting():
            return self._copied.get()

    def _finish(self, move: Drain | SlabReturn, failure: str) -> None:
        tell = _unmap(move.source)
        with self._store.answering() as (table, now_s):
            if isinstance(move, SlabReturn):
                if tell is None:
                    table.kept(move.source, now_s)
                else:
                    table.returned(move.source)
            elif tell is None:
                table.abandoned(move, now_s)
            elif failure:
                table.lost(move, failure)
            else:
                table.arrived(move)
            self._finishing = None
            self._untold = None if tell is None else (tell, move.source)
        if tell is not None:
            self._tell()
        elif isinstance(move, Drain) and move.frame.number not in self._warned:
            self._warned.add(move.frame.number)
            logger.warning(
                "%r cannot leave %r: a tensor over it has outlived its use; drop every view, numpy "
                "array and memoryview of it, or the producer will act by its policy",
                move.frame,
                move.source,
            )

    def _tell(self) -> None:
        """Tell the owner of the slab that was unmapped last, unless it has been told."""
        if self._untold is not None:
            tell, slab = self._untold
            tell(slab)
            self._untold = None
            self._store.nudge()


def _unmap(slab: PeerSlab) -> Callable[[PeerSlab], None] | None:
    """Unmap; returns how to tell the owner, or None when a view is in the way."""
    try:
        slab.memory.close()
    except BufferError:
        return None
    except TransportError as error:
        logger.error("cannot unmap %r, so it stays locked away: %s", slab, error.message)  # noqa: TRY400 - the traceback would keep tensors alive
        return slab.lender.strand
    return slab.lender.take_back


class SlabCopier:
    """The copiers of one migrator; `copy` is called by one thread.

    One copy stream keeps a GPU's copy engine busy. A CPU core alone reads and writes at about half
    of what its memory gives; so there a frame is cut in two, and another thread copies the other
    half. Halves of one frame rather than two frames at once: the first slab of a reclaim is back in
    half the time.
    """

    def __init__(self, transport: Transport) -> None:
        count = CPU_COPIERS if transport.device.type == "cpu" else DEVICE_COPIERS
        # Frames that move are at rest: gated, every copy fenced and every pin ended.
        make = partial(transport.copier, is_background=True)
        self._copier = RenewableCopier(make)
        self._helpers = [
            (SerialExecutor("aqua-slab-copier"), RenewableCopier(make)) for _ in range(count - 1)
        ]

    def copy(self, dst: MappedSlab, src: MappedSlab, ranges: list[Range]) -> str:
        """Copy byte ranges between two slabs and wait for it; returns what went wrong, or nothing.

        After a failure some bytes may have arrived and some not.
        """
        first, *others = split(ranges, 1 + len(self._helpers), MIN_PART_BYTES)
        beside = [
            thread.submit(_copy, copier, dst, src, part)
            for (thread, copier), part in zip(self._helpers, others, strict=False)
        ]
        try:
            failure = _copy(self._copier, dst, src, first)
        finally:
            wait(beside)  # Nothing may happen to either slab before.
        for other in beside:
            failure = other.result() or failure
        return failure

    def close(self) -> None:
        """End the helpers. Harmless when repeated."""
        for thread, _ in self._helpers:
            thread.shutdown()


def _copy(renewable: RenewableCopier, dst: MappedSlab, src: MappedSlab, ranges: list[Range]) -> str:
    def submit(copier: Copier) -> None:
        for part in ranges:
            copier.copy(dst.tensor[part.start : part.end], src.tensor[part.start : part.end])
        copier.fence()

    return renewable.attempt(submit) if ranges else ""
