"""An upper bound on coverage that knows lockstep: all groups on one giant server.

The layer cake (`covering.layer_bound_gb`) cuts a group of four into single shards at every level;
a group in lockstep cannot be cut, and where sizes all differ that costs a few tenths of a percent.
On one server that holds everything the program over prefixes is exact, and whatever servers there
are can only cover less. Its states are numbers per kind of consumer; along the most numerous kind
the recursion

    best(n) = max(reached(n), best(n - 1) + gain(n))

is a running maximum of `reached` less the sum of gains, so numpy walks it and only the other kinds
are looped over. Up to a few hundred GPUs that is milliseconds; in larger clusters neighbours in the
order of sizes differ so little that the layer cake is as good.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np

from aqua_placer.columns import Floats
from aqua_placer.covering import can_be_served, lendable_shards
from aqua_placer.instance import Instance

MAX_ROWS: Final = 4_000
"""Runs along the most numerous kind, some 20 us each."""


def lockstep_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement; infinite where it would take too long.

    Where server classes differ, each group counts with its largest spare and its largest need.
    """
    spare = np.maximum(instance.r_gb.max(axis=1), 0.0)
    need = np.where(can_be_served(instance), np.maximum(-instance.r_gb.min(axis=1), 0.0), 0.0)
    lending = np.nonzero(spare)[0]
    lending = lending[np.argsort(-spare[lending], kind="stable")]
    level = np.concatenate([[0.0], np.repeat(spare[lending], lendable_shards(instance)[lending])])
    half = min(len(level) - 1, int(instance.servers.total_gpus) // 2)
    keys = list(zip(instance.tp.tolist(), instance.weight.tolist(), strict=True))
    needs: dict[tuple[int, float], list[float]] = {}
    for key, wanted in zip(keys, need.tolist(), strict=True):
        if wanted > 0:
            needs.setdefault(key, []).append(wanted)
    kinds = [
        (size, size * weight, np.sort(np.array(wanted))[::-1][: half // size])
        for (size, weight), wanted in needs.items()
        if size <= half
    ]
    if not kinds:
        return 0.0
    kinds.sort(key=lambda kind: len(kind[2]))
    *others, (size, worth, wanted) = kinds
    counts = [range(len(depth) + 1) for _, _, depth in others]
    if np.prod([float(len(count)) for count in counts]) > MAX_ROWS * 8:
        return np.inf
    states = [
        state
        for state in product(*counts)
        if sum(n * tp for n, (tp, _, _) in zip(state, others, strict=True)) <= half
    ]
    if len(states) > MAX_ROWS:
        return np.inf
    best: dict[tuple[int, ...], Floats] = {}
    most = 0.0
    for state in states:
        base = sum(n * tp for n, (tp, _, _) in zip(state, others, strict=True))
        used = base + size * np.arange(min(len(wanted), (half - base) // size) + 1)
        reached = np.zeros(len(used))
        for kind, (_, value, depth) in enumerate(others):
            if state[kind]:
                previous = best[(*state[:kind], state[kind] - 1, *state[kind + 1 :])]
                gain = value * np.minimum(depth[state[kind] - 1], level[used])
                reached = np.maximum(reached, previous[: len(used)] + gain)
        gains = np.zeros(len(used))
        np.cumsum(worth * np.minimum(wanted[: len(used) - 1], level[used[1:]]), out=gains[1:])
        best[state] = gains + np.maximum.accumulate(reached - gains)
        most = max(most, float(best[state].max()))
    return most
