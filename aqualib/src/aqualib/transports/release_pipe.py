"""A release pipe: how an exporter learns, from the kernel alone, that importers have let go.

Legacy CUDA IPC counts no references: memory freed while another process has it mapped is undefined
behaviour. So each handle carries the writing end of a pipe that is never written to. An importer
keeps it open as long as its mapping, and the kernel closes it when the importer dies; the exporter
sees the end of file either way.

`free_when_released` frees memory whose importers have not let go yet, later and from a background
thread that exists only while there is such memory.

What the end of file does not prove: that a killed importer's kernels have left the GPU. A caller
that reuses memory after a death waits for the pidfd first, as a producer does anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aqua_protocol import TransportError
from aqua_protocol.supervision import SupervisedThread, resting

logger: Final = logging.getLogger("aqualib")


@dataclass(slots=True)
class ReleasePipes:
    """The reading ends of one slab's pipes; one per handle that was made."""

    _ends: list[int] = field(default_factory=list)

    def add(self) -> int:
        """Tie one more importer; the writing end, owned by the caller.

        Raises:
            TransportError: Descriptors ran out.
        """
        self.drop_released()
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"cannot export a slab: {error.strerror}",
                remedy="Raise the limit of open files: a lender holds one per importer.",
            ) from error
        self._ends.append(ours)
        return theirs

    def drop_released(self) -> None:
        """Forget importers that have let go."""
        poll = select.poll()
        for end in self._ends:
            poll.register(end, 0)  # An end of file is reported unasked.
        for end, _ in poll.poll(0):
            self._ends.remove(end)
            os.close(end)

    @property
    def ends(self) -> list[int]:
        """Descriptors that hang up when an importer lets go."""
        return list(self._ends)

    def __len__(self) -> int:
        """Importers that have not let go, as of the last `drop_released`."""
        return len(self._ends)


class DeferredFree:
    """Frees memory once its last importer has let go."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ReleasePipes, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._thread: SupervisedThread | None = None
        self._wakeup = -1

    def free_when_released(self, pipes: ReleasePipes, free: Callable[[], None]) -> None:
        """Call `free` when the last importer has let go: now, or later on another thread."""
        pipes.drop_released()
        if not pipes:
            free()
            return
        with self._lock:
            self._waiting.append((pipes, free))
            if self._thread is None:
                self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = SupervisedThread(self._run, "aqua-cuda-ipc-free")
                self._thread.start()
            else:
                os.eventfd_write(self._wakeup, 1)

    @property
    def waiting_count(self) -> int:
        """Slabs whose memory is not free yet."""
        with self._lock:
            return len(self._waiting)

    def _run(self) -> None:
        while True:
            with self._lock:
                poll = select.poll()
                poll.register(self._wakeup, select.POLLIN)
                for pipes, _ in self._waiting:
                    for end in pipes.ends:
                        poll.register(end, 0)
                # What a run that crashed could not free is free to be freed now.
                is_ready = any(not pipes for pipes, _ in self._waiting)
            with resting():
                poll.poll(0 if is_ready else None)
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                for pipes, _ in self._waiting:
                    pipes.drop_released()
                # Memory that waits is counted until it is free. What cannot be freed goes to the
                # end: it is tried again, and keeps no other waiting.
                ready = [entry for entry in self._waiting if not entry[0]]
                self._waiting = [entry for entry in self._waiting if entry[0]] + ready
            for entry in ready:
                try:
                    entry[1]()
                except TransportError:
                    # Memory of a broken CUDA context; others may wait for memory of a whole one.
                    logger.exception("a slab's memory could not be freed")
                with self._lock:
                    self._waiting.remove(entry)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    os.close(self._wakeup)
                    return


DEFERRED_FREE: Final = DeferredFree()
"""The process's only one: memory outlives the transport that made it."""
