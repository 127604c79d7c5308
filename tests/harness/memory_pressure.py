"""Memory that runs short for chosen processes: by a cgroup where one can be made, else by a limit.

- A cgroup of version 1 gets a limit just above what its processes take, and no OOM killer: a page
  more, and its taker waits until the pressure ends (in the middle of whatever it was doing).
- A cgroup of version 2 gets `memory.high`, which throttles takers.
- Without either, RLIMIT_AS of each process: mappings are refused, with ENOMEM.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

MOUNT: Final = Path("/sys/fs/cgroup")
ROOM_BYTES: Final = 1 << 20
"""That processes under pressure may still take."""


class MemoryPressure:
    """What presses, and how; a context manager that removes its cgroup.

    Attributes:
        means: "cgroup v1 limit", "cgroup v2 memory.high" or "RLIMIT_AS".
    """

    def __init__(self) -> None:
        self.means = "RLIMIT_AS"
        self._group: Path | None = None
        self._number = 0
        for means, parent in (
            ("cgroup v1 limit", MOUNT / "memory"),
            ("cgroup v2 memory.high", MOUNT),
        ):
            group = parent / f"aqua-soak-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / "memory.oom_control").exists() or (group / "memory.high").exists():
                    self.means, self._group = means, group
                    return
                group.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.rmdir()

    def press(self, pids: Sequence[int]) -> Callable[[], None]:
        """Let memory run short for these; returns what ends it."""
        if self._group is None:
            return _limit_mappings(pids)
        self._number += 1
        group = self._group / str(self._number)
        group.mkdir()
        high, v1 = group / "memory.high", group / "memory.oom_control"
        if v1.exists():
            v1.write_text("1")
            high = group / "memory.limit_in_bytes"
        # What they have already is charged to where it was taken.
        high.write_text(str(ROOM_BYTES))
        _move(pids, group)

        def relieve() -> None:
            high.write_text("-1" if v1.exists() else "max")
            assert self._group is not None, "pressed with a group"
            _move(
                [int(pid) for pid in (group / "cgroup.procs").read_text().split()],
                self._group.parent,
            )
            group.rmdir()

        return relieve


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _limit_mappings(pids: Sequence[int]) -> Callable[[], None]:
    before: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + ROOM_BYTES
            soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (most, hard))
            before[pid] = soft, hard

    def relieve() -> None:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)

    return relieve
