"""First placements: without a program, and from what each server shall hold."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from aqua_placer.problem.instance import Instance, Placement, Types


def spread_evenly(instance: Instance) -> Placement | None:
    """A placement without a program: larger groups first, each to the emptiest fitting server.

    Producers and consumers of one size go to the servers where they bring cnt nearest to its
    mean. None when the heuristic leaves a group without room.
    """
    servers = instance.servers
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    free = servers.capacity.copy()
    cnt = np.zeros(servers.count)
    mem = np.zeros(servers.count)
    sign = instance.sign[:, 0]
    share = servers.capacity / servers.total_gpus
    goal = (instance.tp * sign).sum() * share
    for size in sorted(set(instance.tp.tolist()), reverse=True):
        for side in (1, -1, 0):
            members = np.nonzero((instance.tp == size) & (np.sign(sign) == side))[0]
            order = np.argsort(-np.abs(instance.r_gb[members, 0]), kind="stable")
            members = members[order]
            at = 0
            while at < len(members):
                fitting = np.nonzero(free >= size)[0]
                if not len(fitting):
                    return None
                batch = members[at : at + max(1, len(fitting) // 2)]
                key = side * (cnt - goal)[fitting] if side else -free[fitting]
                by_need = np.lexsort((side * mem[fitting], -free[fitting] // size, key))
                if size > 1:
                    by_need = np.lexsort((key, -free[fitting]))
                chosen = fitting[by_need][: len(batch)]
                batch = batch[: len(chosen)]
                placement[batch] = chosen
                free[chosen] -= size
                cnt[chosen] += size * sign[batch]
                mem[chosen] += size * instance.r_gb[batch, 0]
                at += len(batch)
    return placement


def assign_contents(
    instance: Instance, types: Types, rows: Int64[np.ndarray, "servers types"]
) -> Placement:
    """Server of each group when server `s` holds `rows[s]` groups of each type.

    Servers of equal contents are ranked by quantile, and every type is assigned in that order from
    large to small: a server gets large producers with large consumers, and shards of one level
    together, which is what lockstep groups want. Exact for types whose groups are alike.
    """
    _, same = np.unique(
        np.column_stack([instance.servers.class_of, rows]), axis=0, return_inverse=True
    )
    same = same.reshape(-1)
    order = np.argsort(same, kind="stable")
    sizes = np.bincount(same)
    rank = np.empty(len(rows))
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_quantile = np.argsort((rank + 0.5) / sizes[same], kind="stable")
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    for kind in range(rows.shape[1]):
        members = np.nonzero(types.of_group == kind)[0]
        key = np.abs(instance.r_gb[members, 0])
        members = members[np.argsort(-key, kind="stable")]
        placement[members] = np.repeat(by_quantile, rows[by_quantile, kind])
    return placement
