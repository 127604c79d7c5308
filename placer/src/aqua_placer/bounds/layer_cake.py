"""The quick bound on coverage: at every level of GB, producers against consumers.

At level t only producers with more than t GB to spare and consumers that need more than t count,
and at most as many shards are covered as there are producers; the integral over t bounds every
placement, whatever the servers. It is exact for single shards of equal weight on one big server,
and costs a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64, Int64

    from aqua_placer.problem.instance import Instance


def lendable_shards(instance: Instance) -> Int64[np.ndarray, " groups"]:
    """Shards of each group that could lend at once: no more than GPUs beside it on a server."""
    shards: Int64[np.ndarray, " groups"] = np.minimum(
        instance.tp, int(instance.servers.gpus.max()) - instance.tp
    )
    return shards


def can_be_served(instance: Instance) -> Bool[np.ndarray, " groups"]:
    """Whether a group and as many producer shards fit any server."""
    fits: Bool[np.ndarray, " groups"] = 2 * instance.tp <= int(instance.servers.gpus.max())
    return fits


def layer_bound_gb(instance: Instance) -> float:
    """Upper bound on covered demand of every placement."""
    if not instance.num_groups:
        return 0.0
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
