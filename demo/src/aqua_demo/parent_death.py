"""Ties a process to its parent: however the parent ends, SIGKILL included, the child ends too.

Run as `python -m aqua_demo.parent_death <parent pid> <program> <arguments>` it ties itself and
becomes the program; the kernel keeps the setting across `exec`. The signal is SIGTERM, so that a
program with children of its own, like a coordinator with its Valkey, can take them along.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1
"""Fixed by the kernel's ABI (`linux/prctl.h`)."""


def end_with(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the parent's main thread ends; if it has, end now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        raise SystemExit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - there is no shell to start it with
