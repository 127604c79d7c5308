"""Transfers between an engine and frames: what tensors and block stores share, one for each Aqua.

A `CopyStream` is the copies of one engine thread, and the pins that they need: every copy between
an engine's tensors and frames goes through one. It pins a frame, submits copies and unpins once
they are fenced: on a CPU at the end of the call, on a GPU when the transfer is waited for. Copies
in flight are therefore pins like any other, and no frame moves under them. A stream never waits for
a frame while it holds another: where a gate is closed, it first fences its own copies and lets go.
So transfers of any size and order, in any number of threads, cannot lock each other or the migrator
out.

`Transfers` holds the store, a stream for each engine thread, and the counters. When a thread ends,
its copies are fenced and its pins ended for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, TransportError
from aqualib.memory.frame import Lender
from aqualib.metrics import Direction

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame import Frame
    from aqualib.memory.frame_store import FrameStore
    from aqualib.metrics import ConsumerMetrics
    from aqualib.ranges import Range
    from aqualib.traced_leases import PageOutTrace
    from aqualib.transports.base import Copier, MappedSlab, Transport


class RenewableCopier:
    """One thread's copier: made when first needed, and anew after one has failed.

    What a failed copier has submitted nevertheless is waited for, since either side may be unmapped
    next; then it goes, with the tensors that it keeps.
    Failures are told as text: an exception keeps the calls that it came through alive, and with
    them tensors that would be in the way of unmapping.

    Args:
        make: Makes a copier for the calling thread.
    """

    def __init__(self, make: Callable[[], Copier]) -> None:
        self._make = make
        self._copier: Copier | None = None

    @property
    def copier(self) -> Copier:
        """The present copier.

        Raises:
            TransportError: It cannot be made.
        """
        if self._copier is None:
            self._copier = self._make()
        return self._copier

    def attempt(self, work: Callable[[Copier], None]) -> str:
        """Do `work` with the copier; returns what went wrong, or nothing."""
        try:
            work(self.copier)
        except (TransportError, RuntimeError) as error:  # The latter is how torch reports a device.
            failed, self._copier = self._copier, None
            with suppress(TransportError, RuntimeError):  # A lost device runs nothing any more.
                if failed is not None:
                    failed.fence()
            return str(error)
        return ""


@dataclass(slots=True)
class CopyBatch:
    """Copies that one fence covers, and why they did not arrive, if they did not."""

    is_fenced: bool = False
    failure: str = ""


class CopyStream(RenewableCopier):
    """One thread's copies; used by that thread alone.

    What copies raises `DataLostError` where the frame cannot be read any more, and `TransportError`
    where copies that had to be waited for did not arrive.

    Args:
        store: Whose frames.
        make_copier: Makes a copier for this thread.

    Attributes:
        batch: Receives the copies that are submitted now.
    """

    def __init__(self, store: FrameStore, make_copier: Callable[[], Copier]) -> None:
        super().__init__(make_copier)
        self.batch = CopyBatch()
        self._store = store
        self._pins: list[Frame] = []
        self._is_orphaned = False

    def begin(self) -> None:
        """Start a transfer; first ends those that were dropped without a wait.

        Raises:
            TransportError: One of those did not arrive.
        """
        if self._is_orphaned:
            self._require_settled()

    def write(self, frame: Frame, part: Range, src: torch.Tensor, at: int) -> None:
        """Copy bytes of `src`, which is contiguous, from byte `at` on into a part of the frame."""
        slab = self._pin(frame, part, part.size).tensor
        self.copier.copy_bytes(slab, part.start, src, at, part.size)

    def read(self, frame: Frame, part: Range, dst: torch.Tensor, at: int) -> None:
        """Copy a part of the frame into `dst`, which is contiguous, from byte `at` on."""
        slab = self._pin(frame, None, part.size).tensor
        self.copier.copy_bytes(dst, at, slab, part.start, part.size)

    def view(self, frame: Frame, part: Range, *, writes: bool) -> torch.Tensor:
        """A part of the frame for one copy, pinned until the next fence; shape (part.size,), uint8.

        The tensor must not live when the stream pins its next frame.
        """
        slab = self._pin(frame, part if writes else None, part.size).tensor
        return slab[part.start : part.end]

    def settle(self) -> str:
        """Wait for every copy submitted so far and unpin; returns why they did not arrive, if so.

        Each transfer in the batch hears of a failure as well.
        """
        self._is_orphaned = True  # Until the fence has returned: what cuts it short keeps the pins.
        failure = self.attempt(lambda copier: copier.fence()) if self._pins else ""
        batch, self.batch = self.batch, CopyBatch()
        batch.failure = failure and f"copies did not arrive: {failure}"
        batch.is_fenced = True
        while self._pins:
            self._store.unpin(self._pins.pop())
        self._is_orphaned = False
        return batch.failure

    def lenders(self) -> list[Lender]:
        """Leases under the frames that are pinned."""
        slabs = [frame.peer for frame in self._pins if frame.is_on_peer]
        return [slab.lender for slab in slabs if slab is not None]

    def abandon(self) -> None:
        """The thread has ended: the migrator settles; does nothing that a finalizer may not."""
        if self._pins:
            self._store.leave(lambda: self.settle() is not None)

    def orphan(self) -> None:
        """A transfer was dropped without a wait; does nothing that a finalizer may not."""
        self._is_orphaned = True

    def _pin(self, frame: Frame, written: Range | None, nbytes: int) -> MappedSlab:
        memory = self._store.try_pin(frame, written)
        if memory is None:
            self._require_settled()
            memory = self._store.pin(frame, written)
        self._pins.append(frame)
        # Where a pin is held, the slab stays.
        if frame.peer is not None and frame.peer.lender.pace.bytes_per_s is not None:
            frame.peer.lender.pace.copied(nbytes, time.monotonic(), is_awaited=True)
        return memory

    def _require_settled(self) -> None:
        if failure := self.settle():
            raise TransportError(failure)


class Transfer:
    """Bytes on their way between an engine's tensor and the store.

    Wait for it on the thread that started it, before touching either side. One that is dropped
    without a wait ends with the next transfer of its thread, and keeps its frames in place until
    then.

    Args:
        stream: The copy stream of the thread, whose present batch has the last of the copies.
        finish: Called once, after the fence, with the reason if the copies did not arrive: checks
            and counts them, and raises what the waiter shall see.
    """

    __slots__ = ("_batch", "_error", "_finish", "_stream")

    def __init__(self, stream: CopyStream, finish: Callable[[str], None]) -> None:
        self._stream = stream
        self._batch = stream.batch
        self._finish: Callable[[str], None] | None = finish
        self._error: AquaError | None = None
        if stream.copier.is_synchronous:
            self.wait()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._batch.is_fenced

    def wait(self) -> None:
        """Wait until every byte has arrived. Repeating it repeats its outcome.

        Raises:
            TransportError: A copy failed. The target's contents are undefined: free slots that were
                paged out to, and page in again or recompute.
            ChecksumMismatchError: What arrived is not what was stored; do not use it.
        """
        if self._error is not None:
            raise self._error
        if not self._batch.is_fenced:
            self._stream.settle()  # `finish` hears of a failure by the batch.
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                finish(self._batch.failure)
            except AquaError as error:
                # Without the traceback, whose frames would keep tensors alive.
                self._error = error.with_traceback(None)
                raise

    def __del__(self) -> None:
        if self._finish is not None:
            self._stream.orphan()

    def __repr__(self) -> str:
        state = self._batch.failure or ("done" if self.is_done else "under way")
        return f"<Transfer, {state}>"


class _ThreadEnd:
    """Lives as long as a thread, and then abandons its stream, which a transfer may keep."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream

    def __del__(self) -> None:
        self.stream.abandon()


class Transfers:
    """The transfers of one consumer.

    Args:
        is_checking: Whether stored bytes are summed and what comes back is compared.
        page_outs: Draws them; None where tracing is off.
    """

    def __init__(
        self,
        store: FrameStore,
        transport: Transport,
        metrics: ConsumerMetrics,
        *,
        is_checking: bool,
        page_outs: PageOutTrace | None = None,
    ) -> None:
        self.store: Final = store
        self.is_checking: Final = is_checking
        self.metrics: Final = metrics
        self.synchronize: Final = transport.synchronize
        self._transport = transport
        self._page_outs = page_outs
        self._threads = threading.local()

    @property
    def device(self) -> torch.device:
        """Where this process's tensors over slabs are."""
        return self._transport.device

    def spread(self, nbytes: int) -> int:
        """Over how many lenders a transfer of this size is worth being spread."""
        return self._transport.lanes(nbytes)

    def start(
        self,
        direction: Direction,
        nbytes: int,
        copy: Callable[[CopyStream], None],
        check: Callable[[], None] | None = None,
    ) -> Transfer:
        """Start a transfer on the calling thread's copy stream; counted by direction and size.

        Args:
            copy: Submits the copies.
            check: Called when all have arrived; raises if they are not what they should be.

        Raises:
            AquaError: What `copy` raised; its pins are released, and some bytes may have arrived.
            TransportError: The device failed.
        """
        stream = self._stream()
        started_s = time.perf_counter()
        page_outs, lenders = self._page_outs, list[Lender]()
        is_drawn = page_outs is not None and direction is Direction.OUT and page_outs.note(nbytes)

        def finish(failure: str) -> None:
            try:
                if failure:
                    raise TransportError(failure)
                if check is not None:
                    check()
            except AquaError as error:
                self.metrics.note_failure(error)
                raise
            seconds = time.perf_counter() - started_s
            self.metrics.note_transfer(direction, nbytes, seconds)
            if is_drawn and page_outs is not None:
                page_outs.draw(nbytes, seconds, lenders)

        stream.begin()
        try:
            copy(stream)
            if is_drawn:
                lenders += stream.lenders()
        except BaseException as error:
            stream.settle()  # Its batch remembers a failure; other transfers may be in it.
            if isinstance(error, RuntimeError):  # Torch reports a device by it.
                error = TransportError(f"a copy failed: {error}")
            if isinstance(error, AquaError):
                self.metrics.note_failure(error)
            raise error  # noqa: TRY201 - it may be another
        return Transfer(stream, finish)

    def _stream(self) -> CopyStream:
        own: _ThreadEnd | None = getattr(self._threads, "own", None)
        if own is None:
            own = self._threads.own = _ThreadEnd(CopyStream(self.store, self._transport.copier))
        return own.stream
