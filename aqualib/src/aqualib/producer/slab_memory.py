"""The custodian: closes physical memory that has left the pool and makes what is owed.

Freeing a slab takes the kernel or the driver up to milliseconds, making one longer. On a thread of
its own that delays neither the answers of other consumers nor the engine that asked.

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

    from aqualib.producer.lending_state import RetiredSlab
    from aqualib.transports.base import OwnedSlab

logger: Final = logging.getLogger("aqualib")

MAX_ATTEMPTS: Final = 10
FIRST_PAUSE_S: Final = 0.02
"""Doubles each time: ten attempts span twenty seconds."""


@dataclass(frozen=True, slots=True)
class Estate:
    """What the custodian looks after. Called on its thread, without any lock held.

    Attributes:
        create_memory: Makes one slab; a `TransportError` is retried.
        destroy_memory: Gives one slab's memory back.
        parted: The memory of this slab has been given back.
        owed_count: Slabs that should be made.
        deliver: Takes a slab that was owed; False when it is not wanted any more.
        write_off: Replacements cannot be made; owe none.
    """

    create_memory: Callable[[], OwnedSlab]
    destroy_memory: Callable[[OwnedSlab], None]
    parted: Callable[[RetiredSlab], None]
    owed_count: Callable[[], int]
    deliver: Callable[[OwnedSlab], bool]
    write_off: Callable[[], None]


class Custodian:
    """A background thread that closes and replaces slabs, in order.

    Args:
        estate: Whose memory it is.
    """

    def __init__(self, estate: Estate) -> None:
        self._estate = estate
        # Bounded by the slabs that exist: each is submitted once.
        self._partings: queue.SimpleQueue[RetiredSlab | None] = queue.SimpleQueue()
        self._attempts = 0
        self._retry_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="aqua-slab-memory", daemon=True)
        self._thread.start()

    def submit(self, slab: RetiredSlab) -> None:
        """Close this memory soon; never waits."""
        self._partings.put(slab)

    def close(self) -> None:
        """Finish what was submitted, then stop. Harmless when repeated."""
        self._partings.put(None)
        self._thread.join()

    def _run(self) -> None:
        run_promptly()
        while True:
            try:
                slab = self._partings.get(timeout=self._pause_s())
            except queue.Empty:
                self._replace()
                continue
            if slab is None:
                return
            self._estate.destroy_memory(slab.slab.memory)
            self._estate.parted(slab)
            if self._partings.empty() and self._retry_at_s is None:
                self._replace()

    def _pause_s(self) -> float | None:
        if self._retry_at_s is None:
            return None
        return max(0.0, self._retry_at_s - time.monotonic())

    def _replace(self) -> None:
        """Make what is owed, unless memory waits to be closed: that comes first."""
        self._retry_at_s = None
        while self._estate.owed_count():
            try:
                memory = self._estate.create_memory()
            except TransportError as error:
                self._put_off(error)
                return
            self._attempts = 0
            if not self._estate.deliver(memory):
                self._estate.destroy_memory(memory)
            if not self._partings.empty():
                self._retry_at_s = time.monotonic()
                return

    def _put_off(self, error: TransportError) -> None:
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            pause_s = FIRST_PAUSE_S * 2 ** (self._attempts - 1)
            self._retry_at_s = time.monotonic() + pause_s
            return
        self._attempts = 0
        logger.error("the offer stays smaller: a lost slab cannot be replaced: %s", error)
        self._estate.write_off()
