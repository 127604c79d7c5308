"""Re-placement by cycles of replacements, the one of most use per migrated shard first.

`gains` tells what each place gains by each group. Two places that exchange their groups are a cycle
of two; of three, every place gives its group to the next. All cycles of two are ranked, and all of
three that begin with one of the best replacements (a cycle that pays in sum pays from one of its
places on); the best ranked are computed exactly, and made while none has touched their servers.

The path does not depend on the limit of moves: it is the same for all limits and ends where one
would be exceeded, with what the shards that are left buy. So a larger limit never covers less.

Greedy, so not a proof of the least number of migrations. Groups change places with groups of their
size or with unused GPUs; `replanning` tries others where the target is not yet reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.replan.gains import NEVER, Gains, block_of, priced
from aqua_placer.search.exchange import Layout
from aqua_placer.search.pursuit import Judge, packed

MAX_PLACES: Final = 1_500
"""Places of one table, which has their square of cells: 18 MB a column."""

STARTS: Final = 600
"""Replacements that cycles of three begin with, those that gain most at the price of the best cycle
of two: a fraction of all that gain anything, and the table's width each."""

OFFERED: Final = 48
"""Cycles of each length whose gain is computed exactly."""

CLOSE: Final = 0.93
"""Use of a cycle, beside the best, with which it is made in the same round."""

FREE: Final = 0.5
"""Shards that a cycle without migrations counts as: better than any of the same gain that has."""


@dataclass(frozen=True, eq=False)
class Offered:
    """Cycles with what they really gain, the most useful first.

    Attributes:
        places: Each place holds next what the one after it holds now; -1 fills up cycles of two.
    """

    places: Ints
    gain: Floats
    cost: Floats


@dataclass
class Spent:
    """Shards that migrated so far, and the most that may.

    Attributes:
        is_out: The limit has cut the path short: nothing further may be made.
    """

    limit: int | None
    shards: int = 0
    is_out: bool = False

    def allows(self, shards: int) -> bool:
        """Whether so many more may migrate."""
        return self.limit is None or self.shards + shards <= self.limit


class Cycles:
    """Cycles of replacements on a layout and its prices, until a goal."""

    def __init__(
        self,
        layout: Layout,
        judge: Judge,
        prices: Floats,
        home: Ints,
        goal_gb: float,
    ) -> None:
        self.layout, self.judge, self.prices, self.home = layout, judge, prices, home
        self.goal_gb = goal_gb

    @staticmethod
    def suit(layout: Layout) -> bool:
        """Whether all servers fit one table.

        Tables of parts of a large cluster were tried: drawing exchanges from all of it finds
        better ones in a tenth of the time.
        """
        instance = layout.instance
        return instance.servers.count * block_of(layout) <= MAX_PLACES

    def run(self, spent: Spent, budget: Budget) -> None:
        """Make cycles until the goal is covered, nothing pays or the shards are used up."""
        gains = Gains(self.layout, self.judge, self.prices, self.home)
        while not (spent.is_out or budget.expired() or self._missing_gb() <= GRAIN_GB):
            touched = self._make(gains, spent)
            if not touched:
                break
            gains.refresh(np.array(sorted(touched)))

    def _missing_gb(self) -> float:
        return self.goal_gb + float(self.prices.sum())

    def _make(self, gains: Gains, spent: Spent) -> set[int]:
        """One round: the best cycles that have no server in common; returns their servers."""
        offered = self._offers(gains, None)
        touched: set[int] = set()
        least = 0.0
        for places, gain, cost in zip(
            offered.places, offered.gain.tolist(), offered.cost.tolist(), strict=True
        ):
            missing = self._missing_gb()
            use = _use(gain, cost, missing)
            # What is left to gain has changed, and with it the ranks.
            overshoots = bool(touched) and gain > missing
            if missing <= GRAIN_GB or use < least or overshoots:
                break
            least = max(least, CLOSE * use)
            here = set(gains.server[places[places >= 0]].tolist())
            if touched & here:
                continue
            if not spent.allows(int(cost)):
                self._fill(gains, gain, int(cost), spent, touched)
                break
            self._turn(gains, places)
            spent.shards += int(cost)
            touched |= here
        return touched

    def _offers(self, gains: Gains, most_cost: int | None) -> Offered:
        """The best ranked cycles, exactly, the most useful first."""
        missing = self._missing_gb()
        pairs, use = _pairs(gains, missing, most_cost)
        threes = _threes(gains, use, most_cost)
        cycles = np.concatenate([pairs, threes])
        gain, cost = self._exactly(gains, cycles)
        worth = np.minimum(gain, missing) / np.maximum(cost, FREE)
        keep = gain > GRAIN_GB
        if most_cost is not None:
            keep &= cost <= most_cost
        order = np.lexsort((-gain, -worth))
        order = order[keep[order]]
        return Offered(cycles[order], gain[order], cost[order])

    def _exactly(self, gains: Gains, cycles: Ints) -> tuple[Floats, Floats]:
        """What cycles gain and cost."""
        after = _next(cycles)
        real = cycles >= 0
        rows, server = gains.content(cycles[real], gains.group[after[real]])
        gain, cost = np.zeros(cycles.shape), np.zeros(cycles.shape)
        gain[real] = self.prices[server] - priced(self.layout, self.judge, rows, server)
        cost[real] = gains.cost[cycles[real], after[real]]
        total: Floats = gain.sum(axis=1)
        shards: Floats = cost.sum(axis=1)
        return total, shards

    def _turn(self, gains: Gains, places: Ints) -> None:
        """Make one cycle."""
        places = places[places >= 0]
        rows, server = gains.content(places, gains.group[np.roll(places, -1)])
        self.prices[server] = priced(self.layout, self.judge, rows, server)
        self.layout.slots[server] = packed(rows, self.layout.slots.shape[1])

    def _fill(
        self, gains: Gains, most_gain: float, most_cost: int, spent: Spent, touched: set[int]
    ) -> None:
        """Spend what is left when the next cycle costs too much: on the best one or two others.

        They may not gain more than that cycle, so that a limit that allows it covers as much.
        """
        spent.is_out = True
        assert spent.limit is not None, "only a limit cuts the path short"
        left = spent.limit - spent.shards
        gains.refresh(np.array(sorted(touched), dtype=np.int64))
        # A pool for every number of shards up to what is left: with more left it only grows.
        pools = [self._offers(gains, cost) for cost in range(min(left, most_cost - 1) + 1)]
        pool = [
            (gain, int(cost), set(gains.server[places[places >= 0]].tolist()), places)
            for offered in pools
            for places, gain, cost in zip(
                offered.places, offered.gain.tolist(), offered.cost.tolist(), strict=True
            )
        ]
        best: tuple[float, int, list[Ints]] = (0.0, 0, [])
        for index, (gain, cost, servers, places) in enumerate(pool):
            if best[0] < gain <= most_gain and cost <= left:
                best = gain, cost, [places]
            for other_gain, other_cost, others, more in pool[:index]:
                total = gain + other_gain
                fits = cost + other_cost <= left and not servers & others
                if fits and best[0] < total <= most_gain:
                    best = total, cost + other_cost, [places, more]
        for places in best[2]:
            self._turn(gains, places)
        spent.shards += best[1]


def _use(gain: float, cost: float, missing_gb: float) -> float:
    """GB per shard; beyond what is missing a gain is of no use."""
    return min(gain, missing_gb) / max(cost, FREE)


def _next(cycles: Ints) -> Ints:
    """The place whose group each place gets."""
    after = np.roll(cycles, -1, axis=1)
    short = cycles[:, -1] < 0
    after[short, 1] = cycles[short, 0]
    return after


def _pairs(gains: Gains, missing_gb: float, most_cost: int | None) -> tuple[Ints, float]:
    """Cycles of two by what they bring per shard, and the most that one brings."""
    x, y = np.nonzero(gains.gain > GRAIN_GB)
    back = gains.gain[y, x]
    # Where both gain, the pair is found from both sides.
    once = (back > NEVER / 2) & ((back <= GRAIN_GB) | (x < y))
    x, y, back = x[once], y[once], back[once]
    total = gains.gain[x, y] + back
    cost = gains.cost[x, y] + gains.cost[y, x]
    use = np.minimum(total, missing_gb) / np.maximum(cost, FREE)
    use[total <= GRAIN_GB] = 0.0
    if most_cost is not None:
        use[cost > most_cost] = 0.0
    best = _largest(use)
    cycles = np.column_stack([x[best], y[best], np.full(len(best), -1)])
    return cycles, float(use.max(initial=0.0))


def _threes(gains: Gains, use: float, most_cost: int | None) -> Ints:
    """Cycles of three that bring more than `use` per shard."""
    profit = gains.gain - use * gains.cost
    most_here, most_there = profit.max(axis=1), profit.max(axis=0)
    x, y = np.nonzero(profit > GRAIN_GB)
    hoped = profit[x, y] + most_here[y] + most_there[x]
    first = _largest(hoped, STARTS)
    x, y = x[first], y[first]
    total = profit[x, y][:, None] + profit[y] + profit[:, x].T
    if most_cost is not None:
        cost = gains.cost[x, y][:, None] + gains.cost[y] + gains.cost[:, x].T
        total[cost > most_cost] = 0.0
    best = _largest(total.ravel())
    start, z = np.divmod(best, total.shape[1])
    return np.column_stack([x[start], y[start], z])


def _largest(values: Floats, count: int = OFFERED) -> Ints:
    """Positions of the largest positive values, at most `count`, in a fixed order."""
    positive = np.nonzero(values > GRAIN_GB)[0]
    if len(positive) > count:
        worst = np.partition(values[positive], len(positive) - count)[len(positive) - count]
        above = positive[values[positive] > worst]
        ties = positive[values[positive] == worst][: count - len(above)]
        positive = np.sort(np.concatenate([above, ties]))
    return positive
