"""Engines fork workers; a worker that inherited a slab would pin memory its parent gave back."""

from __future__ import annotations

import subprocess
import sys

FORK = """
import os, sys
from aqualib.transports.memfd import MemfdTransport
slab = MemfdTransport().create(1 << 22)
mapped = MemfdTransport().open(slab.export(), 1 << 22)
child = os.fork()
if child == 0:
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.lexists(f"/proc/self/fd/{fd}")]
    held = [line for line in open("/proc/self/maps") if "memfd:aqua" in line]
    held += [fd for fd in fds if "memfd:aqua" in fd]
    os._exit(len(held))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_holds_nothing_of_a_slab() -> None:
    held_count = subprocess.run([sys.executable, "-c", FORK], check=False).returncode
    assert held_count == 0
