"""Groups as rows to pick servers' contents from, and how the program over prefixes takes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Final

import numpy as np

from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB

MAX_STATES_NARROW: Final = 60
"""Above this many states by kind, sets of groups take less time on servers of `NARROW` GPUs: a
layer of them is one expression, a state by kind is one step of a loop."""

NARROW: Final = 16
"""GPUs of a server up to which the sets of groups that can be served number a thousand at most."""

MAX_STATES: Final = 4_000
"""States by kind that a rack may have: 36 matched shards of sizes 1, 2 and 4 make 1,300."""


class Way(Enum):
    """How states are kept few."""

    BY_KIND = auto()
    BY_GROUP = auto()
    IN_TURN = auto()


@dataclass(frozen=True, eq=False)
class Roster:
    """Groups as rows to pick servers' contents from; the last row stands for an empty slot.

    Attributes:
        kind: Index into `kinds`, -1 for groups that are no consumers.
        kinds: The distinct (shards, weight) of consumers.
        half: Most shards that can be matched on a server: half of its GPUs.
    """

    tp: Ints
    r_gb: Floats
    weight: Floats
    kind: Ints
    kinds: tuple[tuple[int, float], ...]
    gpus: int
    way: Way

    @property
    def half(self) -> int:
        """Most shards that can be matched on a server: each needs a producer."""
        return self.gpus // 2

    @cached_property
    def consumer_weight(self) -> Floats:
        """Worth of a covered GB; 0 for groups that are no consumers."""
        return np.where(self.kind >= 0, self.weight, 0.0)

    @cached_property
    def lent_gb(self) -> Floats:
        """What all shards of a group could lend."""
        lent: Floats = np.maximum(self.r_gb, 0.0) * self.tp
        return lent

    @property
    def is_exact(self) -> bool:
        """Whether the program finds the most that can be covered."""
        return self.way is not Way.IN_TURN


def roster(tp: Ints, r_gb: Floats, weight: Floats, gpus: int) -> Roster:
    """Rows for `prefixes` from columns of one server class whose servers have `gpus` GPUs."""
    r_gb = np.where(np.abs(r_gb) > GRAIN_GB / 2, r_gb, 0.0)
    consumer = r_gb < 0
    keys = list(zip(tp.tolist(), weight.tolist(), strict=True))
    kinds = sorted({key for key, needs in zip(keys, consumer.tolist(), strict=True) if needs})
    index = {kind: i for i, kind in enumerate(kinds)}
    kind = [index[k] if needs else -1 for needs, k in zip(consumer.tolist(), keys, strict=True)]
    states = _count_states([size for size, _ in kinds], gpus // 2)
    if states <= (MAX_STATES_NARROW if gpus <= NARROW else MAX_STATES):
        way = Way.BY_KIND
    else:
        way = Way.BY_GROUP if gpus <= NARROW else Way.IN_TURN
    return Roster(
        np.append(tp, 0),
        np.append(r_gb, 0.0),
        np.append(weight, 0.0),
        np.array([*kind, -1], dtype=np.int64),
        tuple(kinds),
        gpus,
        way,
    )


def _count_states(sizes: list[int], half: int) -> int:
    """Ways to choose numbers of groups of these sizes with at most `half` shards."""
    ways = [1] + [0] * half
    for size in sizes:
        for shards in range(size, half + 1):
            ways[shards] += ways[shards - size]
    return sum(ways)


def at_most_gb(table: Roster, slots: Ints) -> Floats:
    """A quick bound on the covered demand of each row, without a sort.

    Nobody gets more than the producer of most spare has, and the heaviest consumer could at best
    have all that is lent.
    """
    r_gb, weight = table.r_gb[slots], table.consumer_weight[slots]
    asked = np.minimum(-r_gb, r_gb.max(axis=1, keepdims=True)) * weight * table.tp[slots]
    lent = table.lent_gb[slots].sum(axis=1) * weight.max(axis=1)
    most: Floats = np.maximum(np.minimum(asked.sum(axis=1), lent), 0.0)
    return most


def levels(table: Roster, slots: Ints) -> Floats:
    """Spare of the n-th producer shard of each row, n from 1, (half + 2, rows)."""
    spare = np.maximum(table.r_gb[slots], 0.0)
    order = np.argsort(-spare, axis=1, kind="stable")
    spare = np.take_along_axis(spare, order, axis=1)
    shards = np.cumsum(np.take_along_axis(table.tp[slots], order, axis=1), axis=1)
    level = np.zeros((table.half + 2, len(slots)))
    for shard in range(table.half):
        holder = np.minimum((shards <= shard).sum(axis=1), slots.shape[1] - 1)
        level[shard + 1] = spare[np.arange(len(slots)), holder]
    return level
