"""Re-placement with few types: the exchange that gains most per migrated shard, of all there are.

What a server gains by giving up a group of type k for one of type l depends on the server alone,
not on where the other group comes from. So the gains of all servers are a table (server, k, l), an
exchange is a cycle over types (k for l here, l for m there, m for k elsewhere), and the best one
takes the best servers for each of its steps: no sampling of pairs. Cycles of two and three are
looked at; after each only its servers are priced anew.

Greedy, so not a proof of the least number of migrations. Groups of unlike size never change places
here; `replanning` does that afterwards where the target is not yet reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.search.exchange import Layout
from aqua_placer.search.pursuit import MAX_ROWS, Judge

MAX_TYPES: Final = 24
"""Types up to which all cycles of three are looked at, 27 (TYPES ^ 3) at once."""

MAX_SERVERS: Final = 1_000
"""Above this rounds of many exchanges at once are quicker, and a few more moves weigh less."""

RANKS: Final = 3
"""Best servers per step that are kept: a cycle of three needs three different ones."""


@dataclass(frozen=True, eq=False)
class _Steps:
    """Per (k, l) the best servers to give k for l: their gain, cost in shards and number."""

    gain: Floats
    cost: Floats
    server: Ints


class Cycles:
    """Exchanges of groups of one size, best first, on a layout and its prices."""

    def __init__(self, layout: Layout, judge: Judge, prices: Floats, home: Ints) -> None:
        self.layout, self.judge, self.prices, self.home = layout, judge, prices, home
        types = layout.instance.types
        self.tp, self.of_group = types.tp, types.of_group
        self.example = np.zeros(len(types.tp), dtype=np.int64)
        self.example[types.of_group] = np.arange(len(types.of_group))
        count = len(types.tp)
        servers = layout.instance.servers.count
        self.gain = np.full((servers, count, count), -np.inf)
        self.cost = np.zeros((servers, count))
        self._price(np.arange(servers))

    @staticmethod
    def suit(layout: Layout) -> bool:
        """Whether there are few enough types and servers."""
        instance = layout.instance
        return len(instance.types.tp) <= MAX_TYPES and instance.servers.count <= MAX_SERVERS

    def run(self, goal_gb: float, max_shards: int | None, budget: Budget) -> int:
        """Exchange until `goal_gb` is covered, nothing pays or the shards are used up.

        Returns:
            Shards that were moved.
        """
        moved = 0
        while not budget.expired():
            missing = goal_gb + float(self.prices.sum())
            if missing <= GRAIN_GB:
                break
            left = np.inf if max_shards is None else max_shards - moved
            cycle = self._best(missing, left)
            if cycle is None:
                break
            moved += self._make(cycle)
        return moved

    def _price(self, servers: Ints) -> None:
        """Gains of every single replacement on these servers."""
        layout = self.layout
        self.gain[servers] = -np.inf
        self.cost[servers] = np.inf
        held = layout.slots[servers]
        row, slot = np.nonzero(held >= 0)
        group = held[row, slot]
        free = np.ones(len(group), dtype=bool)
        if layout.frozen is not None:
            free = ~layout.frozen[group]
        row, slot, group = row[free], slot[free], group[free]
        kind = self.of_group[group]
        # A group that came from elsewhere, or from nowhere, leaves for free.
        stays = self.home[group] == servers[row]
        np.minimum.at(self.cost, (servers[row], kind), np.where(stays, self.tp[kind], 0.0))
        _, first = np.unique(row * len(self.tp) + kind, return_index=True)
        row, slot, kind = row[first], slot[first], kind[first]
        alike = self.tp[kind][:, None] == self.tp[None, :]
        alike[np.arange(len(kind)), kind] = False
        which, other = np.nonzero(alike)
        for at in range(0, len(which), MAX_ROWS):
            part, into = which[at : at + MAX_ROWS], other[at : at + MAX_ROWS]
            here = servers[row[part]]
            rows = layout.slots[here]
            rows[np.arange(len(part)), slot[part]] = self.example[into]
            place = layout.class_of[here]
            mem = layout.mem[rows, place[:, None]].sum(axis=1)
            cnt = layout.cnt[rows, place[:, None]].sum(axis=1)
            price = self.judge.price(rows, place, mem, cnt)
            self.gain[here, kind[part], into] = self.prices[here] - price

    def _steps(self) -> _Steps:
        ranks = min(RANKS, len(self.gain))
        best = np.argsort(-self.gain, axis=0, kind="stable")[:ranks]
        gain = np.take_along_axis(self.gain, best, axis=0)
        kinds = np.arange(self.gain.shape[1])
        cost = self.cost[best, kinds[None, :, None]]
        return _Steps(gain.transpose(1, 2, 0), cost.transpose(1, 2, 0), best.transpose(1, 2, 0))

    def _best(self, missing_gb: float, left: float) -> list[tuple[int, int, int]] | None:
        """The cycle of most use per shard as (server, gives, gets), or None when none pays."""
        steps = self._steps()
        chosen, most = None, 0.0
        for length in (2, 3):
            letters, ranks = "klm"[:length], "abc"[:length]
            terms = [(letters[i] + letters[(i + 1) % length], ranks[i]) for i in range(length)]
            shape = "".join(letters) + "".join(ranks)

            def spread(column: Floats | Ints, pair: str, rank: str, shape: str = shape) -> Floats:
                axes = [pair[0], pair[1], rank]
                ordered = sorted(axes, key=shape.index)
                turned = np.transpose(column, [axes.index(axis) for axis in ordered])
                sizes = dict(zip(ordered, turned.shape, strict=True))
                wide: Floats = turned.reshape([sizes.get(axis, 1) for axis in shape])
                return wide

            gain = sum(spread(steps.gain, *term) for term in terms)
            cost = sum(spread(steps.cost, *term) for term in terms)
            servers = [spread(steps.server, *term) for term in terms]
            apart = servers[0] != servers[1]
            if len(servers) == RANKS:
                apart = apart & (servers[1] != servers[2]) & (servers[0] != servers[2])
            pays = apart & (gain > GRAIN_GB) & (cost <= left)
            if not np.any(pays):
                continue
            # Beyond what is missing a gain is of no use: then the cheaper exchange is better.
            use = np.zeros(pays.shape)
            np.divide(np.minimum(gain, missing_gb), np.maximum(cost, 0.5), out=use, where=pays)
            at = np.unravel_index(int(use.argmax()), use.shape)
            if use[at] > most * (1 + 1e-9):
                most = float(use[at])
                index = dict(zip(shape, (int(i) for i in at), strict=True))
                chosen = [
                    (
                        int(steps.server[index[pair[0]], index[pair[1]], index[rank]]),
                        index[pair[0]],
                        index[pair[1]],
                    )
                    for pair, rank in terms
                ]
        return chosen

    def _make(self, cycle: list[tuple[int, int, int]]) -> int:
        """Move one group per step; returns the shards that left their server of today."""
        slots = self.layout.slots
        leaving: dict[int, tuple[int, int]] = {}
        moved = 0
        for server, gives, _ in cycle:
            spots = [
                spot
                for spot, group in enumerate(slots[server].tolist())
                if group >= 0
                and self.of_group[group] == gives
                and not (self.layout.frozen is not None and self.layout.frozen[group])
            ]
            spot = min(spots, key=lambda at: bool(self.home[slots[server, at]] == server))
            group = int(slots[server, spot])
            moved += int(self.tp[gives]) * int(self.home[group] == server)
            leaving[gives] = (group, spot)
        for server, gives, gets in cycle:
            slots[server, leaving[gives][1]] = leaving[gets][0]
        touched = np.array([server for server, _, _ in cycle])
        layout = self.layout
        place = layout.class_of[touched]
        rows = slots[touched]
        mem = layout.mem[rows, place[:, None]].sum(axis=1)
        cnt = layout.cnt[rows, place[:, None]].sum(axis=1)
        self.prices[touched] = self.judge.price(rows, place, mem, cnt)
        self._price(touched)
        return moved
