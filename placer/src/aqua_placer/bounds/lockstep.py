"""The bound on coverage by one giant server: exact about groups that cannot be cut.

The layer cake cuts a group of sixteen shards into single ones at every level, and the program over
blocks serves fractions of it. On one server that holds everything the program over prefixes
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
from jaxtyping import Float64

from aqua_placer.bounds.layer_cake import can_be_served, lendable_shards
from aqua_placer.problem.instance import Instance

MAX_STATES: Final = 12_000
"""Numbers of the less numerous kinds, some 20 us each where they fit the cluster. Doubled, the
bound may take half a second."""


def lockstep_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement; infinite where it would take too long.

    Where server classes differ, each group counts with its largest spare and its largest need.
    """
    spare = np.maximum(instance.r_gb.max(axis=1), 0.0)
    need = np.where(can_be_served(instance), np.maximum(-instance.r_gb.min(axis=1), 0.0), 0.0)
    falling = np.argsort(-spare, kind="stable")
    level = np.concatenate(
        [[0.0], np.repeat(spare[falling], np.maximum(lendable_shards(instance), 0)[falling])]
    )
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
