"""Every content a server can have, one row each: the columns of the pattern programs.

A content counts how many groups of each type a server holds. With few types there are thousands
of contents, whatever the size of the cluster, so a program over contents is as small at 65,536
GPUs as at 128. `enumerate_contents` refuses (returns None) rather than fills memory when there are
too many; the caller then merges types or works without.

Source: Aqua section 5 optimises over model x server binaries instead; servers of a class are
interchangeable, and that symmetry is what makes its program slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.problem.instance import Instance, PerRow, Servers, Types

MAX_CONTENTS: Final = 45_000
"""Above this a linear program over all contents takes a second and more. Servers of 8 GPUs have
21,000 of a dozen types, 37,000 where part of the GPUs is unused; with twice as many, a weighted
problem of 80 GPUs on servers of 5 took 5 s."""


def count_contents(
    tp: Int64[np.ndarray, " types"], counts: Int64[np.ndarray, " types"], gpus: int, *, full: bool
) -> int:
    """How many rows `enumerate_contents` would give; exact, without making them."""
    ways = np.zeros(gpus + 1, dtype=object)
    ways[0] = 1
    for size, available in zip(tp.tolist(), counts.tolist(), strict=True):
        fresh = ways.copy()
        for copies in range(1, min(available, gpus // size) + 1):
            fresh[copies * size :] += ways[: gpus + 1 - copies * size]
        ways = fresh
    return int(ways[gpus] if full else ways.sum())


def enumerate_contents(
    tp: Int64[np.ndarray, " types"],
    counts: Int64[np.ndarray, " types"],
    gpus: int,
    *,
    full: bool,
    limit: int = MAX_CONTENTS,
) -> Int64[np.ndarray, "contents types"] | None:
    """All contents of a server of `gpus` GPUs, shape (num_contents, num_types).

    Args:
        full: Only contents that use every GPU.

    Returns:
        None when there are more than `limit`.
    """
    if count_contents(tp, counts, gpus, full=full) > limit:
        return None
    rows = np.zeros((1, len(tp)), dtype=np.int64)
    used = np.zeros(1, dtype=np.int64)
    for index in range(len(tp)):
        size = int(tp[index])
        most = np.minimum((gpus - used) // size, counts[index])
        parent = np.repeat(np.arange(len(rows)), most + 1)
        copies = np.arange(len(parent)) - np.repeat(np.cumsum(most + 1) - (most + 1), most + 1)
        rows = rows[parent]
        rows[:, index] = copies
        used = used[parent] + copies * size
        if full:
            # What is still to come cannot fill the gap: drop the row now, not at the end.
            rest = int((tp[index + 1 :] * counts[index + 1 :]).sum())
            keep = used + rest >= gpus
            rows, used = rows[keep], used[keep]
    if full:
        rows = rows[used == gpus]
    return rows


def has_few_types(instance: Instance) -> bool:
    """Whether all contents of the instance's own types can be listed."""
    types = instance.types
    contents = sum(
        count_contents(types.tp, types.counts, gpus, full=instance.is_full)
        for gpus in instance.servers.gpus.tolist()
    )
    return contents <= MAX_CONTENTS


@dataclass(frozen=True, eq=False)
class ContentSpace:
    """Contents of all server classes of a cluster.

    Attributes:
        rows: Groups of each type, shape (num_contents, num_types).
        kind: Server class of each content.
        mem_gb: Signed memory of each content on its class.
        cnt: Producer minus consumer shards.
    """

    types: Types
    servers: Servers
    rows: Int64[np.ndarray, "contents types"]
    kind: Int64[np.ndarray, " contents"]
    mem_gb: Float64[np.ndarray, " contents"]
    cnt: Int64[np.ndarray, " contents"]

    @cached_property
    def as_program_rows(self) -> Float64[np.ndarray, "contents rows"]:
        """Per content: one in its server class, then its types, (contents, classes + types)."""
        classes = len(self.servers.counts)
        dense = np.zeros((len(self.rows), classes + self.rows.shape[1]))
        dense[np.arange(len(self.rows)), self.kind] = 1
        dense[:, classes:] = self.rows
        return dense

    @property
    def totals(self) -> PerRow:
        """What the program's rows must add up to: servers per class, groups per type."""
        return np.concatenate([self.servers.counts, self.types.counts]).astype(np.float64)


def content_space(
    servers: Servers, types: Types, *, full: bool, limit: int = MAX_CONTENTS
) -> ContentSpace | None:
    """Contents of every class, or None when together there are more than `limit`."""
    rows, kinds, mems, cnts = [], [], [], []
    for kind in range(len(servers.counts)):
        found = enumerate_contents(
            types.tp, types.counts, int(servers.gpus[kind]), full=full, limit=limit
        )
        if found is None:
            return None
        limit -= len(found)
        rows.append(found)
        kinds.append(np.full(len(found), kind))
        mems.append(found @ (types.tp * types.r_gb[:, kind]))
        cnts.append(found @ (types.tp * types.sign[:, kind]))
    return ContentSpace(
        types=types,
        servers=servers,
        rows=np.concatenate(rows),
        kind=np.concatenate(kinds),
        mem_gb=np.concatenate(mems),
        cnt=np.concatenate(cnts),
    )
