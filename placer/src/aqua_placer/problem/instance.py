"""A placement problem as columns: what every solver reads and none changes.

Servers come in classes (the GPUs, their HBM, their links), groups are the units of placement: the
tensor-parallel shards that must share a server. Sizes are GB per shard, positive for spare and
negative for need, one column per server class, because a model profiled on 80 GB has 61 GB more to
spare on a card of 141. Everything is validated on the way in (`parser`), so nothing is checked
again here.

Groups with the same shards, sizes and weight are one *type*. Solvers count types rather than
groups wherever they can: a cluster of 65,536 GPUs has few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

Placement: TypeAlias = Int64[np.ndarray, " groups"]
"""Server of each group, -1 for none."""

Contents: TypeAlias = Int64[np.ndarray, "rows width"]
"""Groups by row (a server that is or could be) and slot, -1 for an empty slot."""

SlotSets: TypeAlias = Int64[np.ndarray, "sets order"]
"""Sets of slots of one server."""

PairServers: TypeAlias = Int64[np.ndarray, " pairs"]
"""One server of each pair."""

PerRow: TypeAlias = Float64[np.ndarray, " rows"]
PerServer: TypeAlias = Float64[np.ndarray, " servers"]

MAX_TYPES: Final = 16
"""Kinds of models up to which even a handful of groups counts as typed; chosen by hand.
Doubled, small clusters without repetition aim at a proof in vain."""

GRAIN_GB: Final = 1e-6
"""Sizes are compared on a grid of 1 kB: far below what a profile can tell, far above what sums of
doubles lose."""


@dataclass(frozen=True, eq=False)
class Servers:
    """The cluster: `counts[k]` servers of class `k`, numbered class by class.

    Attributes:
        gpus: GPUs of a server, shape (num_classes,).
        hbm_gb: HBM of one GPU, shape (num_classes,).
        links: Per class, the bandwidth between GPUs (gpus, gpus), or None where all are equal.
    """

    class_names: tuple[str, ...]
    counts: Int64[np.ndarray, " types"]
    gpus: Int64[np.ndarray, " classes"]
    hbm_gb: Float64[np.ndarray, " classes"]
    links: tuple[Float64[np.ndarray, "gpus gpus"] | None, ...]

    @cached_property
    def class_of(self) -> Int64[np.ndarray, " servers"]:
        """Class of each server, shape (num_servers,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def capacity(self) -> Int64[np.ndarray, " servers"]:
        """GPUs of each server, shape (num_servers,)."""
        gpus: Int64[np.ndarray, " servers"] = self.gpus[self.class_of]
        return gpus

    @property
    def count(self) -> int:
        """Servers in the cluster."""
        return int(self.counts.sum())

    @property
    def total_gpus(self) -> int:
        """GPUs in the cluster."""
        return int((self.counts * self.gpus).sum())

    def name(self, server: int) -> str:
        """`class/index`, or `class` where there is one of it."""
        kind = int(self.class_of[server])
        if self.counts[kind] == 1:
            return self.class_names[kind]
        return f"{self.class_names[kind]}/{server - int(self.counts[:kind].sum())}"


@dataclass(frozen=True, eq=False)
class Types:
    """Distinct kinds of groups, ordered by (shards, sizes, weight, sign).

    `sign` is +1 for producers, -1 for consumers, 0 for neither, per server class.
    """

    tp: Int64[np.ndarray, " types"]
    r_gb: Float64[np.ndarray, "groups classes"]
    weight: Float64[np.ndarray, " groups"]
    counts: Int64[np.ndarray, " types"]
    of_group: Int64[np.ndarray, " groups"]
    sign: Float64[np.ndarray, "types classes"]

    @classmethod
    def of(
        cls,
        tp: Int64[np.ndarray, " groups"],
        r_gb: Float64[np.ndarray, "groups classes"],
        weight: Float64[np.ndarray, " groups"],
        sign: Float64[np.ndarray, "groups classes"],
    ) -> Types:
        """The distinct rows of these columns, sizes compared on the grid of `GRAIN_GB`."""
        keys = np.column_stack([tp, np.rint(r_gb / GRAIN_GB), weight, sign])
        _, first, inverse, counts = np.unique(
            keys, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        of_group = inverse.reshape(-1).astype(np.int64)
        return cls(tp[first], r_gb[first], weight[first], counts, of_group, sign[first])


@dataclass(frozen=True, eq=False)
class Instance:
    """One placement problem.

    Attributes:
        tp: Shards of each group, all on one server, shape (num_groups,).
        r_gb: Spare (> 0) or need (< 0) per shard and server class, (num_groups, num_classes).
        weight: Worth of a covered GB, shape (num_groups,).
        current: Server each group is on today, -1 for none, shape (num_groups,).
        allowed: Per pinned group, which servers it may go to, shape (num_servers,).
        apart: Sets of groups of which no two may share a server.
        cnt_per_shard: Instead of the sign of `r_gb`, for blocks of producers and consumers.
    """

    name: str
    servers: Servers
    names: Sequence[str]
    tp: Int64[np.ndarray, " types"]
    r_gb: Float64[np.ndarray, "groups classes"]
    weight: Float64[np.ndarray, " groups"]
    current: Placement
    allowed: Mapping[int, Bool[np.ndarray, " servers"]] = field(default_factory=dict)
    apart: tuple[tuple[int, ...], ...] = ()
    digest: str = ""
    cnt_per_shard: Float64[np.ndarray, "groups classes"] | None = None

    @property
    def num_groups(self) -> int:
        """Groups to place."""
        return len(self.tp)

    @property
    def hbm_gb(self) -> float:
        """H of the objective: HBM of a GPU, the largest where classes differ."""
        return float(self.servers.hbm_gb.max())

    @property
    def is_full(self) -> bool:
        """Whether every GPU gets a shard."""
        return int(self.tp.sum()) == self.servers.total_gpus

    @property
    def is_constrained(self) -> bool:
        """Whether groups are pinned or kept apart, so that servers are not interchangeable."""
        return bool(self.allowed) or bool(self.apart)

    @cached_property
    def sign(self) -> Float64[np.ndarray, "groups classes"]:
        """+1 producer, -1 consumer, 0 neither, per server class, (num_groups, num_classes).

        A fraction for blocks of producers and consumers; times their shards it is whole.
        """
        if self.cnt_per_shard is not None:
            return self.cnt_per_shard
        return sign_of(self.r_gb).astype(np.float64)

    @cached_property
    def types(self) -> Types:
        """The distinct kinds of groups."""
        return Types.of(self.tp, self.r_gb, self.weight, self.sign)

    @property
    def repeats_sizes(self) -> bool:
        """Whether groups come in types worth the name, so that the optimum can be met exactly."""
        return len(self.types.counts) <= max(MAX_TYPES, self.num_groups // 8)

    @cached_property
    def quantum_gb(self) -> float:
        """Largest step of which every size is a multiple; at least `GRAIN_GB`."""
        grains = np.rint(np.abs(self.types.r_gb) / GRAIN_GB).astype(np.int64)
        divisor = int(np.gcd.reduce(grains, axis=None)) if grains.size else 0
        return max(divisor, 1) * GRAIN_GB

    def mem_gb(self, placement: Placement) -> PerServer:
        """Signed memory of each server under `placement` (server per group)."""
        return self._summed(self.r_gb, placement)

    def cnt(self, placement: Placement) -> Int64[np.ndarray, " servers"]:
        """Producer shards minus consumer shards of each server."""
        counts: PerServer = np.rint(self._summed(self.sign, placement))
        return counts.astype(np.int64)

    def _summed(
        self, column: Float64[np.ndarray, "groups classes"], placement: Placement
    ) -> PerServer:
        here = column[np.arange(self.num_groups), self.servers.class_of[placement]]
        total: PerServer = np.bincount(
            placement, weights=self.tp * here, minlength=self.servers.count
        ).astype(np.float64)
        return total


def sign_of(r_gb: Float64[np.ndarray, "groups classes"]) -> Int64[np.ndarray, "groups classes"]:
    """+1, -1 or 0: below half a grain a size is nothing."""
    return (r_gb > GRAIN_GB / 2).astype(np.int64) - (r_gb < -GRAIN_GB / 2).astype(np.int64)
