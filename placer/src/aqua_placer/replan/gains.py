"""What every server gains by every single replacement.

A *place* is a group on its server, or room for a group of some size in unused GPUs. What a place
gains by holding another group of its size depends on its server alone, not on where that group
comes from. So the gains are a table, places by groups, and every cycle of replacements (this group
there, that one elsewhere, a third one here) is a sum of its entries, without sampling.

Few sizes fill the table exactly. Between many, gains are computed at `KNOTS` sizes and drawn
straight from one to the next: coverage is piecewise linear in the size of a group. Such entries
only rank cycles; `cycles` computes what the best of them gain before one is made. A cycle may come
twice to a server, for two of its places: then the sum is wrong, so `apart` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.search.exchange import Layout
from aqua_placer.search.pursuit import MAX_ROWS, Judge

KNOTS: Final = 14
"""Sizes of groups alike in shards, weight and sign at which gains are computed: a step of some
3 GB, within which few gains bend. All sizes when they are no more than that."""

NEVER: Final = -1e9
"""GB that an impossible replacement gains: finite, so that sums stay so."""

VOID: Final = -1
"""In place of a group: nothing, the GPUs stay unused."""


@dataclass(frozen=True, eq=False)
class Scale:
    """Groups that stand for all: the gain of any group lies between those of two of them.

    Attributes:
        example: Group at each knot, `VOID` for none.
        size: Shards there; 0 for none.
        below, above: Knots on both sides of each group's size, (num_groups + 1,).
        share: How far it is from the one to the other, likewise.
    """

    example: Ints
    size: Ints
    below: Ints
    above: Ints
    share: Floats


def scale_of(layout: Layout) -> Scale:
    """Knots of the layout's groups; the last one is `VOID`."""
    instance = layout.instance
    types = instance.types
    of_type = np.zeros(len(types.tp), dtype=np.int64)
    of_type[types.of_group] = np.arange(instance.num_groups)
    keys = np.column_stack([types.tp, types.weight, types.sign])
    _, family = np.unique(keys, axis=0, return_inverse=True)
    family = family.reshape(-1)
    knots: list[int] = []
    below, above = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    share = np.zeros(len(keys))
    for index in range(int(family.max(initial=-1)) + 1):
        own = np.nonzero(family == index)[0]
        own = own[np.argsort(types.r_gb[own, 0], kind="stable")]
        gb = types.r_gb[own, 0]
        spots = np.unique(np.rint(np.linspace(0, len(own) - 1, min(len(own), KNOTS))).astype(int))
        right = np.searchsorted(spots, np.arange(len(own)))
        left = np.where(spots[right] == np.arange(len(own)), right, right - 1)
        span = gb[spots[right]] - gb[spots[left]]
        below[own], above[own] = len(knots) + left, len(knots) + right
        np.divide(gb - gb[spots[left]], span, out=gb, where=span > GRAIN_GB)
        share[own] = np.where(span > GRAIN_GB, gb, 0.0)
        knots += of_type[own[spots]].tolist()
    void = len(knots)
    return Scale(
        example=np.array([*knots, VOID], dtype=np.int64),
        size=np.append(instance.tp[knots], 0),
        below=np.append(below[types.of_group], void),
        above=np.append(above[types.of_group], void),
        share=np.append(share[types.of_group], 0.0),
    )


class Gains:
    """The table of all places; `refresh` servers after their contents have changed.

    Every server has as many entries: its slots, then one for room of each size there is. Those that
    are no place (empty slots, too little room, groups that may not move) gain `NEVER`.

    Attributes:
        server, group, size: Of each place; the group is `VOID` where GPUs are unused.
        gain: GB that place x gains by holding what place y holds now, (places, places).
        cost: Shards that migrate with it: what leaves home less what comes home, likewise.
    """

    def __init__(self, layout: Layout, judge: Judge, prices: Floats, home: Ints) -> None:
        self.layout, self.judge, self.prices, self.home = layout, judge, prices, home
        self.scale = scale_of(layout)
        self.rooms = rooms_of(layout)
        self.width, self.block = layout.slots.shape[1], block_of(layout)
        servers = np.arange(len(layout.slots))
        count = len(servers) * self.block
        self.server = np.repeat(servers, self.block)
        self.group = np.full(count, VOID, dtype=np.int64)
        self.size = np.zeros(count, dtype=np.int64)
        self.gain = np.full((count, count), NEVER)
        self.cost = np.zeros((count, count))
        self._at_knots = np.full((count, len(self.scale.example)), NEVER)
        self.refresh(servers)

    def refresh(self, changed: Ints) -> None:
        """Price the places of these servers anew."""
        layout, here = self.layout, changed
        own = (changed[:, None] * self.block + np.arange(self.block)).reshape(-1)
        held = layout.slots[here]
        size = layout.size[held]
        if layout.frozen is not None:
            size = np.where(layout.frozen[held], 0, size)
        used = layout.size[held].sum(axis=1)
        free = layout.instance.servers.capacity[here] - used
        room = np.where(free[:, None] >= self.rooms, self.rooms, 0)
        self.group[own] = np.pad(held, ((0, 0), (0, len(self.rooms))), constant_values=VOID).ravel()
        self.size[own] = np.concatenate([size, room], axis=1).ravel()
        self._price(own)
        self._spread(own, np.arange(len(self.size)))
        self._spread(np.arange(len(self.size)), own)

    def _price(self, places: Ints) -> None:
        """Gains of these places at all knots of their size."""
        self._at_knots[places] = NEVER
        size, wanted = self.size[places], self.scale.size
        group = self.group[places]
        alike = (size[:, None] == wanted) & (size[:, None] > 0)
        # Nothing may come instead of any group, but not instead of nothing.
        alike[:, -1] = (size > 0) & (group != VOID) & (len(self.rooms) > 0)
        row, knot = np.nonzero(alike)
        for at in range(0, len(row), MAX_ROWS):
            place, into = places[row[at : at + MAX_ROWS]], knot[at : at + MAX_ROWS]
            self._at_knots[place, into] = self.gained(place, self.scale.example[into])

    def gained(self, places: Ints, groups: Ints) -> Floats:
        """What each place gains by holding another group, exactly."""
        rows, server = self.content(places, groups)
        return self.prices[server] - priced(self.layout, self.judge, rows, server)

    def content(self, places: Ints, groups: Ints) -> tuple[Ints, Ints]:
        """Groups of the server of each place with another group in it, and the server."""
        server, slot = self.server[places], places % self.block
        rows = np.pad(self.layout.slots[server], ((0, 0), (0, 1)), constant_values=VOID)
        rows[np.arange(len(places)), np.minimum(slot, self.width)] = groups
        return rows, server

    def _spread(self, places: Ints, sources: Ints) -> None:
        """Fill the table where `places` hold what `sources` hold now."""
        group = self.group[sources]
        below, above = self.scale.below[group], self.scale.above[group]
        share = self.scale.share[group]
        knots = self._at_knots[places]
        gain = knots[:, below] * (1 - share) + knots[:, above] * share
        # Room comes as nothing, for groups of its own size.
        apart = self.server[places][:, None] != self.server[sources]
        fits = self.size[places][:, None] == self.size[sources]
        at = np.ix_(places, sources)
        self.gain[at] = np.where(apart & fits, gain, NEVER)
        leaves = self.home[self.group[places]] == self.server[places]
        comes = self.home[group] == self.server[places][:, None]
        size = self.size[places][:, None]
        self.cost[at] = size * leaves[:, None] - size * comes


def rooms_of(layout: Layout) -> Ints:
    """Sizes of unused room that count as places: those of groups, unless all GPUs are used."""
    sizes: Ints = np.unique(layout.instance.tp)
    return sizes[:0] if layout.instance.is_full else sizes


def block_of(layout: Layout) -> int:
    """Entries per server."""
    return int(layout.slots.shape[1]) + len(rooms_of(layout))


def priced(layout: Layout, judge: Judge, rows: Ints, server: Ints) -> Floats:
    """Prices of contents `rows` on these servers."""
    kind = layout.class_of[server]
    mem = layout.mem[rows, kind[:, None]].sum(axis=1)
    cnt = layout.cnt[rows, kind[:, None]].sum(axis=1)
    return judge.price(rows, kind, mem, cnt)
