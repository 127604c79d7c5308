"""The program over prefixes by sets of groups: exact for any sizes and weights.

A state is a set of a server's consumer groups. No more than half of the GPUs of a server can be
served, and no more groups than there are GPUs left for producers, so servers of 8 have at most 26
sets and servers of 16 at most a thousand. Sets of one size make a layer; a layer is one numpy
expression over (sets, members, servers), so a server costs a microsecond or a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from aqua_placer.coverage.rosters import Roster
from aqua_placer.problem.columns import Floats, Ints

CELLS: Final = 200_000
"""Sets x members x servers worked on at once: 1.6 MB a column, so that they stay in the cache."""


@dataclass(frozen=True, eq=False)
class Layer:
    """All sets of one size.

    Attributes:
        members: Groups of each set, (num_sets, size).
        before: The set without that member, as its index in the layer before, (num_sets, size).
    """

    members: Ints
    before: Ints


@dataclass(frozen=True, eq=False)
class Columns:
    """Consumers of servers that have equally many, one column each.

    Attributes:
        need: GB per shard, (groups, servers).
        size: Shards, likewise.
        worth: Of a GB per shard that is covered.
        level: Spare of the n-th producer shard, n from 1, (shards + 2, servers).
    """

    need: Floats
    size: Ints
    worth: Floats
    level: Floats

    def part(self, servers: slice) -> Columns:
        """Some of the servers."""
        return Columns(
            self.need[:, servers],
            self.size[:, servers],
            self.worth[:, servers],
            self.level[:, servers],
        )

    def gains(self, layer: Layer, used: Ints) -> Floats:
        """What each member adds when its block is the last, (sets, members, servers).

        Args:
            used: Shards of each set, (sets, servers).
        """
        reached = np.take_along_axis(self.level, np.minimum(used, len(self.level) - 1), axis=0)
        gains: Floats = np.minimum(self.need[layer.members], reached[:, None, :])
        gains *= self.worth[layer.members]
        return gains


@lru_cache(maxsize=64)
def layers(groups: int, most: int) -> tuple[Layer, ...]:
    """Sets of 1, 2, ... `most` out of `groups`, layer by layer; the empty set leads to the first.

    Bit masks in rising order make `before` a search in a sorted row.
    """
    if not most:
        return ()
    masks = np.arange(1 << groups, dtype=np.int64)
    bits = (masks[:, None] >> np.arange(groups)) & 1
    held = bits.sum(axis=1)
    found = []
    for size in range(1, most + 1):
        here, last = masks[held == size], masks[held == size - 1]
        members = np.nonzero(bits[here])[1].reshape(len(here), size)
        without = here[:, None] - (1 << members)
        found.append(Layer(members, np.searchsorted(last, without)))
    return tuple(found)


def columns(table: Roster, slots: Ints, level: Floats) -> Columns:
    """Columns of rows whose consumers, equally many, are in the first slots."""
    count = int((table.kind[slots[0]] >= 0).sum())
    groups = slots[:, :count].T
    size = table.tp[groups]
    return Columns(-table.r_gb[groups], size, size * table.weight[groups], level)


def layers_of(table: Roster, groups: int) -> tuple[Layer, ...]:
    """The layers of a server with so many consumer groups."""
    return layers(groups, max(0, min(groups, table.half, table.gpus - groups)))


def best_by_layer(columns: Columns, steps: tuple[Layer, ...]) -> Iterator[Floats]:
    """Most covered GB of each set, (sets, servers), layer by layer from the empty set on."""
    best = np.zeros((1, columns.level.shape[1]))
    used = np.zeros(best.shape, dtype=np.int64)
    yield best
    for layer in steps:
        used = used[layer.before[:, 0]] + columns.size[layer.members[:, 0]]
        best = (best[layer.before] + columns.gains(layer, used)).max(axis=1)
        yield best


def most_by_sets(table: Roster, slots: Ints, level: Floats) -> Floats:
    """Covered demand of each row; rows as for `columns`."""
    result = np.zeros(len(slots))
    whole = columns(table, slots, level)
    steps = layers_of(table, len(whole.need))
    chunk = max(1, CELLS // max((layer.members.size for layer in steps), default=1))
    for at in range(0, len(slots), chunk):
        part = whole.part(slice(at, at + chunk))
        for best in best_by_layer(part, steps):
            here = result[at : at + chunk]
            np.maximum(here, best.max(axis=0), out=here)
    return result


def chosen_by_sets(table: Roster, slots: Ints, level: Floats) -> list[list[int]]:
    """Per row, the groups of the best set in the order of their blocks; rows as for `columns`."""
    own = columns(table, slots, level)
    steps = layers_of(table, len(own.need))
    best = list(best_by_layer(own, steps))
    most = np.stack([values.max(axis=0) for values in best])
    result = []
    for row, size in enumerate(most.argmax(axis=0).tolist()):
        one = own.part(slice(row, row + 1))
        state = int(best[size][:, row].argmax())
        order: list[int] = []
        for depth in range(size, 0, -1):
            layer = steps[depth - 1]
            single = Layer(layer.members[state : state + 1], layer.before[state : state + 1])
            used = one.size[single.members].sum(axis=1)
            gains = one.gains(single, used)[0, :, 0]
            last = int((best[depth - 1][single.before[0], row] + gains).argmax())
            if gains[last] > 0:
                order.append(int(slots[row, single.members[0, last]]))
            state = int(single.before[0, last])
        result.append(order[::-1])
    return result
