"""Who could lend to whom, and what servers can be made of: what the bound by blocks reads.

Neighbours in size are one kind where there are many; kinds keep what they have in common (shards,
weight) and the mean of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.problem.contents import ContentSpace, content_space
from aqua_placer.problem.instance import Instance, Types, sign_of

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
    foreign = np.zeros(len(space.rows), dtype=bool)
    for index, (_, variant) in enumerate(blocks):
        foreign |= (space.rows[:, index] > 0) & (market.variant[space.kind] != variant)
    own = ContentSpace(
        space.types,
        space.servers,
        space.rows[~foreign],
        space.kind[~foreign],
        space.mem_gb[~foreign],
        space.cnt[~foreign],
    )
    counts = [int(((sign == s) & (instance.tp == t)).sum()) for s, t in alone]
    producers = int(instance.tp[sign > 0].sum())
    available = np.array([0] * len(blocks) + counts + [producers], dtype=np.float64)
    return Items(own, blocks, alone, available)
