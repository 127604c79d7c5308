"""From how many groups of which class each server gets, to which groups: the first placement.

Groups fall into classes by (shards, producer or consumer): whether servers can be filled exactly,
and how small |cnt| can be, depends on the classes alone. A small integer program over contents of
classes, each class standing for its mean size, decides the shape of every server; then the groups
of a class are distributed large to small, each to the server that is furthest below the mean.

Where a server has too many contents to list (a rack of 72 GPUs), classes are spread evenly
instead: large groups first, and single shards level the counts.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.thresholds import Thresholds, classes_of, fractional_servers
from aqua_placer.budget import Budget
from aqua_placer.problem.contents import ContentSpace
from aqua_placer.problem.instance import Instance, Types
from aqua_placer.search.whole_servers import contents_by_server, whole_servers
from aqua_placer.value.balance import keyed

SHAPE_GAP = 0.05
"""Relative gap at which the shapes of servers are good enough: exchanges level what is left."""


def first_placement(
    instance: Instance, space: ContentSpace | None, aim: Thresholds, budget: Budget
) -> Int64[np.ndarray, " groups"] | None:
    """By shapes where contents of classes can be listed, evenly otherwise; None if neither fits.

    Args:
        space: Contents of classes, where they can be listed.
    """
    if space is not None:
        shape = _shapes(instance, space, aim, budget)
        if shape is not None:
            return _distribute(instance, classes_of(instance), shape)
    return spread_evenly(instance)


def _shapes(
    instance: Instance, space: ContentSpace, aim: Thresholds, budget: Budget
) -> Int64[np.ndarray, "servers classes"] | None:
    """Class contents per server, within the count of the aim, with memory near the mean."""
    mean_gb = float((instance.tp * instance.r_gb[:, 0]).sum()) / instance.servers.count
    allowed = keyed(space.cnt, aim.mode) <= aim.cnt
    worth = -((space.mem_gb - mean_gb) ** 2)
    _, fraction = fractional_servers(space, allowed, budget, worth)
    if fraction is None:
        return None
    chosen = whole_servers(space, fraction, budget, worth=worth, relative_gap=SHAPE_GAP).servers_of
    return None if chosen is None else contents_by_server(space, chosen)


def _distribute(
    instance: Instance, classes: Types, shape: Int64[np.ndarray, "servers classes"]
) -> Int64[np.ndarray, " groups"]:
    """Server of each group for the given shape (servers, classes): extremes first, to balance.

    Classes of large total sizes come first. Each class goes by descending size to the
    servers by ascending memory, in rounds of one group per server that still expects one.
    """
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    class_of = instance.servers.class_of
    mem = np.zeros(len(shape))
    spread = [
        np.ptp(instance.tp[members] * instance.r_gb[members, 0])
        for members in (np.nonzero(classes.of_group == kind)[0] for kind in range(len(classes.tp)))
    ]
    # What classes still to come are expected to bring evens out contents that differ.
    expected: Float64[np.ndarray, " servers"] = shape.astype(np.float64) @ (
        classes.tp * classes.r_gb[:, 0]
    )
    for kind in np.argsort(-np.array(spread), kind="stable"):
        members = np.nonzero(classes.of_group == kind)[0]
        total = instance.tp[members] * instance.r_gb[members, 0]
        members = members[np.argsort(-total, kind="stable")]
        wanted = shape[:, kind].copy()
        at = 0
        mean_size = float(classes.tp[kind] * classes.r_gb[kind, 0])
        while at < len(members):
            open_servers = np.nonzero(wanted)[0]
            level = mem[open_servers] + expected[open_servers]
            chosen = open_servers[np.argsort(level, kind="stable")]
            batch = members[at : at + len(chosen)]
            chosen = chosen[: len(batch)]
            placement[batch] = chosen
            mem[chosen] += instance.tp[batch] * instance.r_gb[batch, class_of[chosen]]
            expected[chosen] = expected[chosen] - mean_size
            wanted[chosen] -= 1
            at += len(batch)
    return placement


def spread_evenly(instance: Instance) -> Int64[np.ndarray, " groups"] | None:
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
) -> Int64[np.ndarray, " groups"]:
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
