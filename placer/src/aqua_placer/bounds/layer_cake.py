"""Two quick bounds on coverage: the layer cake, and one giant server.

The layer cake sets producers against consumers at every level of GB. At level t only producers
with more than t GB to spare and consumers that need more than t count, and at most as many shards
are covered as there are producers; the integral over t bounds every placement, whatever the
servers. It is exact for single shards of equal weight on one big server, and costs a sort.

It cuts a group of sixteen shards into single ones at every level, and the program over blocks
serves fractions of it. On one server that holds everything the program over prefixes
(`value.coverage`) is exact, and whatever servers there are can only cover less. Its states are
numbers per kind of consumer; along the most numerous kind the recursion

    best(n) = max(reached(n), best(n - 1) + gain(n))

is a running maximum of `reached` less the sum of gains, so numpy walks it and only the other kinds
are looped over. Up to a few hundred GPUs that is milliseconds; in larger clusters a group is so
small a part that the other bounds are as good.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.problem.instance import Instance

MAX_STATES: Final = 12_000
"""Numbers of the less numerous kinds, some 20 us each where they fit the cluster. Doubled, the
bound may take half a second."""


def _sides(
    instance: Instance,
) -> tuple[
    Float64[np.ndarray, " groups"], Int64[np.ndarray, " groups"], Float64[np.ndarray, " groups"]
]:
    """Spare GB of each group, how many of its shards can lend at once, and the GB that it needs.

    No more lend than there are GPUs beside the group; one that fits no server together with as many
    producer shards is not served. Where classes differ, the largest spare and need count.
    """
    most = int(instance.servers.gpus.max())
    spare, need = np.maximum(instance.r_gb.max(axis=1), 0.0), -instance.r_gb.min(axis=1)
    need = np.where(2 * instance.tp <= most, np.maximum(need, 0.0), 0.0)
    return spare, np.minimum(instance.tp, most - instance.tp), need


def layer_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement."""
    if not instance.num_groups:
        return 0.0
    spare, lending, need = _sides(instance)
    tp, weight = instance.tp, instance.weight
    edges = np.unique(np.concatenate([[0.0], spare, need]))
    lenders = _above(spare, lending, edges)
    covered = np.zeros(len(edges) - 1)
    room = lenders.astype(np.float64)
    for worth in np.unique(weight[need > 0])[::-1]:
        # The heaviest consumers take the producers of a level first.
        here = (weight == worth) & (need > 0)
        taken = np.minimum(_above(need[here], tp[here], edges), room)
        room -= taken
        covered += worth * taken
    return float((covered * np.diff(edges)).sum())


def _above(
    size: Float64[np.ndarray, " groups"],
    tp: Int64[np.ndarray, " groups"],
    edges: Float64[np.ndarray, " edges"],
) -> Float64[np.ndarray, " levels"]:
    """Shards whose size exceeds each edge but the last."""
    at = np.searchsorted(edges, size)
    drop = np.bincount(at, weights=tp * (size > 0), minlength=len(edges))
    above: Float64[np.ndarray, " levels"] = (drop.sum() - np.cumsum(drop))[:-1]
    return above


def lockstep_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement; infinite where it would take too long."""
    spare, lending, need = _sides(instance)
    falling = np.argsort(-spare, kind="stable")
    level = np.append(0.0, np.repeat(spare[falling], lending[falling]))
    half = min(len(level) - 1, instance.servers.total_gpus // 2)
    kinds: list[tuple[int, float, Float64[np.ndarray, " groups"]]] = []
    shapes = np.unique(np.stack([instance.tp, instance.weight])[:, need > 0], axis=1).T
    for shards, weight in shapes.tolist():
        size = int(shards)
        own = need[(instance.tp == size) & (instance.weight == weight) & (need > 0)]
        if size <= half:
            kinds.append((size, size * weight, -np.sort(-own)[: half // size]))
    if not kinds:
        return 0.0
    *others, last = sorted(kinds, key=lambda kind: len(kind[2]))
    if prod(len(needs) + 1 for _, _, needs in others) > MAX_STATES:
        return float(np.inf)
    size, worth, needs = last
    best: dict[tuple[int, ...], Float64[np.ndarray, " served"]] = {}
    for state in product(*(range(len(own) + 1) for _, _, own in others)):
        first = sum(count * kind[0] for count, kind in zip(state, others, strict=True))
        if first > half:
            continue
        used = first + size * np.arange(min(len(needs), (half - first) // size) + 1)
        reached = np.zeros(len(used))
        for index, count in enumerate(state):
            if count:
                before = best[*state[:index], count - 1, *state[index + 1 :]][: len(used)]
                _, gain, own = others[index]
                through = before + gain * np.minimum(own[count - 1], level[used])
                reached = np.maximum(reached, through)
        gains = worth * np.minimum(needs[: len(used) - 1], level[used[1:]])
        total = np.concatenate([[0.0], np.cumsum(gains)])
        best[state] = total + np.maximum.accumulate(reached - total)
    return max(float(values.max()) for values in best.values())
