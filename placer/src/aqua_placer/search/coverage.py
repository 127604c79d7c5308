"""Exchanges that raise the demand covered, under thresholds on memory and count.

The same neighbourhood as `balance` (disjoint pairs of servers, up to two groups for up to two),
but each exchange is priced by the exact coverage of both servers, computed for all exchanges of a
round at once. Servers within the thresholds cost what they fail to cover; beyond, every GB and
every shard of excess costs more than it could cover.

Pairs may get slightly worse early on (threshold accepting) so that the search leaves the plateaus
that equal sizes make; the best layout seen is what remains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.problem.instance import (
    GRAIN_GB,
    Contents,
    PairServers,
    PerRow,
    PerServer,
    SlotSets,
)
from aqua_placer.search.balance import excess, excess_count
from aqua_placer.search.layout import Effort, ExchangeNeighbourhood, Layout, subsets
from aqua_placer.value.coverage import GroupTable, at_most_gb, by_class, covered_gb

MAX_ROWS: Final = 60_000
"""Exchanges priced at once: some 50 MB of columns; doubled, twice that."""

ALL_EVERY: Final = 4
"""Every fourth round pairs all servers; the others only those that lose coverage. Doubled,
servers that lose nothing but could help are tried half as often."""

EXCESS_PRICE: Final = 3.0
"""GB of coverage that a GB beyond the memory threshold costs: above any gain from it, also when
doubled."""


@dataclass(frozen=True, eq=False)
class ServerCost:
    """Prices a server's content, in GB of coverage; lower is better.

    Attributes:
        tables: Of each server class; empty where coverage is not wanted.
    """

    aim: Thresholds
    tables: tuple[GroupTable, ...]

    def price(
        self,
        rows: Contents,
        kind: Int64[np.ndarray, " rows"],
        mem: PerRow,
        cnt: Int64[np.ndarray, " rows"],
    ) -> PerRow:
        """Price of contents `rows` (group index per slot) on servers of class `kind`."""
        price: PerRow = self.penalty(mem, cnt) - by_class(covered_gb, self.tables, rows, kind)
        return price

    def at_most_gb(self, rows: Contents, kind: Int64[np.ndarray, " rows"]) -> PerRow:
        """No less than what the contents are credited for, at a fraction of the time."""
        return by_class(at_most_gb, self.tables, rows, kind)

    def penalty(self, mem: PerRow, cnt: Int64[np.ndarray, " rows"]) -> PerRow:
        """What exceeding the thresholds costs."""
        over_cnt = excess_count(cnt, self.aim) * self.aim.hbm_gb
        return EXCESS_PRICE * (excess(mem, self.aim) + over_cnt)


def improve_coverage(
    layout: Layout,
    cost: ServerCost,
    rng: np.random.Generator,
    budget: Budget,
    effort: Effort,
    *,
    target_gb: float,
) -> float:
    """Exchange until `target_gb` is covered within the thresholds, or nothing more is found.

    Args:
        effort: Its tolerance is in GB, and falls to 0 over the rounds.

    Returns:
        The total price of the layout that remains: minus the coverage when within thresholds.
    """
    rounds = effort.rounds
    table = subsets(layout.window(effort.order), effort.order)
    chunk = max(1, MAX_ROWS // len(table))
    prices = cost.price(layout.slots, layout.class_of, *layout.sums())
    best, best_slots, idle = float(prices.sum()), layout.slots.copy(), 0
    scarce = scarcer_side(layout)
    for index in range(rounds):
        if budget.expired() or idle > effort.patience or best <= -target_gb + GRAIN_GB:
            break
        tolerance = effort.tolerance * max(0.0, 1 - index / (0.7 * rounds))
        layout.shuffle(rng, effort.order)
        loss = scarce[layout.slots, layout.class_of[:, None]].sum(axis=1) + prices
        a, b = draw_pairs(loss, rng, everyone=index % ALL_EVERY == 0)
        for at in range(0, len(a), chunk):
            part = slice(at, at + chunk)
            pairs = a[part], b[part]
            found = best_exchanges(layout, cost, prices, pairs, table, rng, tolerance=tolerance)
            if found is not None:
                make(layout, prices, found)
        total = float(prices.sum())
        idle += 1
        if total < best - max(1e-9, 1e-6 * abs(best)):
            idle = 0
        if total < best:
            best, best_slots = total, layout.slots.copy()
    layout.slots = best_slots
    return best


def scarcer_side(layout: Layout) -> Float64[np.ndarray, "groups_and_none classes"]:
    """GB that each group could contribute on the side that runs out first, (groups + 1, classes).

    Where spare memory is scarce a server loses what its producers keep idle; where demand is,
    what its consumers are denied.
    """
    weight = np.append(layout.instance.weight, 0.0)[:, None]
    spare: Float64[np.ndarray, "groups_and_none classes"] = np.maximum(layout.mem, 0.0)
    need: Float64[np.ndarray, "rows width"] = np.maximum(-layout.mem, 0.0) * weight
    return spare if spare.sum() <= need.sum() else need


def draw_pairs(
    loss: PerServer, rng: np.random.Generator, *, everyone: bool
) -> tuple[PairServers, PairServers]:
    """Disjoint pairs: any with any, or the servers that lose with any other."""
    shuffled = rng.permutation(len(loss))
    half = len(loss) // 2
    if everyone:
        return shuffled[:half], shuffled[half : 2 * half]
    losing = loss[shuffled] > GRAIN_GB
    ordered = np.concatenate([shuffled[losing], shuffled[~losing]])
    first = ordered[: min(max(int(losing.sum()), 8), half)]
    rest = rng.permutation(ordered[len(first) :])
    return first, rest[: len(first)]


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Exchanges worth making, at most one per pair, as contents after the exchange.

    `a` and `b` are the servers; `price_a` and `price_b` are the new prices.
    """

    a: Int64[np.ndarray, " offers"]
    b: Int64[np.ndarray, " offers"]
    rows_a: Int64[np.ndarray, "offers width"]
    rows_b: Int64[np.ndarray, "offers width"]
    price_a: Float64[np.ndarray, " offers"]
    price_b: Float64[np.ndarray, " offers"]

    def only(self, index: int) -> Exchanges:
        """One of them."""
        return Exchanges(**{name: column[[index]] for name, column in vars(self).items()})


def make(layout: Layout, prices: PerServer, exchanges: Exchanges) -> None:
    """Make the exchanges, all of them."""
    a, b = exchanges.a, exchanges.b
    layout.put(a, exchanges.rows_a)
    layout.put(b, exchanges.rows_b)
    prices[a], prices[b] = exchanges.price_a, exchanges.price_b


def best_exchanges(
    layout: Layout,
    cost: ServerCost,
    prices: PerServer,
    pairs: tuple[PairServers, PairServers],
    table: SlotSets,
    rng: np.random.Generator,
    *,
    tolerance: float,
    migration: MigrationCost | None = None,
) -> Exchanges | None:
    """The best exchange of each disjoint pair, if that gets worse by less than `tolerance`.

    Args:
        migration: What migrations cost on top, for re-placement.
    """
    a, b = pairs
    exchanging = ExchangeNeighbourhood.between(layout, a, b, table)
    pair, i, j = np.nonzero(exchanging.fits)
    if len(pair) > MAX_ROWS:
        keep = np.sort(rng.choice(len(pair), MAX_ROWS, replace=False))
        pair, i, j = pair[keep], i[keep], j[keep]
    if not len(pair):
        return None
    rows_a, rows_b = exchanging.contents(pair, i, j)
    kind_a, kind_b = layout.class_of[a[pair]], layout.class_of[b[pair]]
    (mem_a, cnt_a), (mem_b, cnt_b) = (
        layout.sums_of(rows_a, kind_a),
        layout.sums_of(rows_b, kind_b),
    )
    now = prices[a] + prices[b]
    extra = np.zeros(len(pair))
    if migration is not None:
        extra = migration.of(rows_a, a[pair]) + migration.of(rows_b, b[pair])
        extra -= (migration.of(layout.slots[a], a) + migration.of(layout.slots[b], b))[pair]
    # Most exchanges lose even if both servers covered all that they could, or the second one did:
    # exact coverage takes many times as long as a bound.
    owed = cost.penalty(mem_a, cnt_a) + cost.penalty(mem_b, cnt_b) + extra
    most_b = cost.at_most_gb(rows_b, kind_b)
    limit = now[pair] + tolerance + most_b - owed
    keep = np.nonzero(cost.at_most_gb(rows_a, kind_a) > -limit)[0]
    price_a = cost.price(rows_a[keep], kind_a[keep], mem_a[keep], cnt_a[keep])
    covered_a = cost.penalty(mem_a[keep], cnt_a[keep]) - price_a
    left = covered_a > -limit[keep]
    keep, price_a = keep[left], price_a[left]
    if not len(keep):
        return None
    price_b = cost.price(rows_b[keep], kind_b[keep], mem_b[keep], cnt_b[keep])
    total = price_a + price_b + extra[keep]
    pair = pair[keep]
    # Equal exchanges are common; a random order among them keeps the search moving.
    order = np.lexsort((rng.random(len(total)), np.round(total, 6), pair))
    first = order[np.r_[True, pair[order][1:] != pair[order][:-1]]]
    chosen = first[total[first] < now[pair[first]] + tolerance - 1e-9]
    if not len(chosen):
        return None
    pair, kept = pair[chosen], keep[chosen]
    return Exchanges(a[pair], b[pair], rows_a[kept], rows_b[kept], price_a[chosen], price_b[chosen])


@dataclass(frozen=True, eq=False)
class MigrationCost:
    """The price of migrations: GB of coverage per shard that is not where it was.

    `home` has the server of each group today, -1 for none, and one entry more for empty slots.
    """

    home: Int64[np.ndarray, " groups_and_none"]
    size: Int64[np.ndarray, " groups_and_none"]
    gb_per_shard: float

    def of(self, rows: Contents, server: Int64[np.ndarray, " rows"]) -> PerRow:
        """GB for contents `rows` on the given servers."""
        return self.shards(rows, server) * self.gb_per_shard

    def shards(
        self, rows: Contents, server: Int64[np.ndarray, " rows"]
    ) -> Int64[np.ndarray, " rows"]:
        """Shards in `rows` that came from another server."""
        home = self.home[rows]
        away: Int64[np.ndarray, " rows"] = (
            self.size[rows] * ((home >= 0) & (home != server[:, None]))
        ).sum(axis=1)
        return away
