"""How much host memory this process may use: the machine's, or what its cgroup leaves of it.

In a container the machine's memory says nothing: a process that takes more than its cgroup's limit
is killed by the kernel, without an error that it could handle. Both hierarchies of Linux are read,
v2's `memory.max` and v1's `memory.limit_in_bytes`, of the process's group and of all above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use, used or not.

    Args:
        root: Where `proc` and `sys` are.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if not controllers:
            name = "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may be told its path on the host and see its own group at the mount's root.
        group = PurePosixPath(path.lstrip("/"))
        for level in (group, *group.parents):
            limit = _read(mount / level / name).strip()
            if limit.isdigit():  # Without a limit v2 says "max", and v1 more than any machine has.
                yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
