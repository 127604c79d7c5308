"""Transfers between engines and frames: what tensors and block stores share.

Holds the store, a stream for each engine thread, the counters, and work that finalizers left.
A finalizer may run at any moment, on any thread, in the middle of our own code; so all it does is
to put its work into a queue that needs no lock, and whoever comes by later does it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, TransportError
from aqualib.memory.copy_stream import CopyStream, Transfer

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame_store import FrameStore
    from aqualib.metrics import ConsumerMetrics, Direction
    from aqualib.transports.base import Transport

MAX_LEFTOVERS_PER_SWEEP: Final = 1024
"""Bounds what one sweep does for others; the rest waits for the next."""


class Transfers:
    """Parts shared by everything that pages.

    Args:
        store: The frames.
        transport: Makes streams.
        metrics: Counts transfers.
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

    def stream(self) -> CopyStream:
        """The calling thread's stream."""
        stream: CopyStream | None = getattr(self._threads, "stream", None)
        if stream is None:
            stream = CopyStream(
                self.store, self._transport.copier, is_synchronous=self._is_synchronous
            )
            self._threads.stream = stream
        return stream

    def transfer(
        self,
        direction: Direction,
        nbytes: int,
        copy: Callable[[CopyStream], None],
        check: Callable[[], None] | None = None,
    ) -> Transfer:
        """Run `copy` on the calling thread's stream.

        Args:
            direction: For the counters.
            nbytes: For the counters.
            copy: Submits the copies.
            check: Called when all have arrived; raises if they are not what they should be.

        Raises:
            AquaError: What `copy` raised; its pins are released, and some bytes may have arrived.
            TransportError: The device failed.
        """
        stream = self.stream()
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
            with suppress(TransportError):  # Its batch remembers; other transfers may be in it.
                stream.settle()
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
