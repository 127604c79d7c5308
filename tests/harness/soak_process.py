"""What a process of a soak has beside its work: a tally, a thread for the work, leaks, an end.

A tally is a file that outlives a SIGKILL, so that what a victim held is known. Each process has a
session of its own, which Ctrl-C does not reach, and ends with the fork server, so that nothing is
left running whatever happens to the soak.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from aqua_protocol import UnavailableError
from harness.bounds import HANG_S
from harness.cluster import serve_member
from harness.doom import Ledger

RESTART_S: Final = 0.2
"""Until a coordinator that found no store is started again."""
PR_SET_PDEATHSIG: Final = 1
"""Fixed by the kernel."""
M_MMAP_THRESHOLD: Final = -3
"""Fixed by glibc."""
M_ARENA_MAX: Final = -8
"""Fixed by glibc."""

COUNTS: Final = (
    *("steps", "refused"),
    *("stored", "verified", "wrong", "lost", "missing"),
    *("promoted", "drained", "held"),
)
"""Of a tally: steps of work, and those that were refused; bytes that were stored, and compared, and
of those wrong ones, those that the store said it lost, and those that it should have and denies;
that went to producers and came back, as far as the consumer lived to the rest; that are held."""


class Tally:
    """Counts in a file, which are there as soon as they are made and outlive their process."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def add(self, name: str, number: int) -> None:
        """Count so many more, or less."""
        at = 8 * COUNTS.index(name)
        (before,) = struct.unpack_from("q", self._memory, at)
        struct.pack_into("q", self._memory, at, before + number)

    def read(self) -> dict[str, int]:
        """All counts."""
        return dict(zip(COUNTS, struct.unpack_from(f"{len(COUNTS)}q", self._memory), strict=True))

    def clear(self) -> None:
        """Begin anew, but for what is held."""
        held = self.read()["held"]
        self._memory[: 8 * len(COUNTS)] = bytes(8 * len(COUNTS))
        self.add("held", held)


_libc = ctypes.CDLL(None)


def isolate() -> None:
    """Begin a session, and end with the parent, SIGSTOPped or not.

    The fork server ends when nobody holds a pipe of its any more, of which each of its children has
    an end.
    """
    os.setsid()
    held = vars(vars(forkserver)["_forkserver"])  # Of the standard library; it has no other name.
    if (alive_fd := held["_forkserver_alive_fd"]) is not None:
        os.close(alive_fd)
        held["_forkserver_alive_fd"] = None
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def keep_nothing() -> None:
    """Have the allocator give back what tensors had, so that memory is what is in use.

    Else it keeps some tens of MiB in pieces, more or less by chance.
    """
    _libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    _libc.mallopt(M_ARENA_MAX, 1)


def tidy() -> None:
    """Drop garbage, and give what the allocator keeps of it back."""
    gc.collect()
    _libc.malloc_trim(0)


class Worker:
    """Work on a thread of its own until told to rest; what it may not meet ends it.

    Args:
        step: Takes one step, and says how long to wait until the next.
    """

    def __init__(self, step: Callable[[], float], tally: Tally) -> None:
        self._step = step
        self._tally = tally
        self._rests = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Work."""
        self._rests.clear()
        self._tally.clear()
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Rest; raises what ended the work."""
        self._rests.set()
        if self._thread is not None:
            self._thread.join(HANG_S)
            assert not self._thread.is_alive(), "the work hangs"
            self._thread = None
        if self._error is not None:
            raise RuntimeError(f"the work ended by {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            while not self._rests.wait(self._step()):
                self._tally.add("steps", 1)
        except Exception as error:  # noqa: BLE001 - told at rest
            self._error = error


class Leaks:
    """What a control plants: one thing more in each period, which nothing gives back."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def leak(self, kind: str) -> None:
        """Leak one of a kind: `fd`, `thread`, `slab` or `mib`."""
        if kind == "fd":
            self._kept.append(Path(os.devnull).open("rb"))  # noqa: SIM115 - it is a leak
        elif kind == "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif kind == "slab":
            self._kept.append(os.memfd_create("aqua-slab"))
        else:
            self._kept.append(bytearray(os.urandom(1 << 20)))


def run_coordinator(
    _: str, pipe: Connection, __: Ledger, *, log: Path, settings: dict[str, Any]
) -> None:
    """A coordinator of its own; the pipe obeys what a control plants."""
    isolate()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for number in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(fd, number)
    os.close(fd)
    from aqua_cli.service import configure_logs
    from aqua_coordinator.server import serve
    from aqua_coordinator.settings import CoordinatorSettings

    configure_logs("info")
    listener = threading.Thread(target=serve_member, args=(pipe, Leaks()), daemon=True)
    listener.start()
    while True:
        try:
            serve(CoordinatorSettings(**settings))
        except UnavailableError:  # Of a store that is away: a supervisor starts it again.
            time.sleep(RESTART_S)
        else:
            return
