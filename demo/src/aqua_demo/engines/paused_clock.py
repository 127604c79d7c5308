"""A clock that stands still while its process is stopped; for engines that take turns.

An engine that runs as a server has threads and processes of its own, so taking turns means stopping
all of them (`TurnGroup`). Real clocks go on meanwhile. How long a group has been stopped is in a
small file that its processes map, and `install` has `time` say so much less: a step that was
interrupted took no longer, and no request waited for it.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

SECONDS: Final = struct.Struct("=d")
LOOK_S: Final = 0.0005
"""Between looks whether a group has stopped. Doubled, turns are that much further apart."""
END_S: Final = 60.0
"""For a group to end by itself, an engine with what it waits for. Doubled, one that hangs ends a
minute later."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of a group's environment: left to itself each vLLM binds its thread to a core of its choice, and
the engine that shares it with whatever else the machine does is the slower one."""


def install(path: Path) -> None:
    """Have the clocks of `time` stand still, from now on, while this process is stopped."""
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), SECONDS.size, access=mmap.ACCESS_READ)

    def corrected(clock: Callable[[], float]) -> Callable[[], float]:
        def now() -> float:
            while True:
                (before,) = SECONDS.unpack_from(view)
                read = clock()
                # Else it was stopped in between.
                if SECONDS.unpack_from(view) == (before,):
                    return read - float(before)

        return now

    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, corrected(getattr(time, name)))


class TurnGroup:
    """A process and all that it starts, stopped and continued together.

    Args:
        command: Starts the leader; of its pipes input and output are open, as text.
        clock: The file for `install`; it is made.
        log: Where its errors go.
    """

    def __init__(self, command: list[str], clock: Path, log: Path) -> None:
        clock.write_bytes(SECONDS.pack(0.0))
        with log.open("w") as errors:
            self.leader = subprocess.Popen(  # noqa: S603 - our own programs, without a shell
                command,
                env=os.environ | ONE_THREAD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Linux shares processors among sessions first: so it is no other's, and each alike.
                start_new_session=True,
            )
        with clock.open("r+b") as file:
            self._view = mmap.mmap(file.fileno(), SECONDS.size)
        self._stopped_s = 0.0
        self._stopped_at_s: float | None = None
        self._members: list[Path] = []

    def pause(self) -> None:
        """Stop it; returns once all its processes stand still.

        What it starts after the first pause is stopped, too, but not waited for.
        """
        os.killpg(self.leader.pid, signal.SIGSTOP)
        while not self._is_still():
            time.sleep(LOOK_S)
        # Not before: its clocks would go back by how long it ran on.
        self._stopped_at_s = time.monotonic()

    def give_core(self, name: str) -> None:
        """Give a core to the main threads of processes whose name begins so; it is paused.

        The last core is theirs, all other threads share the others. Else what these do takes the
        core away amid a step, in one engine more often than in another for as long as they live.
        """
        *others, own = sorted(os.sched_getaffinity(0))
        if not others:
            return
        for process in self._members:
            with suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
                is_named = (process / "comm").read_text().startswith(name)
                for thread in (process / "task").iterdir():
                    is_own = is_named and thread.name == process.name
                    os.sched_setaffinity(int(thread.name), {own} if is_own else others)

    def resume(self) -> None:
        """Continue it, if it is stopped; by its clocks no time has passed."""
        if self._stopped_at_s is None:
            return
        self._stopped_s += time.monotonic() - self._stopped_at_s
        self._stopped_at_s = None
        SECONDS.pack_into(self._view, 0, self._stopped_s)
        os.killpg(self.leader.pid, signal.SIGCONT)

    def end(self, patience_s: float = END_S) -> None:
        """Let it come to its end, then kill what is left of it; harmless when repeated."""
        assert self.leader.stdin is not None
        self.leader.stdin.close()
        self.resume()
        with suppress(subprocess.TimeoutExpired):
            self.leader.wait(patience_s)
        with suppress(ProcessLookupError):  # The usual case: nothing is left.
            os.killpg(self.leader.pid, signal.SIGKILL)
        self.leader.wait()

    def _is_still(self) -> bool:
        """Whether none of its processes runs; a whole look at a machine takes as long as a step.

        So it is taken once, when all have been started, and again when one of them has ended.
        """
        group = self.leader.pid
        states = [_state(each, group) for each in self._members]
        if not states or None in states:
            everyone = Path("/proc").glob("[0-9]*")
            self._members = [each for each in everyone if _state(each, group) is not None]
            states = [_state(each, group) for each in self._members]
        return all(state in {None, "T", "Z"} for state in states)


def _state(process: Path, group: int) -> str | None:
    """State of a process of this group, by its folder; None if it has ended or is another's."""
    try:
        state, _, found = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state if int(found) == group else None
