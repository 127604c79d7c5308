"""Exchanges that raise the demand covered, under thresholds on memory and count.

The same neighbourhood as `exchange` (disjoint pairs of servers, up to two groups for up to two),
but each exchange is judged by the exact coverage of both servers, computed for all exchanges of a
round at once. Servers within the thresholds cost what they fail to cover; beyond, every GB and
every shard of excess costs more than it could cover.

Pairs may get slightly worse early on (threshold accepting) so that the search leaves the plateaus
that equal sizes make; the best layout seen is what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.coverage.prefixes import covered_gb
from aqua_placer.coverage.rosters import Roster, at_most_gb, roster
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.programs.thresholds import Mode
from aqua_placer.search.exchange import Aim, Effort, Layout, excess, subsets

MAX_ROWS: Final = 60_000
"""Exchanges judged at once: some 50 MB of columns."""

EVERYONE_EVERY: Final = 4
"""Every fourth round pairs all servers; the others only those that lose coverage."""

EXCESS_PRICE: Final = 3.0
"""GB of coverage that a GB beyond the memory threshold costs: above any gain from it."""


@dataclass(frozen=True, eq=False)
class Judge:
    """Prices a server's content, in GB of coverage; lower is better."""

    aim: Aim
    rosters: tuple[Roster, ...]
    wants_coverage: bool = True
    excess_price: float = EXCESS_PRICE

    def price(self, rows: Ints, kind: Ints, mem: Floats, cnt: Ints) -> Floats:
        """Price of contents `rows` (group index per slot) on servers of class `kind`."""
        if not self.wants_coverage:
            return self.penalty(mem, cnt)
        return self.penalty(mem, cnt) - self._by_class(covered_gb, rows, kind)

    def at_most_gb(self, rows: Ints, kind: Ints) -> Floats:
        """No less than what the contents are credited for, at a fraction of the time."""
        if not self.wants_coverage:
            return np.zeros(len(rows))
        return self._by_class(at_most_gb, rows, kind)

    def _by_class(
        self, measure: Callable[[Roster, Ints], Floats], rows: Ints, kind: Ints
    ) -> Floats:
        result = np.zeros(len(rows))
        for index, table in enumerate(self.rosters):
            here = slice(None) if len(self.rosters) == 1 else kind == index
            result[here] = measure(table, rows[here])
        return result

    def penalty(self, mem: Floats, cnt: Ints) -> Floats:
        """What exceeding the thresholds costs."""
        key = np.abs(cnt) if self.aim.mode is Mode.ABS else cnt
        over_cnt = np.maximum(key - self.aim.cnt, 0) * self.aim.hbm_gb
        return self.excess_price * (excess(mem, self.aim) + over_cnt)


def judge_for(layout: Layout, aim: Aim) -> Judge:
    """A judge of this layout's groups."""
    instance = layout.instance
    return Judge(
        aim=aim,
        rosters=tuple(
            roster(instance.tp, instance.r_gb[:, kind], instance.weight, gpus)
            for kind, gpus in enumerate(instance.servers.gpus.tolist())
        ),
    )


def pursue(
    layout: Layout,
    judge: Judge,
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
    prices = judge.price(layout.slots, layout.class_of, layout.mem_gb(), layout.counts())
    best, best_slots, idle = float(prices.sum()), layout.slots.copy(), 0
    scarce = scarcer_side(layout)
    for index in range(rounds):
        if budget.expired() or idle > effort.patience or best <= -target_gb + GRAIN_GB:
            break
        tolerance = effort.tolerance * max(0.0, 1 - index / (0.7 * rounds))
        layout.shuffle(rng, effort.order)
        loss = scarce[layout.slots, layout.class_of[:, None]].sum(axis=1) + prices
        a, b = draw_pairs(loss, rng, everyone=index % EVERYONE_EVERY == 0)
        for at in range(0, len(a), chunk):
            part = slice(at, at + chunk)
            _exchange(layout, judge, prices, a[part], b[part], table, rng, tolerance)
        total = float(prices.sum())
        idle += 1
        if total < best - max(1e-9, 1e-6 * abs(best)):
            idle = 0
        if total < best:
            best, best_slots = total, layout.slots.copy()
    layout.slots = best_slots
    return best


def scarcer_side(layout: Layout) -> Floats:
    """GB that each group could contribute on the side that runs out first, (groups + 1, classes).

    Where spare memory is scarce a server loses what its producers lend to nobody; where demand is,
    what its consumers are denied.
    """
    weight = np.append(layout.instance.weight, 0.0)[:, None]
    spare: Floats = np.maximum(layout.mem, 0.0)
    need: Floats = np.maximum(-layout.mem, 0.0) * weight
    return spare if spare.sum() <= need.sum() else need


def draw_pairs(loss: Floats, rng: np.random.Generator, *, everyone: bool) -> tuple[Ints, Ints]:
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
class Offers:
    """Exchanges worth making, at most one per pair, as contents after the exchange.

    `pair` indexes the pairs that were asked about; `price_a` and `price_b` are the new prices.
    """

    pair: Ints
    rows_a: Ints
    rows_b: Ints
    price_a: Floats
    price_b: Floats

    def only(self, index: int) -> Offers:
        """One of them."""
        one = slice(index, index + 1)
        return Offers(
            self.pair[one],
            self.rows_a[one],
            self.rows_b[one],
            self.price_a[one],
            self.price_b[one],
        )


def _exchange(
    layout: Layout,
    judge: Judge,
    prices: Floats,
    a: Ints,
    b: Ints,
    table: Ints,
    rng: np.random.Generator,
    tolerance: float,
) -> None:
    offers = best_exchanges(layout, judge, prices, (a, b), table, rng, tolerance=tolerance)
    if offers is not None:
        adopt(layout, prices, a[offers.pair], b[offers.pair], offers)


def adopt(layout: Layout, prices: Floats, a: Ints, b: Ints, offers: Offers) -> None:
    """Make the exchanges: all of them, `a` and `b` being their servers."""
    width = layout.slots.shape[1]
    layout.slots[a] = packed(offers.rows_a, width)
    layout.slots[b] = packed(offers.rows_b, width)
    prices[a] = offers.price_a
    prices[b] = offers.price_b


def best_exchanges(
    layout: Layout,
    judge: Judge,
    prices: Floats,
    pairs: tuple[Ints, Ints],
    table: Ints,
    rng: np.random.Generator,
    *,
    tolerance: float,
    toll: Toll | None = None,
) -> Offers | None:
    """The best exchange of each disjoint pair, if that gets worse by less than `tolerance`.

    Args:
        toll: What migrations cost on top, for re-placement.
    """
    a, b = pairs
    held_a, held_b = layout.slots[a], layout.slots[b]
    pad = np.full((len(a), 1), -1, dtype=np.int64)
    window = layout.window(table.shape[1])
    sets_a = np.concatenate([held_a[:, :window], pad], axis=1)[:, table]
    sets_b = np.concatenate([held_b[:, :window], pad], axis=1)[:, table]
    cells = _candidates(layout, a, b, sets_a, sets_b, table)
    if len(cells[0]) > MAX_ROWS:
        keep = np.sort(rng.choice(len(cells[0]), MAX_ROWS, replace=False))
        cells = (cells[0][keep], cells[1][keep], cells[2][keep])
    pair, i, j = cells
    if not len(pair):
        return None
    rows_a = _after(held_a, pair, table[i], sets_b[pair, j], window)
    rows_b = _after(held_b, pair, table[j], sets_a[pair, i], window)
    kind_a, kind_b = layout.class_of[a[pair]], layout.class_of[b[pair]]
    mem_a = layout.mem[rows_a, kind_a[:, None]].sum(axis=1)
    mem_b = layout.mem[rows_b, kind_b[:, None]].sum(axis=1)
    cnt_a = layout.cnt[rows_a, kind_a[:, None]].sum(axis=1)
    cnt_b = layout.cnt[rows_b, kind_b[:, None]].sum(axis=1)
    now = prices[a] + prices[b]
    extra = np.zeros(len(pair))
    if toll is not None:
        extra = toll.of(rows_a, a[pair]) + toll.of(rows_b, b[pair])
        extra -= (toll.of(held_a, a) + toll.of(held_b, b))[pair]
    # Most exchanges lose even if both servers covered all that they could, or the second one did:
    # exact coverage takes many times as long as a bound.
    owed = judge.penalty(mem_a, cnt_a) + judge.penalty(mem_b, cnt_b) + extra
    most_b = judge.at_most_gb(rows_b, kind_b)
    limit = now[pair] + tolerance + most_b - owed
    keep = np.nonzero(judge.at_most_gb(rows_a, kind_a) > -limit)[0]
    price_a = judge.price(rows_a[keep], kind_a[keep], mem_a[keep], cnt_a[keep])
    covered_a = judge.penalty(mem_a[keep], cnt_a[keep]) - price_a
    left = covered_a > -limit[keep]
    keep, price_a = keep[left], price_a[left]
    if not len(keep):
        return None
    price_b = judge.price(rows_b[keep], kind_b[keep], mem_b[keep], cnt_b[keep])
    total = price_a + price_b + extra[keep]
    pair = pair[keep]
    # Equal exchanges are common; a random order among them keeps the search moving.
    order = np.lexsort((rng.random(len(total)), np.round(total, 6), pair))
    first = order[np.r_[True, pair[order][1:] != pair[order][:-1]]]
    chosen = first[total[first] < now[pair[first]] + tolerance - 1e-9]
    if not len(chosen):
        return None
    return Offers(
        pair[chosen], rows_a[keep[chosen]], rows_b[keep[chosen]], price_a[chosen], price_b[chosen]
    )


@dataclass(frozen=True, eq=False)
class Toll:
    """The price of migrations: GB of coverage per shard that is not where it was.

    `home` has the server of each group today, -1 for none, and one entry more for empty slots.
    """

    home: Ints
    size: Ints
    gb_per_shard: float

    def of(self, rows: Ints, server: Ints) -> Floats:
        """Toll of contents `rows` on the given servers."""
        return self.shards(rows, server).astype(np.float64) * self.gb_per_shard

    def shards(self, rows: Ints, server: Ints) -> Ints:
        """Shards in `rows` that came from another server."""
        home = self.home[rows]
        away: Ints = (self.size[rows] * ((home >= 0) & (home != server[:, None]))).sum(axis=1)
        return away


def _candidates(
    layout: Layout, a: Ints, b: Ints, sets_a: Ints, sets_b: Ints, table: Ints
) -> tuple[Ints, Ints, Ints]:
    """Exchanges (pair, set of a, set of b) that fit, use distinct slots and change something."""
    size_a, size_b = layout.size[sets_a].sum(axis=2), layout.size[sets_b].sum(axis=2)
    capacity = layout.instance.servers.capacity
    free_a = capacity[a] - layout.size[layout.slots[a]].sum(axis=1)
    free_b = capacity[b] - layout.size[layout.slots[b]].sum(axis=1)
    real = table < layout.window(table.shape[1])
    whole_a: Bools = np.all((sets_a >= 0) == real, axis=2)
    whole_b: Bools = np.all((sets_b >= 0) == real, axis=2)
    grow = size_b[:, None, :] - size_a[:, :, None]
    fits: Bools = (
        (grow <= free_a[:, None, None])
        & (-grow <= free_b[:, None, None])
        & whole_a.reshape(*sets_a.shape[:2], 1)
        & whole_b.reshape(sets_b.shape[0], 1, -1)
    )
    if layout.frozen is not None:
        fits &= ~np.any(layout.frozen[sets_a], axis=2).reshape(*sets_a.shape[:2], 1)
        fits &= ~np.any(layout.frozen[sets_b], axis=2).reshape(len(sets_b), 1, -1)
    gone_a = layout.mem[sets_a].sum(axis=2)
    gone_b = layout.mem[sets_b].sum(axis=2)
    same: Bools = np.all(np.abs(gone_a[:, :, None] - gone_b[:, None, :]) < GRAIN_GB, axis=3)
    few = real.sum(axis=1) <= 1
    single = np.logical_and.outer(few, few)
    # Like for like changes nothing (of one weight); equal sums of unlike groups may.
    if np.ptp(layout.instance.weight) == 0:
        fits &= ~(same & single & (grow == 0))
    pair, i, j = np.nonzero(fits)
    return pair, i, j


def _after(held: Ints, pair: Ints, gone: Ints, arriving: Ints, window: int) -> Ints:
    """Contents after the exchange, wider than a server's slots by the arrivals.

    Args:
        gone: Slots that are emptied; `window` stands for none.
    """
    width = held.shape[1]
    rows = np.concatenate([held[pair], np.full((len(pair), 1), -1)], axis=1)
    gone = np.where(gone == window, width, gone)
    rows[np.arange(len(pair))[:, None], gone] = -1
    rows[:, -1] = -1
    return np.concatenate([rows[:, :-1], arriving], axis=1)


def packed(rows: Ints, width: int) -> Ints:
    """Groups first, empty slots cut off down to `width`."""
    order = np.argsort(rows < 0, axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1)[:, :width]
