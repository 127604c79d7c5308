"""The bound on coverage that knows lockstep, weights, and what servers can be made of.

A *block* is a consumer group of t shards with t producer shards: 2t GPUs of one server, worth
`weight x t x min(need, weakest spare)`. Blocks whose weakest producer has at least s GB take their
shards from the producers that have as much, so a program over (consumer, weakest producer) with one
row a level of spare says all there is to say about who lends to whom. What blocks and the groups
beside them make of a server is a *composition*; there are a few hundred whatever the sizes in GB
are, and they say what a sum of GPUs cannot: on servers of three GPUs one block fits, not one and a
half.

The program merges neighbours in size. Its duals are then prices for all the sizes there are, and
Lagrange's bound holds at any prices: those of the producers, those of the servers, and for each
consumer the best that it could make of them. So the bound holds for every placement, and merging
costs tightness alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.linear_program import LinearModel, solve
from aqua_placer.budget import Budget
from aqua_placer.problem.contents import ContentSpace, content_space
from aqua_placer.problem.instance import Instance, Types, sign_of

TRACE: Final = 1e-9
"""Blocks: what is less is noise of the solver. Doubled, nothing changes."""

# Sizes of producers, and kinds of consumers, that the program tells apart; beyond, neighbours in
# size are merged. Twice as many of both take four times as long.
MAX_LEVELS: Final = 60
MAX_KINDS: Final = 90

MAX_COMPOSITIONS: Final = 2_500
"""Per server class; servers of 16 GPUs with groups of 1, 2 and 4 shards have 2,300. Racks have
more: their bound counts GPUs alone, which is nearly all there is to count on a rack. Doubled, wider
servers are listed, at twice the time."""


@dataclass(frozen=True, eq=False)
class Side:
    """Producers or consumers, one row for those that the program does not tell apart.

    Attributes:
        size_gb: Mean spare or need of a shard, by variant.
        count: Shards of producers, groups of consumers.
        tp: Shards of a group; 1 for producers.
        weight: Worth of a covered GB; 1 for producers.
        of_group: Kind of each group, -1 for groups of the other side.
    """

    size_gb: Float64[np.ndarray, "kinds variants"]
    count: Float64[np.ndarray, " kinds"]
    tp: Int64[np.ndarray, " kinds"]
    weight: Float64[np.ndarray, " kinds"]
    of_group: Int64[np.ndarray, " groups"]


@dataclass(frozen=True, eq=False)
class Market:
    """Who could lend to whom, where.

    Attributes:
        variant: Of each server class: classes on which every group has one size are one variant.
        lenders: Producers, in whole shards.
        borrowers: Consumers that fit some server together with their producers.
    """

    instance: Instance
    variant: Int64[np.ndarray, " classes"]
    lenders: Side
    borrowers: Side

    @classmethod
    def of(cls, instance: Instance, levels: int | None, kinds: int | None) -> Market:
        """The market, sizes merged down to about so many `levels` and `kinds`; None keeps all."""
        sizes, variant = np.unique(instance.r_gb, axis=1, return_inverse=True)
        variant = variant.reshape(-1)
        widest = np.zeros(sizes.shape[1], dtype=np.int64)
        np.maximum.at(widest, variant, instance.servers.gpus)
        fits = 2 * instance.tp[:, None] <= widest
        spare, need = np.maximum(sizes, 0.0), np.where(fits, np.maximum(-sizes, 0.0), 0.0)
        # No shard lends without a GPU beside its group for the shard that borrows.
        shards = np.minimum(instance.tp, int(widest.max()) - instance.tp)
        one, even = np.ones_like(instance.tp), np.ones(instance.num_groups)
        return cls(
            instance=instance,
            variant=variant,
            lenders=_merged(spare * (shards > 0)[:, None], shards, one, even, levels),
            borrowers=_merged(need, one, instance.tp, instance.weight, kinds),
        )

    @property
    def sizes(self) -> list[int]:
        """Shards of the groups that borrow."""
        found: list[int] = np.unique(self.borrowers.tp).tolist()
        return found


def _merged(
    size_gb: Float64[np.ndarray, "groups variants"],
    count: Int64[np.ndarray, " groups"],
    tp: Int64[np.ndarray, " groups"],
    weight: Float64[np.ndarray, " groups"],
    most: int | None,
) -> Side:
    """Kinds by (shards, weight, sizes), neighbours in size merged down to about `most` in all."""
    members = np.nonzero((size_gb > 0).any(axis=1))[0]
    sizes, number = size_gb[members], count[members].astype(np.float64)
    keys = np.column_stack([tp[members], weight[members], sizes.sum(axis=1), sizes])
    unique, kind = np.unique(keys, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    if most is not None and len(unique) > most:
        _, shape = np.unique(unique[:, :2], axis=0, return_inverse=True)
        shape = shape.reshape(-1)
        levels = max(2, most // (int(shape.max()) + 1))
        # As many sizes per level: `unique` is in the order of size within each shape.
        held = np.bincount(shape)
        rank = np.arange(len(unique)) - np.repeat(np.cumsum(held) - held, held)
        level = shape * levels + rank * np.minimum(levels, held[shape]) // held[shape]
        kind = np.unique(level, return_inverse=True)[1].reshape(-1)[kind]
    total = np.bincount(kind, weights=number)
    first = np.unique(kind, return_index=True)[1]
    mean = [np.bincount(kind, weights=number * column) / total for column in sizes.T]
    of_group = np.full(len(tp), -1, dtype=np.int64)
    of_group[members] = kind
    shape_of = tp[members][first], weight[members][first]
    return Side(np.stack(mean, axis=1), total, *shape_of, of_group)


@dataclass(frozen=True, eq=False)
class Items:
    """What servers are composed of, beside what is in `space`: contents of items.

    In order: the block of each (shards, variant), groups that stay alone by (sign, shards), which
    are consumers or neutral, and single producer shards.

    Attributes:
        available: How many there are of each when no block is made.
    """

    space: ContentSpace
    blocks: list[tuple[int, int]]
    alone: list[tuple[int, int]]
    available: Float64[np.ndarray, " items"]


def items_of(market: Market) -> Items | None:
    """The items, and what servers can be made of them; None where that is too much to list.

    None as well where groups lend on one class and borrow on another: they are no single item.
    """
    instance = market.instance
    sign = sign_of(instance.r_gb)
    if not (sign == sign[:, :1]).all():
        return None
    sign = sign[:, 0]
    rest = {(s, t) for s, t in zip(sign.tolist(), instance.tp.tolist(), strict=True) if s <= 0}
    alone = sorted(rest)
    variants = int(market.variant.max()) + 1
    blocks = [(size, variant) for size in market.sizes for variant in range(variants)]
    gpus = np.array([2 * size for size, _ in blocks] + [size for _, size in alone] + [1])
    classes = len(instance.servers.counts)
    # Blocks of another variant do not fit a class: they get a width that no server has.
    nothing, plenty = np.zeros((len(gpus), classes)), np.full(len(gpus), int(gpus.sum() + 1_024))
    items = Types(gpus, nothing, np.ones(len(gpus)), plenty, plenty[:0], nothing)
    limit = MAX_COMPOSITIONS * classes
    space = content_space(instance.servers, items, full=instance.is_full, limit=limit)
    if space is None:
        return None
    own = np.ones(len(space.rows), dtype=bool)
    for index, (_, variant) in enumerate(blocks):
        own &= (space.rows[:, index] == 0) | (market.variant[space.kind] == variant)
    rows, kind, mem_gb, cnt = (
        column[own] for column in (space.rows, space.kind, space.mem_gb, space.cnt)
    )
    space = ContentSpace(space.types, space.servers, rows, kind, mem_gb, cnt)
    counts = [int(((sign == s) & (instance.tp == t)).sum()) for s, t in alone]
    producers = int(instance.tp[sign > 0].sum())
    available = np.array([0] * len(blocks) + counts + [producers], dtype=np.float64)
    return Items(space, blocks, alone, available)


@dataclass(frozen=True, eq=False)
class Prices:
    """Multipliers of the program's rows.

    Attributes:
        size_gb, shard: Sizes of producers summed over variants, rising, and prices of a shard.
        place: What the place of a block costs beyond its producers, by (shards, variant).
        constant: What all servers and all groups are worth at these prices.
    """

    size_gb: Float64[np.ndarray, " levels"]
    shard: Float64[np.ndarray, " levels"]
    place: dict[tuple[int, int], float]
    constant: float


@dataclass(frozen=True, eq=False)
class Blocks:
    """What the program says.

    Attributes:
        bound_gb: No placement covers more; infinite when out of time.
        order: Consumer groups to serve, those with the best producers first.
    """

    bound_gb: float
    order: Int64[np.ndarray, " served"]


def solve_blocks(instance: Instance, budget: Budget) -> Blocks:
    """The bound on what every placement covers, and which blocks nearly reach it."""
    whole = Market.of(instance, None, None)
    none = np.zeros(0, dtype=np.int64)
    if not len(whole.lenders.count) or not len(whole.borrowers.count):
        return Blocks(0.0, none)
    market = Market.of(instance, MAX_LEVELS, MAX_KINDS)
    found = _solve(market, budget)
    if found is None:
        return Blocks(np.inf, none)
    prices, used = found
    return Blocks(bound_at(prices, whole), _order(market, used))


def _solve(
    market: Market, budget: Budget
) -> tuple[Prices, Float64[np.ndarray, "columns blocks"]] | None:
    """Duals and optimum of the program over merged kinds; None when out of time.

    The optimum has the kind of consumer of each block, the spare of its weakest producer, and how
    many blocks there are of it.

    Columns: a consumer with its weakest producer, by variant; shards of a producer used on a
    variant; what a level of spare leaves to the next; compositions.
    """
    lenders, borrowers, items = market.lenders, market.borrowers, items_of(market)
    servers = market.instance.servers
    variants = lenders.size_gb.shape[1]
    if items is None:
        lower, upper = np.full(variants, -np.inf), np.zeros(variants)
        np.add.at(upper, market.variant, servers.counts * servers.gpus)
    else:
        lower = np.concatenate([np.full(len(servers.counts), -np.inf), items.available])
        upper = np.concatenate([servers.counts, items.available])
    sides = len(borrowers.count) + len(lenders.count)
    first_place = sides + len(lenders.count) * variants
    rows = first_place + len(lower)
    columns = [_columns(market, items, variant, rows) for variant in range(variants)]
    parts, costs = [own.dense for own in columns], [own.cost for own in columns]
    if items is not None:
        made = np.zeros((len(items.space.rows), rows))
        made[np.arange(len(made)), first_place + items.space.kind] = 1.0
        made[:, first_place + len(servers.counts) :] = items.space.rows
        parts.append(made)
        costs.append(np.zeros(len(made)))
    balanced = np.zeros(first_place - sides)
    model = LinearModel.of(
        np.concatenate(parts),
        np.concatenate(costs),
        np.concatenate([np.full(sides, -np.inf), balanced, lower]),
        np.concatenate([borrowers.count, lenders.count, balanced, upper]),
    )
    answer = solve(model, budget)
    if answer.row_duals is None or answer.x is None:
        return None
    firsts = np.cumsum([0, *(len(own.cost) for own in columns)])
    used = [
        np.stack([own.kind, own.spare_gb, answer.x[first : first + len(own.kind)]])
        for own, first in zip(columns, firsts[:-1].tolist(), strict=True)
    ]
    shard = -answer.row_duals[len(borrowers.count) : sides]
    return _as_prices(market, items, shard, -answer.row_duals[first_place:]), np.hstack(used)


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one variant, each as a row of `dense`; the first ones are blocks."""

    dense: Float64[np.ndarray, "columns rows"]
    cost: Float64[np.ndarray, " columns"]
    kind: Int64[np.ndarray, " blocks"]
    spare_gb: Float64[np.ndarray, " blocks"]


def _columns(market: Market, items: Items | None, variant: int, rows: int) -> Columns:
    """The columns of one variant, and their costs.

    Rows: consumers, producers, levels of spare by variant, then GPUs by variant or, where
    compositions are listed, servers by class and items.
    """
    lenders, borrowers = market.lenders, market.borrowers
    kinds, levels = len(borrowers.count), len(lenders.count)
    first_place = kinds + levels + levels * lenders.size_gb.shape[1]
    falling = np.argsort(-lenders.size_gb[:, variant], kind="stable")
    spare, at = lenders.size_gb[falling, variant], kinds + levels + variant * levels
    kind, level = np.divmod(np.arange(kinds * levels), levels)
    covered = np.minimum(borrowers.size_gb[kind, variant], spare[level])
    kind, level, covered = kind[covered > 0], level[covered > 0], covered[covered > 0]
    size, pairs = borrowers.tp[kind], np.arange(len(kind))
    block = np.zeros((len(kind), rows))
    block[pairs, kind] = 1.0
    block[pairs, at + level] = size
    if items is None:
        block[:, first_place + variant] = 2 * size
    else:
        first_item = first_place + len(market.instance.servers.counts)
        for shards in market.sizes:
            here = pairs[size == shards]
            block[here, first_item + items.blocks.index((shards, variant))] = -1.0
            stay = len(items.blocks) + items.alone.index((-1, shards))
            block[here, first_item + stay] = 1.0
            block[here, rows - 1] = shards
    used, left, step = np.zeros((levels, rows)), np.zeros((levels, rows)), np.arange(levels)
    used[step, kinds + falling] = 1.0
    used[step, at + step] = left[step[:-1], at + step[:-1] + 1] = -1.0
    left[step, at + step] = 1.0
    worth = borrowers.weight[kind] * size * covered
    cost = np.concatenate([-worth, np.zeros(2 * levels)])
    return Columns(np.concatenate([block, used, left]), cost, kind, spare[level])


def _order(
    market: Market, used: Float64[np.ndarray, "columns blocks"]
) -> Int64[np.ndarray, " served"]:
    """Consumer groups by the producers of their blocks; the neediest of a kind get the best."""
    need = -market.instance.r_gb.min(axis=1)
    found: list[tuple[float, float, int]] = []
    kinds, spares, times = used[:, used[2] > TRACE]
    for kind in np.unique(kinds).tolist():
        own = np.nonzero(kinds == kind)[0]
        own = own[np.argsort(-spares[own], kind="stable")]
        upto = np.cumsum(times[own])
        members = np.nonzero(market.borrowers.of_group == kind)[0]
        members = members[np.argsort(-need[members], kind="stable")][: round(float(upto[-1]))]
        at = np.minimum(np.searchsorted(upto, np.arange(len(members)) + 0.5), len(own) - 1)
        found += zip(
            (-spares[own][at]).tolist(), (-need[members]).tolist(), members.tolist(), strict=True
        )
    return np.array([group for _, _, group in sorted(found)], dtype=np.int64)


def _as_prices(
    market: Market,
    items: Items | None,
    shard: Float64[np.ndarray, " levels"],
    place: Float64[np.ndarray, " places"],
) -> Prices:
    """Prices that bound, whatever the duals: servers cost so much that no composition gains."""
    sizes = market.lenders.size_gb.sum(axis=1)
    order = np.argsort(sizes, kind="stable")
    shard = np.maximum(shard[order], 0.0)
    servers = market.instance.servers
    if items is None:
        gpu = np.maximum(place, 0.0)
        costs = {(t, v): 2 * t * float(gpu[v]) for t in market.sizes for v in range(len(gpu))}
        total = float(gpu[market.variant] @ (servers.counts * servers.gpus))
        return Prices(sizes[order], shard, costs, total)
    item = place[len(servers.counts) :]
    server = np.zeros(len(servers.counts))
    np.maximum.at(server, items.space.kind, -(items.space.rows @ item))
    alone = item[len(items.blocks) :]
    costs = {
        (t, v): float(t * item[-1] + alone[items.alone.index((-1, t))] - item[index])
        for index, (t, v) in enumerate(items.blocks)
    }
    return Prices(
        sizes[order], shard, costs, float(server @ servers.counts + item @ items.available)
    )


def bound_at(prices: Prices, market: Market) -> float:
    """Lagrange's bound: what no placement exceeds, at these prices.

    Of producers that have more than is needed the cheapest is taken; of the others what is needed
    plays no part.
    """
    lenders, borrowers = market.lenders, market.borrowers
    price = np.interp(lenders.size_gb.sum(axis=1), prices.size_gb, prices.shard)
    best = np.zeros(len(borrowers.count))
    shapes = np.unique(np.stack([borrowers.tp, borrowers.weight]), axis=1).T
    for variant in range(lenders.size_gb.shape[1]):
        rising = np.argsort(lenders.size_gb[:, variant], kind="stable")
        spare = lenders.size_gb[rising, variant]
        # The cheapest shard that has at least as much to spare.
        cheapest = np.append(np.minimum.accumulate(price[rising][::-1])[::-1], np.inf)
        for size, weight in shapes:
            here = np.nonzero((borrowers.tp == size) & (borrowers.weight == weight))[0]
            need = borrowers.size_gb[here, variant]
            weaker = np.append(-np.inf, np.maximum.accumulate(weight * spare - cheapest[:-1]))
            at = np.searchsorted(spare, need, side="left")
            most = np.maximum(weight * need - cheapest[at], weaker[at])
            gain = size * most - prices.place[int(size), variant]
            best[here] = np.maximum(best[here], np.where(need > 0, gain, 0.0))
    return prices.constant + float(lenders.count @ price) + float(borrowers.count @ best)
