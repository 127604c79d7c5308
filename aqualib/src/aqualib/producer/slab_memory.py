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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqua_protocol import TransportError
from aqualib.thread_slice import run_promptly

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.producer.device import EmulatedMemory
    from aqualib.producer.lending_state import RetiredSlab
    from aqualib.transports.base import OwnedSlab, Transport

logger: Final = logging.getLogger("aqualib")

MAX_ATTEMPTS: Final = 10
"""Attempts to replace a slab; drivers free a dead process's memory within seconds. One more
doubles the time until the offer is known to stay smaller."""

FIRST_PAUSE_S: Final = 0.02
"""Seconds before the second attempt, twice as many before each further one: ten span ten seconds.
Doubled, they span twenty."""


@dataclass(frozen=True, slots=True)
class SlabOwner:
    """What the thread asks and tells the producer, without any lock held.

    Attributes:
        freed: The memory of this slab has been given back.
        owed_count: Slabs that should be made.
        deliver: Takes a slab that was owed; False when it is not wanted any more.
        write_off: Replacements cannot be made; owe none.
    """

    freed: Callable[[RetiredSlab], None]
    owed_count: Callable[[], int]
    deliver: Callable[[OwnedSlab], bool]
    write_off: Callable[[], None]


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
        self._count = 0
        self._lock = threading.Lock()
        self._owner: SlabOwner | None = None
        # Bounded by the slabs that exist: each is retired once.
        self._retired: queue.SimpleQueue[RetiredSlab | None] = queue.SimpleQueue()
        self._attempts = 0
        self._retry_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="aqua-slab-memory", daemon=True)

    @property
    def physical_count(self) -> int:
        """Slabs made and not freed."""
        return self._count

    def create(self) -> OwnedSlab:
        """Make one zeroed slab.

        Raises:
            TransportError: Device memory ran out.
        """
        if self._device is not None:
            self._device.take(self._slab_bytes)
        try:
            memory = self._transport.create(self._slab_bytes)
        except TransportError:
            if self._device is not None:
                self._device.give_back(self._slab_bytes)
            raise
        with self._lock:
            self._count += 1
        return memory

    def destroy(self, memory: OwnedSlab) -> None:
        """Give one slab back."""
        memory.close()
        with self._lock:
            self._count -= 1
        if self._device is not None:
            self._device.give_back(self._slab_bytes)

    # --- The thread -----------------------------------------------------------------------

    def start(self, owner: SlabOwner) -> None:
        """Begin to free what is retired and to make what is owed."""
        self._owner = owner
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
        assert self._owner is not None, "started with an owner"
        while True:
            try:
                retired = self._retired.get(timeout=self._pause_s())
            except queue.Empty:
                self._replace(self._owner)
                continue
            if retired is None:
                return
            self.destroy(retired.slab.memory)
            self._owner.freed(retired)
            if self._retired.empty() and self._retry_at_s is None:
                self._replace(self._owner)

    def _pause_s(self) -> float | None:
        if self._retry_at_s is None:
            return None
        return max(0.0, self._retry_at_s - time.monotonic())

    def _replace(self, owner: SlabOwner) -> None:
        """Make what is owed, unless memory waits to be freed: that comes first."""
        self._retry_at_s = None
        while owner.owed_count():
            try:
                memory = self.create()
            except TransportError as error:
                self._put_off(error, owner)
                return
            self._attempts = 0
            if not owner.deliver(memory):
                self.destroy(memory)
            if not self._retired.empty():
                self._retry_at_s = time.monotonic()
                return

    def _put_off(self, error: TransportError, owner: SlabOwner) -> None:
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            pause_s = FIRST_PAUSE_S * 2 ** (self._attempts - 1)
            self._retry_at_s = time.monotonic() + pause_s
            return
        self._attempts = 0
        logger.error("the offer stays smaller: a lost slab cannot be replaced: %s", error)
        owner.write_off()
