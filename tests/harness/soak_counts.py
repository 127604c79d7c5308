"""What a soak counts at rest: descriptors, threads, memory, keys, slabs, sockets, metric series.

Each count is a number under a subject (a service, or the whole) and a name, and what it consists
of, so that a report can say what grew. `JUDGED` says how much of each is noise: a count at rest is
exact, memory is not.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_coordinator.store.keys import KEYS, PERMANENT
from harness.soak_faults import COORDINATORS, STORE

if TYPE_CHECKING:
    import redis

    from harness.soak_cluster import SoakCluster

Counts = dict[str, dict[str, float]]
"""Numbers by subject and name, such as `["consumer-steady"]["fds"]`."""
Details = dict[str, dict[str, int]]
"""What a count consists of, by `subject name`."""

WHOLE: Final = "whole"
EACH: Final = 0.25
"""Of a count, a period: one thing more in each fourth period. Doubled, in each second."""
MIB: Final = 0.25
"""Of memory, MiB a period. Doubled, a leak of half a MiB a period is passed over."""
JUDGED: Final = {
    "fds": EACH,
    "threads": EACH,
    "anonymous MiB": MIB,
    "member series": EACH,
    "keys": EACH,
    "fields": EACH,
    "slabs": EACH,
    "sockets": EACH,
    "processes": EACH,
}
"""Growth a period that is let pass. What is not here is told, and not judged: `rss MiB` holds what
is mapped of files and slabs, `keys that expire` follow the last two minutes' work, and `series`
appear as each route gives each of its answers for the first time."""

MEMBER: Final = re.compile(r'"(producer|consumer)-(steady|mortal)')
"""A label that names a member, of which there are ever new ones."""

STREAMS: Final = frozenset({"events", "quarantine", "reclaim_history", "samples"})
"""Trimmed to a length that a soak does not reach by itself."""
ENDING: Final = frozenset({"reclaims", "ended_reclaims"})
"""Indexes of records that expire; they empty two minutes later."""


def count_all(cluster: SoakCluster) -> tuple[Counts, Details]:
    """Count everything; at rest."""
    counts: Counts = {}
    details: Details = {}
    pids = {name: process.pid for name, process in cluster.processes.items()}
    pids[STORE] = cluster.store.pid
    for name, pid in pids.items():
        counts[name], kinds = of_process(pid)
        details[f"{name} fds"] = dict(kinds)
    for name in COORDINATORS:
        lines = cluster.get(name, "metrics").text.splitlines()
        series = Counter(line.partition("{")[0].split()[0] for line in lines if line[:1] != "#")
        counts[name]["series"] = series.total()
        counts[name]["member series"] = sum(MEMBER.search(line) is not None for line in lines)
        details[f"{name} series"] = dict(series)
    with cluster.client() as client:
        counts[STORE] |= _of_store(client, details)
    slabs = {inode for pid in pids.values() for inode in slabs_of(pid)}
    ours = str(cluster.directory)
    listening = [line for line in Path("/proc/net/unix").read_text().splitlines() if ours in line]
    counts[WHOLE] = {
        "slabs": len(slabs),
        "sockets": len(list((cluster.directory / "s").iterdir())),
        "listening": len(listening),
        "processes": _count_descendants(os.getpid()),
    }
    return counts, details


def of_process(pid: int) -> tuple[dict[str, float], Counter[str]]:
    """What a process has: descriptors, threads, memory; and its descriptors by kind."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    kinds = Counter[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", str(link.readlink()))] += 1
        except FileNotFoundError:
            continue
    return {
        "fds": kinds.total(),
        "threads": int(status["Threads"]),
        "anonymous MiB": int(status["RssAnon"].split()[0]) / 1024,
        "rss MiB": int(status["VmRSS"].split()[0]) / 1024,
    }, kinds


def slabs_of(pid: int) -> set[int]:
    """Inodes of the slabs that a process maps or has open."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    inodes = {int(inode) for inode in re.findall(r"(\d+) +/memfd:aqua-slab", maps)}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:aqua-slab" in str(link.readlink()):
                inodes.add(link.stat().st_ino)
        except FileNotFoundError:
            continue
    return inodes


def _of_store(client: redis.Redis, details: Details) -> dict[str, float]:
    """Keys that do not expire, and what is in them."""
    sizes = {
        "hash": client.hlen,
        "set": client.scard,
        "zset": client.zcard,
        "list": client.llen,
        "stream": client.xlen,
    }
    keys, fields, streams, ending = Counter[str](), Counter[str](), 0, 0
    for key in client.scan_iter(count=1000):
        kind = _kind_of(key)
        if client.ttl(key) != -1:
            ending += 1
            continue
        size = sizes[kind_of_value](key) if (kind_of_value := client.type(key)) in sizes else 1
        if kind in STREAMS:
            streams += size
        elif kind in ENDING:
            ending += size
        else:
            keys[kind] += 1
            fields[kind] += size
    details[f"{STORE} keys"], details[f"{STORE} fields"] = dict(keys), dict(fields)
    return {
        "keys": keys.total(),
        "fields": fields.total(),
        "keys that expire": ending,
        "stream entries": streams,
    }


def _kind_of(key: str) -> str:
    for name, beginning in KEYS.items():
        if key == beginning or (beginning.endswith(":") and key.startswith(beginning)):
            return name
    return f"unknown: {key}"


def strange_keys(details: Details) -> list[str]:
    """Keys without an end that the books do not know of."""
    return sorted(set(details[f"{STORE} keys"]) - set(PERMANENT))


def _count_descendants(pid: int) -> int:
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return len(children) + sum(map(_count_descendants, children))
