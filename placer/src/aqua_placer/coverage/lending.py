"""Who could lend to whom at what price: both sides of the market, and the bound that prices give.

A *block* is a consumer group with as many producer shards; it is worth `weight x tp x min(need,
weakest spare)`. Pricing blocks is a sort: with producers in falling order of spare, the best block
whose producers all have at least the p-th's is made of the t cheapest of the first p.

The bound is Lagrange's, so it holds for any prices: those of the lenders times their number, the
price of servers, and for each consumer the best that it could make of them. So prices may come from
a coarse program in which neighbours in size are one kind, and then be applied to every size there
is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance


@dataclass(frozen=True, eq=False)
class Side:
    """Kinds of lenders or of borrowers, merged or not.

    Attributes:
        size_gb: Spare or need per shard and server class, (kinds, classes).
        count: Shards (lenders) or groups (borrowers) of each kind.
        tp: Shards of a group; 1 for lenders.
        weight: Worth of a covered GB; 1 for lenders.
        of_group: Kind of each group, -1 for groups of the other side.
        is_merged: Whether sizes that differ are one kind.
    """

    size_gb: Floats
    count: Floats
    tp: Ints
    weight: Floats
    of_group: Ints
    is_merged: bool


@dataclass(frozen=True, eq=False)
class Prices:
    """Duals of a program over blocks.

    Attributes:
        lender: Per kind of lender and shard, at least 0.
        block: What the place of a block costs, by (server class, tp).
        constant: What all servers and groups are worth at these prices.
    """

    lender: Floats
    block: dict[tuple[int, int], float]
    constant: float


def sides(instance: Instance, most: tuple[int, int] | None = None) -> tuple[Side, Side]:
    """Lenders and borrowers of an instance, merged down to about `most` kinds or not at all."""
    gpus = instance.servers.gpus
    spare = np.maximum(instance.r_gb, 0.0)
    fits: Bools = 2 * instance.tp[:, None] <= gpus[None, :]
    need = np.where(fits, np.maximum(-instance.r_gb, 0.0), 0.0)
    # No shard lends without a GPU beside its group for whoever borrows.
    shards = np.minimum(instance.tp, int(gpus.max()) - instance.tp)
    lending = np.nonzero((spare > GRAIN_GB / 2).any(axis=1) & (shards > 0))[0]
    borrowing = np.nonzero((need > GRAIN_GB / 2).any(axis=1))[0]
    alike = np.ones((instance.num_groups, 2))
    demand = np.column_stack([instance.tp, instance.weight])
    return (
        _side(spare, lending, shards, alike, None if most is None else most[0]),
        _side(need, borrowing, np.ones_like(shards), demand, None if most is None else most[1]),
    )


def _side(size_gb: Floats, members: Ints, count: Ints, demand: Floats, most: int | None) -> Side:
    """Kinds by `demand` (tp, weight) and size; neighbours in size are merged."""
    grains = np.rint(size_gb[members] / GRAIN_GB)
    keys = np.column_stack([demand[members], grains.sum(axis=1), grains])
    _, first, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    kind = kind.reshape(-1)
    is_merged = most is not None and len(first) > most
    if is_merged:
        assert most is not None, "only then are kinds merged"
        _, pair = np.unique(demand[members], axis=0, return_inverse=True)
        pair = pair.reshape(-1)
        levels = max(3, most // (int(pair.max()) + 1))
        # Equal numbers of groups per level, in the order of size.
        order = np.lexsort((kind, pair))
        start = np.searchsorted(pair[order], pair[order])
        held = np.bincount(pair)[pair[order]]
        level = np.empty(len(members), dtype=np.int64)
        level[order] = (np.arange(len(members)) - start) * np.minimum(levels, held) // held
        _, first, kind = np.unique(
            pair * (levels + 1) + level, return_index=True, return_inverse=True
        )
        kind = kind.reshape(-1)
    total: Floats = np.bincount(kind, weights=count[members], minlength=len(first)).astype(
        np.float64
    )
    size = np.zeros((len(first), size_gb.shape[1]))
    np.add.at(size, kind, count[members, None] * size_gb[members])
    size /= total[:, None]
    of_group = np.full(len(size_gb), -1, dtype=np.int64)
    of_group[members] = kind
    tp, weight = demand[members][first].T
    return Side(size, total, tp.astype(np.int64), weight, of_group, is_merged)


class Pricing:
    """The best blocks at given prices, for one server class."""

    def __init__(self, lenders: Side, kind: int, price: Floats, sizes: list[int]) -> None:
        spare = lenders.size_gb[:, kind]
        self.order = np.argsort(-spare, kind="stable")
        self.order = self.order[spare[self.order] > GRAIN_GB / 2]
        self.spare = spare[self.order]
        self.price = price[self.order]
        self.count = lenders.count[self.order]
        self.cost = {size: self._cheapest(size) for size in sizes}
        # Consumers of one size want the same few blocks.
        self._shards: dict[tuple[int, int], tuple[int, ...]] = {}

    def _cheapest(self, size: int) -> Floats:
        """Price of the `size` cheapest shards among the first p lenders, by p; inf if too few."""
        if size == 1:
            running: Floats = np.minimum.accumulate(self.price)
            return running
        cost = np.full(len(self.price), np.inf)
        held: list[float] = []
        for at, (price, count) in enumerate(
            zip(self.price.tolist(), self.count.tolist(), strict=True)
        ):
            if len(held) < size or price < held[-1]:
                held = sorted(held + [price] * min(int(count), size))[:size]
            if len(held) == size:
                cost[at] = sum(held)
        return cost

    def shards(self, size: int, at: int) -> tuple[int, ...]:
        """The cheapest `size` shards among the first `at` + 1 lenders, as kinds of lenders."""
        found = self._shards.get((size, at))
        if found is None:
            cheap = np.argsort(self.price[: at + 1], kind="stable")
            held = np.repeat(cheap, np.minimum(self.count[cheap], size).astype(np.int64))[:size]
            found = tuple(self.order[np.sort(held)].tolist())
            self._shards[size, at] = found
        return found

    def gains(self, borrowers: Side, members: Ints, kind: int) -> Floats:
        """Worth less price of the best block of each member by its weakest lender, (members, p)."""
        size = int(borrowers.tp[members[0]])
        worth = borrowers.weight[members] * size
        need = borrowers.size_gb[members, kind]
        gains: Floats = (
            worth[:, None] * np.minimum(need[:, None], self.spare[None, :])
            - self.cost[size][None, :]
        )
        return gains

    def most(self, size: int, worth: float, need_gb: Floats) -> Floats:
        """The largest of `gains` for groups of one size and weight, a search per group.

        Among lenders who have more than is needed the last one costs least, because the cheapest
        shards among more lenders cannot cost more. Among the others what is needed plays no part.
        """
        cost = np.append(np.inf, self.cost[size])
        lending = worth * self.spare - self.cost[size]
        weaker = np.append(np.maximum.accumulate(lending[::-1])[::-1], -np.inf)
        # `spare` falls: so many lenders have at least what is needed.
        enough = np.searchsorted(-self.spare, -need_gb, side="right")
        most: Floats = np.maximum(worth * need_gb - cost[enough], weaker[enough])
        return most


def bound_at(instance: Instance, prices: Prices, sides_: tuple[Side, Side]) -> float:
    """Lagrange's bound: what no placement exceeds, at these prices of the lenders of `sides_`."""
    lenders, borrowers = sides_
    sizes = np.unique(borrowers.tp).tolist()
    best = np.zeros(len(borrowers.tp))
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        pricing = Pricing(lenders, kind, prices.lender, sizes)
        if not len(pricing.spare):
            continue
        for size, weight in np.unique(np.stack([borrowers.tp, borrowers.weight]), axis=1).T:
            if 2 * size > gpus:
                continue
            here = np.nonzero((borrowers.tp == size) & (borrowers.weight == weight))[0]
            most = pricing.most(int(size), weight * size, borrowers.size_gb[here, kind])
            best[here] = np.maximum(best[here], most - prices.block.get((kind, int(size)), 0.0))
    return float(prices.constant + lenders.count @ prices.lender + borrowers.count @ best)


def spread(prices: Prices, known: Side, asked: Side) -> Prices:
    """Prices of the lenders `asked` for, between those of the merged kinds that are known."""
    sizes = known.size_gb.sum(axis=1)
    order = np.argsort(sizes, kind="stable")
    lender = np.interp(asked.size_gb.sum(axis=1), sizes[order], prices.lender[order])
    return Prices(lender, prices.block, prices.constant)


def mixed(center: Prices, other: Prices, share: float) -> Prices:
    """`share` of the one and the rest of the other; as good for a bound as both are."""
    rest = 1 - share
    return Prices(
        share * center.lender + rest * other.lender,
        {key: share * price + rest * other.block[key] for key, price in center.block.items()},
        share * center.constant + rest * other.constant,
    )
