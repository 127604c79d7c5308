"""Transfers between an engine and frames: what tensors and block stores share, one for each Aqua.

Holds the store, a copy stream for each engine thread, the counters, and work that finalizers left
behind. A finalizer may run at any moment, on any thread, in the middle of our own code; so all it
does is to put its work into a queue that needs no lock, and a later call does it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, TransportError
from aqualib.memory.copy_stream import CopyStream

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame_store import FrameStore
    from aqualib.metrics import ConsumerMetrics, Direction
    from aqualib.transports.base import Transport

MAX_LEFTOVERS_PER_SWEEP: Final = 1024
"""Finalizers whose work one sweep does; the rest waits for the next. Bounds what a call does for
others to about a millisecond; doubled, to two."""


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
        if stream.is_synchronous:
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


class Transfers:
    """The transfers of one consumer.

    Args:
        is_checking: Whether stored bytes are summed and what comes back is compared.
    """

    def __init__(
        self,
        store: FrameStore,
        transport: Transport,
        metrics: ConsumerMetrics,
        *,
        is_checking: bool,
    ) -> None:
        self.store: Final = store
        self.is_checking: Final = is_checking
        self.metrics: Final = metrics
        self._transport = transport
        self._is_synchronous = transport.device.type == "cpu"
        self._threads = threading.local()
        self._leftovers: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()

    @property
    def device(self) -> torch.device:
        """Where this process's tensors over slabs are."""
        return self._transport.device

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

        def finish(failure: str) -> None:
            try:
                if failure:
                    raise TransportError(failure)
                if check is not None:
                    check()
            except AquaError as error:
                self.metrics.note_failure(error)
                raise
            self.metrics.note_transfer(direction, nbytes, time.perf_counter() - started_s)

        stream.begin()
        try:
            copy(stream)
        except BaseException as error:
            stream.settle()  # Its batch remembers a failure; other transfers may be in it.
            if isinstance(error, RuntimeError):  # Torch reports a device by it.
                error = TransportError(f"a copy failed: {error}")
            if isinstance(error, AquaError):
                self.metrics.note_failure(error)
            raise error  # noqa: TRY201 - it may be another
        return Transfer(stream, finish)

    def leave(self, work: Callable[[], bool]) -> None:
        """Have `work` done soon; it says whether it is done. For finalizers: takes no lock."""
        self._leftovers.put(work)

    def sweep(self) -> None:
        """Do what finalizers left behind."""
        for _ in range(min(self._leftovers.qsize(), MAX_LEFTOVERS_PER_SWEEP)):
            try:
                work = self._leftovers.get_nowait()
            except queue.Empty:
                return
            if not work():
                self._leftovers.put(work)

    def _stream(self) -> CopyStream:
        stream: CopyStream | None = getattr(self._threads, "stream", None)
        if stream is None:
            stream = self._threads.stream = CopyStream(
                self.store, self._transport.copier, is_synchronous=self._is_synchronous
            )
        return stream
