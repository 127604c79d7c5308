"""The physical memory of slabs: made, counted, freed and replaced.

One place for all of it, so that device memory is accounted for whether the engine's thread grows
the offer or a lost slab is replaced. Freeing a slab takes the kernel or the driver up to
milliseconds, making one longer; slabs that have left the pool are therefore freed, and those owed
made, on a thread of its own, which delays neither other consumers nor the engine that asked.

A replacement may fail at first: after an unclean loss the driver frees a dead importer's mapping in
its own time. So it is retried with growing pauses, a bounded number of times; then the offer stays
smaller and the log says so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from aqua_protocol import TransportError
from aqua_protocol.supervision import SupervisedThread, note_progress, resting
from aqualib.thread_slice import run_promptly

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.producer.device import EmulatedMemory
    from aqualib.producer.lending_state import LendingState, RetiredSlab
    from aqualib.transports.base import OwnedSlab, Transport

logger: Final = logging.getLogger("aqualib")

MAX_ATTEMPTS: Final = 10
"""Attempts to replace a slab; drivers free a dead process's memory within seconds. One more
doubles the time until the offer is known to stay smaller."""

FIRST_PAUSE_S: Final = 0.02
"""Seconds before the second attempt, twice as many before each further one: ten span ten seconds.
Doubled, they span twenty."""


class SlabMemory:
    """Slabs of one size on one device; every method may be called from any thread.

    Args:
        device: What they are taken from; None does not account.
    """

    def __init__(
        self, transport: Transport, slab_bytes: int, device: EmulatedMemory | None
    ) -> None:
        self._transport = transport
        self._slab_bytes = slab_bytes
        self._device = device
        self._slabs: set[OwnedSlab] = set()
        # Bounded by the slabs that exist: each is retired once.
        self._retired: queue.SimpleQueue[RetiredSlab | None] = queue.SimpleQueue()
        self._attempts = 0
        self._retry_at_s: float | None = None
        self._thread = SupervisedThread(self._run, "aqua-slab-memory")

    @property
    def physical_count(self) -> int:
        """Slabs made and not freed."""
        return len(self._slabs)

    def create(self) -> OwnedSlab:
        """Make one zeroed slab.

        Raises:
            TransportError: Device memory ran out.
        """
        if self._device is not None:
            self._device.take(self._slab_bytes)
        try:
            memory = self._transport.create(self._slab_bytes)
        except BaseException:
            if self._device is not None:
                self._device.give_back(self._slab_bytes)
            raise
        self._slabs.add(memory)
        return memory

    def make_anew(self, memory: OwnedSlab) -> OwnedSlab:
        """Give one slab's memory back and make it anew, under the same account.

        Raises:
            TransportError: There is no memory for it. What was given counts until it is destroyed.
        """
        memory.close()
        fresh = self._transport.create(self._slab_bytes)
        self._slabs ^= {memory, fresh}
        return fresh

    def destroy(self, memory: OwnedSlab) -> None:
        """Give one slab back; its memory may be closed already. Harmless when repeated."""
        memory.close()
        if memory in self._slabs:
            self._slabs.discard(memory)
            if self._device is not None:
                self._device.give_back(self._slab_bytes)

    # --- The thread -----------------------------------------------------------------------

    def start(
        self,
        lending: LendingState,
        lock: threading.Lock,
        made: Callable[[], None],
        returned: Callable[[], None],
    ) -> None:
        """Begin to free what is retired and to make what is owed.

        Args:
            lending: Says what is owed, takes what was made, and counts what is freed.
            lock: Guards `lending`; never held while memory is made or freed.
            made: Called without the lock after a replacement was made.
            returned: Called without the lock after memory was freed for a reclaim.
        """
        self._lending, self._lending_lock = lending, lock
        self._made, self._returned = made, returned
        self._thread.start()

    def retire(self, slab: RetiredSlab) -> None:
        """Free this slab's memory soon; never waits."""
        self._retired.put(slab)

    def close(self) -> None:
        """Free what was retired, then stop. Harmless when repeated."""
        self._retired.put(None)
        self._thread.join()

    def _run(self) -> None:
        run_promptly()
        self._look_at_what_is_owed()  # A run that crashed may have been making it.
        while True:
            try:
                pause_s = self._pause_s()
                with resting():
                    retired = self._retired.get(timeout=pause_s)
            except queue.Empty:
                self._replace()
                continue
            if retired is None:
                if self._retired.empty():
                    return
                self._retired.put(None)  # What could not be freed before stands behind the end.
                continue
            try:
                self.destroy(retired.slab.memory)
                if retired.reclaim is not None:
                    with self._lending_lock:
                        self._lending.slab_closed(retired.reclaim, time.monotonic())
            except BaseException:
                self._retired.put(retired)  # To be tried again, after all others.
                raise
            if retired.reclaim is not None:
                self._returned()
            if self._retired.empty() and self._retry_at_s is None:
                self._replace()

    def _pause_s(self) -> float | None:
        if self._retry_at_s is None:
            return None
        return max(0.0, self._retry_at_s - time.monotonic())

    def _replace(self) -> None:
        """Make what is owed, unless memory waits to be freed: that comes first."""
        self._retry_at_s = None
        while self._lending.owed_count:
            note_progress()
            try:
                memory = self.create()
            except TransportError as error:
                self._put_off(error)
                return
            self._attempts = 0
            is_delivered = False
            try:
                with self._lending_lock:
                    is_delivered = self._lending.deliver(memory)
            finally:
                if not is_delivered:
                    self.destroy(memory)
            self._made()
            if not self._retired.empty():
                self._look_at_what_is_owed()
                return

    def _look_at_what_is_owed(self) -> None:
        """As soon as no memory waits to be freed."""
        self._retry_at_s = time.monotonic()

    def _put_off(self, error: TransportError) -> None:
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            pause_s = FIRST_PAUSE_S * 2 ** (self._attempts - 1)
            self._retry_at_s = time.monotonic() + pause_s
            return
        self._attempts = 0
        logger.error("the offer stays smaller: a lost slab cannot be replaced: %s", error)
        with self._lending_lock:
            self._lending.owed_count = 0
