"""How much demand a server's content covers, for thousands of servers at once, and a bound.

A consumer group is covered when each of its shards has its own producer on the same server; the
group runs in lockstep, so it gets `weight x tp x min(need, spare of its weakest producer)`.

Within a server the best choice is a dynamic program (`prefixes`).

The bound is a layer cake. At level t only producers with more than t GB to spare and consumers
that need more than t count, and at most as many shards are covered as there are producers; the
integral over t bounds every placement, whatever the servers. It is exact for single shards of
equal weight on one big server.
"""

from __future__ import annotations

import numpy as np

from aqua_placer.coverage.prefixes import covered_gb
from aqua_placer.coverage.rosters import roster
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import Instance


def coverage_gb(instance: Instance, slots: Ints, class_of: Ints) -> Floats:
    """Covered demand per server of a layout's slots."""
    result = np.zeros(len(slots))
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        here = class_of == kind
        table = roster(instance.tp, instance.r_gb[:, kind], instance.weight, gpus)
        result[here] = covered_gb(table, slots[here])
    return result


def demand_gb(instance: Instance) -> float:
    """Demand of all consumer groups; on the class where each needs least, if classes differ."""
    need = np.maximum(-instance.r_gb.max(axis=1), 0.0)
    return float((instance.weight * instance.tp * need).sum())


def lendable_shards(instance: Instance) -> Ints:
    """Shards of each group that could lend at once: no more than GPUs beside it on a server."""
    shards: Ints = np.minimum(instance.tp, int(instance.servers.gpus.max()) - instance.tp)
    return shards


def can_be_served(instance: Instance) -> Bools:
    """Whether a group and as many producer shards fit any server."""
    fits: Bools = 2 * instance.tp <= int(instance.servers.gpus.max())
    return fits


def layer_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement; exact for equal weights as described."""
    spare = np.maximum(instance.r_gb.max(axis=1), 0.0)
    need = np.where(can_be_served(instance), np.maximum(-instance.r_gb.min(axis=1), 0.0), 0.0)
    tp, weight = instance.tp, instance.weight
    edges = np.unique(np.concatenate([[0.0], spare, need]))
    lenders = _above(spare, lendable_shards(instance), edges)
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
