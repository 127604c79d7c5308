"""How much demand a server's content covers, for thousands of servers at once, and a bound.

A consumer group is covered when each of its shards has its own producer on the same server; the
group runs in lockstep, so it gets `weight x tp x min(need, spare of its weakest producer)`.

Within a server the best choice is a dynamic program over prefixes: with producers sorted by spare,
a chosen set of groups uses a prefix of them in blocks, and among groups of one size and weight the
neediest are chosen first (both by exchange: min is supermodular). The state is how many groups of
each kind are chosen. `covered_gb` walks the states once for all servers, as numpy columns.

The bound is a layer cake. At level t only producers with more than t GB to spare and consumers
that need more than t count, and at most as many shards are covered as there are producers; the
integral over t bounds every placement, whatever the servers. It is exact for single shards of
equal weight on one big server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np

from aqua_placer.columns import Bools, Floats, Ints
from aqua_placer.instance import Instance

MAX_KINDS: Final = 5
"""Kinds of consumers (shards, weight) that the states tell apart. More weights than that are
merged with their neighbours: a search may be guided by nearly right weights, and what a plan
reports comes from its matches."""


@dataclass(frozen=True, eq=False)
class Roster:
    """Groups as rows to pick servers' contents from; the last row stands for an empty slot.

    `kinds` are the distinct (shards, weight) of consumers.
    """

    tp: Ints
    r_gb: Floats
    kind: Ints
    kinds: tuple[tuple[int, float], ...]


def roster(tp: Ints, r_gb: Floats, weight: Floats) -> Roster:
    """Rows for `covered_gb` from columns of one server class."""
    consumer = r_gb < 0
    weight = _few_weights(tp[consumer], weight, consumer)
    kinds = sorted(set(zip(tp[consumer].tolist(), weight[consumer].tolist(), strict=True)))
    index = {kind: i for i, kind in enumerate(kinds)}
    of = np.array(
        [
            index[key] if needs else -1
            for needs, key in zip(
                consumer.tolist(), zip(tp.tolist(), weight.tolist(), strict=True), strict=True
            )
        ]
        + [-1],
        dtype=np.int64,
    )
    return Roster(np.append(tp, 0), np.append(r_gb, 0.0), of, tuple(kinds))


def _few_weights(sizes: Ints, weight: Floats, consumer: Bools) -> Floats:
    """The weights, merged into levels until the kinds are few."""
    most = MAX_KINDS // max(len(set(sizes.tolist())), 1)
    distinct = np.unique(weight[consumer])
    if len(distinct) * len(set(sizes.tolist())) <= MAX_KINDS or len(distinct) == 1:
        return weight
    edges = np.unique(np.quantile(weight[consumer], np.linspace(0, 1, max(most, 1) + 1)))
    level = np.clip(np.searchsorted(edges, weight, side="right") - 1, 0, max(len(edges) - 2, 0))
    members = level[consumer]
    total = np.bincount(members, weights=weight[consumer])
    mean = total / np.maximum(np.bincount(members), 1)
    return mean[np.minimum(level, len(mean) - 1)]


@lru_cache(maxsize=64)
def states_of(kinds: tuple[tuple[int, float], ...], half: int) -> list[tuple[int, ...]]:
    """Numbers chosen per kind that fit `half` shards, in an order that predecessors lead."""
    ranges = [range(half // size + 1) for size, _ in kinds]
    states = [
        state
        for state in product(*ranges)
        if sum(n * size for n, (size, _) in zip(state, kinds, strict=True)) <= half
    ]
    return sorted(states, key=sum)


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The dynamic program over prefixes of producers, for many servers at once.

    Attributes:
        level: Spare of the n-th producer shard, n from 1, (half + 1, servers).
        needs: Per kind, needs in descending order, (depth, servers).
        best: Most covered GB by state.
        total: Most over all states, (servers,).
    """

    kinds: tuple[tuple[int, float], ...]
    level: Floats
    needs: list[Floats]
    best: dict[tuple[int, ...], Floats]
    total: Floats

    def gain(self, state: tuple[int, ...], kind: int) -> Floats | None:
        """What the last group of `kind` adds in `state`; None when no server has so many."""
        size, weight = self.kinds[kind]
        taken = state[kind]
        if not taken or taken > len(self.needs[kind]):
            return None
        used = sum(n * tp for n, (tp, _) in zip(state, self.kinds, strict=True))
        gain: Floats = np.minimum(self.needs[kind][taken - 1], self.level[used])
        return gain * (size * weight)


def before(state: tuple[int, ...], kind: int) -> tuple[int, ...]:
    """The state without its last group of `kind`."""
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def prefixes(table: Roster, slots: Ints, half: int) -> Prefixes:
    """Run the program on each row of `slots` (indices into the roster, -1 for empty)."""
    r_gb, tp, kind = table.r_gb[slots], table.tp[slots], table.kind[slots]
    spare = np.where(r_gb > 0, r_gb, 0.0)
    order = np.argsort(-spare, axis=1, kind="stable")
    spare = np.take_along_axis(spare, order, axis=1)
    shards = np.cumsum(np.take_along_axis(tp, order, axis=1), axis=1)
    level = np.zeros((half + 1, len(slots)))
    for shard in range(half):
        holder = np.minimum((shards <= shard).sum(axis=1), slots.shape[1] - 1)
        level[shard + 1] = spare[np.arange(len(slots)), holder]
    needs = []
    for index, (size, _) in enumerate(table.kinds):
        need = np.where(kind == index, -r_gb, 0.0)
        deep = half // size
        if not deep:
            need = need[:, :0]
        elif deep < need.shape[1]:
            need = np.partition(need, need.shape[1] - deep - 1, axis=1)[:, -deep:]
        needs.append(-np.sort(-need, axis=1).T)
    result = Prefixes(table.kinds, level, needs, {}, np.zeros(len(slots)))
    for state in states_of(table.kinds, half):
        value = None
        for index in range(len(table.kinds)):
            gain = result.gain(state, index)
            if gain is not None:
                reached = result.best[before(state, index)] + gain
                value = reached if value is None else np.maximum(value, reached)
        result.best[state] = np.zeros(len(slots)) if value is None else value
        np.maximum(result.total, result.best[state], out=result.total)
    return result


def covered_gb(table: Roster, slots: Ints, half: int) -> Floats:
    """Covered demand of each row of `slots`.

    Args:
        half: Most shards that can be matched on a server: half of its GPUs.
    """
    if not table.kinds or not half or not len(slots):
        return np.zeros(len(slots))
    return prefixes(table, slots, half).total


def coverage_gb(instance: Instance, slots: Ints, class_of: Ints) -> Floats:
    """Covered demand per server of a layout's slots."""
    result = np.zeros(len(slots))
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        here = class_of == kind
        table = roster(instance.tp, instance.r_gb[:, kind], instance.weight)
        result[here] = covered_gb(table, slots[here], gpus // 2)
    return result


def demand_gb(instance: Instance) -> float:
    """Demand of all consumer groups; on the class where each needs least, if classes differ."""
    need = np.maximum(-instance.r_gb.max(axis=1), 0.0)
    return float((instance.weight * instance.tp * need).sum())


def layer_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement; exact for equal weights as described."""
    spare = np.maximum(instance.r_gb.max(axis=1), 0.0)
    need = np.maximum(-instance.r_gb.min(axis=1), 0.0)
    tp, weight = instance.tp, instance.weight
    edges = np.unique(np.concatenate([[0.0], spare, need]))
    lenders = _above(spare, tp, edges)
    covered = np.zeros(len(edges) - 1)
    room = lenders.astype(np.float64)
    for worth in np.unique(weight[need > 0])[::-1]:
        # The heaviest consumers take the producers of a level first.
        here = (weight == worth) & (need > 0)
        wanted = _above(need[here], tp[here], edges)
        taken = np.minimum(wanted, room)
        room -= taken
        covered += worth * taken
    return float((covered * np.diff(edges)).sum())


def _above(size: Floats, tp: Ints, edges: Floats) -> Floats:
    """Shards whose size exceeds each edge but the last, shape (len(edges) - 1,)."""
    at = np.searchsorted(edges, size)
    drop = np.bincount(at, weights=tp * (size > 0), minlength=len(edges))
    above: Floats = (drop.sum() - np.cumsum(drop))[:-1]
    return above
