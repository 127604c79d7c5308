"""Exchanges between pairs of servers: from a rough placement to a balanced one.

Every round draws pairs of servers, tries in each pair all exchanges of up to `order` groups for up
to `order` groups (an empty side is a move into unused GPUs, two singles may change places with a
pair), and takes the best one of each pair if it lowers the pair's cost. Once few servers exceed,
each is tried with many partners and takes the best of them. All pairs are evaluated at once in
numpy, so a round costs the same per GPU from a rack to 65,536 GPUs.

The cost of a server is the square of what it exceeds the wanted thresholds by, plus a trace of
its distance to the mean, which makes room for later exchanges. It never exchanges what would
overfill a server. Nothing here is a bound: `thresholds` proves, this finds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.problem.instance import GRAIN_GB, PairServers, PerRow, PerServer, SlotSets
from aqua_placer.search.layout import Effort, ExchangeNeighbourhood, Layout, subsets
from aqua_placer.value.balance import keyed

MAX_CELLS: Final = 60_000
"""Exchanges evaluated at once: half a MB a column, so that columns stay in the cache and the
allocator keeps their memory; with more, fresh pages took most of a round.
Doubled, columns leave the cache."""

EARLY_ROUNDS: Final = 24
"""Rounds in which a large cluster pairs extremes as well while more than `MAX_BAD` servers exceed;
later only those that do. Doubled, up to as many more rounds look at all servers."""

# Servers that exceed, above which a cluster counts as large; chosen by hand. Doubled, clusters
# twice as large pair extremes to the end.
MAX_BAD: Final = 256

# Pairs of servers in a round for those that exceed, for exchanges of single groups and of two.
# Doubled, a round takes twice as long and as many rounds are needed.
MAX_BAD_SINGLES: Final = 4_096
MAX_BAD_PAIRS: Final = 256

MAX_PARTNERS: Final = 64
"""Partners that a server which exceeds is tried with in one round; doubled, half as many servers
are tried once few pairs are left."""

ROOMIEST: Final = 3
"""Times as many servers as are needed, those with most room, that partners are drawn from: 1 would
draw the same ones every round, twice as many half as roomy ones."""

MEAN_WEIGHT: Final = 1e-6
"""Weight of the distance to the mean beside the squared excess: it breaks ties and nothing else,
also when doubled."""


def excess(
    values: Float64[np.ndarray, " values"], aim: Thresholds
) -> Float64[np.ndarray, " values"]:
    """GB by which memory sums exceed the aim."""
    over: Float64[np.ndarray, " values"] = np.maximum(keyed(values, aim.mode) - aim.mem_gb, 0.0)
    return over


def excess_count(cnt: Int64[np.ndarray, " rows"], aim: Thresholds) -> PerRow:
    """Shards by which counts exceed the aim."""
    over: PerRow = np.maximum(keyed(cnt, aim.mode) - aim.cnt, 0.0)
    return over


def _cost(mem: PerRow, cnt: PerRow, aim: Thresholds, mean: float) -> PerRow:
    over, over_cnt = excess(mem, aim), excess_count(cnt, aim) * aim.hbm_gb
    cost: PerRow = over * over + over_cnt * over_cnt + MEAN_WEIGHT * (mem - mean) ** 2
    return cost


def exchange_pairs(
    layout: Layout,
    a: PairServers,
    b: PairServers,
    table: SlotSets,
    aim: Thresholds,
    mean: float,
    *,
    tolerance: float = 0.0,
) -> int:
    """Best exchange in each pair (a[i], b[i]); returns how many were made.

    Args:
        a: Servers that look for an exchange; one that is named several times takes its best.
        b: Their partners, all distinct and none of them in `a`.
        tolerance: GB squared by which a pair may get worse; 0 only accepts what is better.
    """
    if not len(a):
        return 0
    chunk = max(1, MAX_CELLS // (len(table) ** 2))
    return sum(
        _exchange_chunk(layout, a[at : at + chunk], b[at : at + chunk], table, aim, mean, tolerance)
        for at in range(0, len(a), chunk)
    )


def _exchange_chunk(
    layout: Layout,
    a: PairServers,
    b: PairServers,
    table: SlotSets,
    aim: Thresholds,
    mean: float,
    tolerance: float,
) -> int:
    pairs = np.arange(len(a))
    exchanging = ExchangeNeighbourhood.between(layout, a, b, table)
    from_a, from_b = exchanging.sets_a, exchanging.sets_b
    kind_a, kind_b = layout.class_of[a][:, None, None], layout.class_of[b][:, None, None]

    def change(
        column: Float64[np.ndarray, "*cells"] | Int64[np.ndarray, "*cells"],
    ) -> tuple[
        Float64[np.ndarray, "*cells"] | Int64[np.ndarray, "*cells"],
        Float64[np.ndarray, "*cells"] | Int64[np.ndarray, "*cells"],
    ]:
        """What each exchange adds to a and to b, (pairs, sets of a, sets of b)."""
        lost_a, lost_b = column[from_a, kind_a].sum(axis=2), column[from_b, kind_b].sum(axis=2)
        if len(layout.instance.servers.counts) == 1:
            delta = lost_b[:, None, :] - lost_a[:, :, None]
            return delta, -delta
        won_a, won_b = column[from_b, kind_a].sum(axis=2), column[from_a, kind_b].sum(axis=2)
        return won_a[:, None, :] - lost_a[:, :, None], won_b[:, :, None] - lost_b[:, None, :]

    (mem_a, cnt_a), (mem_b, cnt_b) = layout.sums(a), layout.sums(b)
    more_a, more_b = change(layout.mem)
    step_a, step_b = change(layout.cnt)
    cost = _cost(mem_a[:, None, None] + more_a, cnt_a[:, None, None] + step_a, aim, mean) + _cost(
        mem_b[:, None, None] + more_b, cnt_b[:, None, None] + step_b, aim, mean
    )
    cost[~exchanging.fits] = np.inf
    # To exchange nothing, or like for like, is not a step.
    cost[(np.abs(more_a) < GRAIN_GB) & (step_a == 0)] = np.inf
    flat = cost.reshape(len(a), -1)
    best = flat.argmin(axis=1)
    now = _cost(mem_a, cnt_a, aim, mean) + _cost(mem_b, cnt_b, aim, mean)
    gain = now - flat[pairs, best]
    better = np.nonzero(gain > 1e-9 - tolerance)[0]
    # A server with several partners takes the best of them.
    better = better[np.argsort(-gain[better], kind="stable")]
    better = np.sort(better[np.unique(a[better], return_index=True)[1]])
    rows_a, rows_b = exchanging.contents(better, *np.divmod(best[better], len(table)))
    layout.put(a[better], rows_a)
    layout.put(b[better], rows_b)
    return len(better)


def improve_balance(
    layout: Layout,
    aim: Thresholds,
    rng: np.random.Generator,
    budget: Budget,
    effort: Effort,
    *,
    only_bad: bool = False,
) -> float:
    """Exchange until every server is within the aim, or nothing more is found.

    Args:
        effort: Its tolerance is in GB squared.
        only_bad: Every round pairs the servers that exceed, and no others.

    Returns:
        The largest excess left, in GB (a count too large counts as H per shard); 0 when reached.
    """
    rounds, order = effort.rounds, effort.order
    table = subsets(layout.window(order), order)
    idle, best = 0, np.inf
    best_slots, best_worst = layout.slots.copy(), np.inf
    for index in range(rounds + 1):
        mem, cnt = layout.sums()
        mean = float(mem.mean())
        over = excess(mem, aim) + excess_count(cnt, aim) * aim.hbm_gb
        worst = float(over.max())
        total = float((over * over).sum())
        if worst < best_worst:
            best_slots, best_worst = layout.slots.copy(), worst
        if worst <= GRAIN_GB or index == rounds or budget.expired():
            break
        idle = 0 if total < best * 0.999 else idle + 1
        best = min(best, total)
        if idle > effort.patience:
            break
        layout.shuffle(rng, order)
        bad = int((over > GRAIN_GB).sum())
        many = bad > MAX_BAD and index < EARLY_ROUNDS
        if index % 3 == 0 and not only_bad and (many or len(over) <= MAX_BAD):
            by_mem = np.argsort(mem, kind="stable")
            half = len(by_mem) // 2
            a, b = by_mem[:half], by_mem[::-1][:half]
            exchange_pairs(layout, a, b, table, aim, mean)
        else:
            limit = MAX_BAD_PAIRS if order > 1 else MAX_BAD_SINGLES
            if index % 2 or bad > limit:
                a, b = _bad_with_any(over, rng, limit)
            else:
                a, b = _bad_with_roomy(over, mem, rng, limit)
            # A server that exceeds by less than half of the worst's square does not show.
            tolerance = min(effort.tolerance, worst * worst / 2)
            exchange_pairs(layout, a, b, table, aim, mean, tolerance=tolerance)
    layout.slots = best_slots
    return best_worst


def _bad_with_any(
    over: PerServer, rng: np.random.Generator, limit: int
) -> tuple[PairServers, PairServers]:
    """The servers that exceed, each with a partner drawn from the rest; a few of those as well."""
    shuffled = rng.permutation(len(over))
    shuffled = shuffled[np.argsort(-over[shuffled], kind="stable")]
    half = len(shuffled) // 2
    bad = int((over > GRAIN_GB).sum())
    first = shuffled[: min(max(2 * bad, 8), half, limit)]
    rest = rng.permutation(shuffled[len(first) :])
    return first, rest[: len(first)]


def _bad_with_roomy(
    over: PerServer, mem: PerRow, rng: np.random.Generator, limit: int
) -> tuple[PairServers, PairServers]:
    """The servers that exceed, each with several of those that have most room for what it has.

    Near the mean few servers have room for more than a little, and a server of one group has few
    exchanges to offer: the last ones find none among partners drawn from all.
    """
    bad = np.nonzero(over > GRAIN_GB)[0]
    bad = bad[np.argsort(-over[bad], kind="stable")][: min(limit, len(over) // 2)]
    side = np.sign(mem[bad] @ over[bad])
    rest = np.setdiff1d(np.arange(len(over)), bad)
    rest = rest[np.argsort(side * mem[rest], kind="stable")]
    each = min(MAX_PARTNERS, max(1, min(limit, len(rest)) // len(bad)))
    rest = rng.permutation(rest[: ROOMIEST * each * len(bad)])[: each * len(bad)]
    return np.repeat(bad, each)[: len(rest)], rest
