"""Groups as rows to pick servers' contents from, and what bounds a content without a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_placer.problem.instance import GRAIN_GB, Instance

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

MAX_STATES_PER_GPU: Final = 20
"""States of the exact program, per GPU of a server: 36 matched shards of a rack of 72, of sizes
1, 2 and 4, make 1,300, and a state is one numpy expression over all servers. Four times as many
cover three weights on servers of 16, and gained nothing that was measured."""


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Groups as rows to pick servers' contents from; the last row stands for an empty slot.

    Attributes:
        kind: Index into `kinds`, -1 for groups that are no consumers.
        kinds: The distinct (shards, weight) of consumers.
        gpus: GPUs of a server.
        is_exact: Whether the program over numbers per kind has few enough states to be run.
    """

    tp: Int64[np.ndarray, " groups_and_none"]
    r_gb: Float64[np.ndarray, " groups_and_none"]
    weight: Float64[np.ndarray, " groups_and_none"]
    kind: Int64[np.ndarray, " groups_and_none"]
    kinds: tuple[tuple[int, float], ...]
    gpus: int
    is_exact: bool

    @property
    def half(self) -> int:
        """Most shards that can be matched on a server: each needs a producer."""
        return self.gpus // 2

    @cached_property
    def consumer_weight(self) -> Float64[np.ndarray, " groups_and_none"]:
        """Worth of a covered GB; 0 for groups that are no consumers."""
        return np.where(self.kind >= 0, self.weight, 0.0)

    @cached_property
    def lent_gb(self) -> Float64[np.ndarray, " groups_and_none"]:
        """What all shards of a group could lend."""
        lent: Float64[np.ndarray, " groups_and_none"] = np.maximum(self.r_gb, 0.0) * self.tp
        return lent


def roster(
    tp: Int64[np.ndarray, " groups"],
    r_gb: Float64[np.ndarray, " groups"],
    weight: Float64[np.ndarray, " groups"],
    gpus: int,
) -> GroupTable:
    """Rows for `prefixes` from columns of one server class whose servers have `gpus` GPUs."""
    r_gb = np.where(np.abs(r_gb) > GRAIN_GB / 2, r_gb, 0.0)
    consumer = r_gb < 0
    keys = list(zip(tp.tolist(), weight.tolist(), strict=True))
    kinds = sorted({key for key, needs in zip(keys, consumer.tolist(), strict=True) if needs})
    index = {kind: i for i, kind in enumerate(kinds)}
    kind = [index[k] if needs else -1 for needs, k in zip(consumer.tolist(), keys, strict=True)]
    states = _count_states([size for size, _ in kinds], gpus // 2)
    return GroupTable(
        tp=np.append(tp, 0),
        r_gb=np.append(r_gb, 0.0),
        weight=np.append(weight, 0.0),
        kind=np.array([*kind, -1], dtype=np.int64),
        kinds=tuple(kinds),
        gpus=gpus,
        is_exact=states <= MAX_STATES_PER_GPU * max(gpus, 1),
    )


def rosters(instance: Instance) -> tuple[GroupTable, ...]:
    """The roster of each server class."""
    return tuple(
        roster(instance.tp, instance.r_gb[:, kind], instance.weight, gpus)
        for kind, gpus in enumerate(instance.servers.gpus.tolist())
    )


def _count_states(sizes: list[int], half: int) -> int:
    """Ways to choose numbers of groups of these sizes with at most `half` shards."""
    ways = [1] + [0] * half
    for size in sizes:
        for shards in range(size, half + 1):
            ways[shards] += ways[shards - size]
    return sum(ways)


def at_most_gb(
    table: GroupTable, slots: Int64[np.ndarray, "rows width"]
) -> Float64[np.ndarray, " rows"]:
    """A quick bound on the covered demand of each row, without a sort.

    No consumer gets more than the producer of most spare has, and the heaviest consumer could at
    best have all that is lent.
    """
    r_gb, weight = table.r_gb[slots], table.consumer_weight[slots]
    asked = np.minimum(-r_gb, r_gb.max(axis=1, keepdims=True)) * weight * table.tp[slots]
    lent = table.lent_gb[slots].sum(axis=1) * weight.max(axis=1)
    most: Float64[np.ndarray, " rows"] = np.maximum(np.minimum(asked.sum(axis=1), lent), 0.0)
    return most


def levels(
    table: GroupTable, slots: Int64[np.ndarray, "rows width"]
) -> Float64[np.ndarray, "half_and_two rows"]:
    """Spare of the n-th producer shard of each row, n from 1; 0 before it and after the last."""
    spare = np.maximum(table.r_gb[slots], 0.0)
    order = np.argsort(-spare, axis=1, kind="stable")
    spare = np.take_along_axis(spare, order, axis=1)
    shards = np.cumsum(np.take_along_axis(table.tp[slots], order, axis=1), axis=1)
    level = np.zeros((table.half + 2, len(slots)))
    for shard in range(table.half):
        holder = np.minimum((shards <= shard).sum(axis=1), slots.shape[1] - 1)
        level[shard + 1] = spare[np.arange(len(slots)), holder]
    return level
