"""From how many groups of which class each server gets, to which groups: the first placement.

Groups fall into classes by (shards, producer or consumer): whether servers can be filled exactly,
and how small |cnt| can be, depends on the classes alone. A small integer program over contents of
classes, each class standing for its mean size, decides the shape of every server; then the groups
of a class are dealt large to small, each to the server that is furthest below the mean.

Where a server has too many contents to list (a rack of 72 GPUs), classes are spread evenly
instead: large groups first, and single shards level the counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import Instance, Types
from aqua_placer.programs.contents import ContentSpace, content_space
from aqua_placer.programs.thresholds import Mode, cover, keyed, whole_servers

MAX_CLASS_CONTENTS: Final = 8_000
"""Servers of 8 GPUs have hundreds of class contents; racks beyond this are filled evenly."""


def classes_of(instance: Instance) -> Types:
    """The groups' classes as types of mean size; `of_group` gives each group's class."""
    keys = np.column_stack([instance.tp, instance.sign])
    _, first, inverse, counts = np.unique(
        keys, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    inverse = inverse.reshape(-1)
    mean = np.stack(
        [
            np.bincount(inverse, weights=instance.r_gb[:, kind]) / counts
            for kind in range(instance.r_gb.shape[1])
        ],
        axis=1,
    )
    return Types(
        tp=instance.tp[first],
        r_gb=mean,
        weight=np.ones(len(first)),
        counts=counts.astype(np.int64),
        of_group=inverse.astype(np.int64),
        sign=instance.sign[first],
    )


def class_space(instance: Instance, classes: Types) -> ContentSpace | None:
    """Contents of classes; None where a server has too many."""
    return content_space(instance.servers, classes, full=instance.is_full, limit=MAX_CLASS_CONTENTS)


def least_cnt(space: ContentSpace, start: int, mode: Mode, budget: Budget) -> int | None:
    """The least bound on cnt at which servers can be filled fractionally; None out of time."""
    key = keyed(space.cnt, mode)
    for cnt in np.unique(key[key >= start]):
        if cover(space, key <= cnt, budget)[1] is not None:
            return int(cnt)
        if budget.expired():
            return None
    return None


def shapes(
    space: ContentSpace, cnt: int, mode: Mode, mean_gb: float, budget: Budget
) -> Ints | None:
    """Class contents per server, within `cnt`, with mean memory near `mean_gb`."""
    allowed = keyed(space.cnt, mode) <= cnt
    worth = -((space.mem_gb - mean_gb) ** 2)
    _, servers_of, _, _ = cover(space, allowed, budget, worth)
    if servers_of is None:
        return None
    chosen, _, _ = whole_servers(
        space, allowed, servers_of, budget, worth=worth, limit_s=1.0, gap=0.05
    )
    if chosen is None:
        return None
    order = np.argsort(space.kind, kind="stable")
    return np.repeat(space.rows[order], chosen[order], axis=0)


def deal(instance: Instance, classes: Types, shape: Ints) -> Ints:
    """Server of each group for the given shape (servers, classes): extremes first, to balance.

    Classes of large total sizes are dealt first. Each class is dealt by descending size to the
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
    expected: Floats = shape.astype(np.float64) @ (classes.tp * classes.r_gb[:, 0])
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


def spread_evenly(instance: Instance) -> Ints | None:
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


def start_placement(
    instance: Instance,
    classes: Types,
    space: ContentSpace | None,
    cnt: int,
    mode: Mode,
    budget: Budget,
) -> Ints | None:
    """The first placement: by shapes where they can be listed, evenly otherwise."""
    if space is not None:
        mean = float((instance.tp * instance.r_gb[:, 0]).sum()) / instance.servers.count
        shape = shapes(space, cnt, mode, mean, budget)
        if shape is not None:
            return deal(instance, classes, shape)
    return spread_evenly(instance)


def first_fit(instance: Instance) -> Ints | None:
    """Largest groups first, each on the first server with room; None when one finds none."""
    free = instance.servers.capacity.copy()
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    for size in sorted(set(instance.tp.tolist()), reverse=True):
        members = np.nonzero(instance.tp == size)[0]
        room = free // size
        slots = np.repeat(np.arange(len(free)), room)[: len(members)]
        if len(slots) < len(members):
            return None
        placement[members] = slots
        free -= size * np.bincount(slots, minlength=len(free))
    return placement


def deal_contents(instance: Instance, types: Types, rows: Ints) -> Ints:
    """Server of each group when server `s` holds `rows[s]` groups of each type.

    Servers of equal contents are ranked by quantile, and every type is dealt in that order from
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


def worst(instance: Instance, placement: Ints, mode: Mode) -> tuple[int, float]:
    """Largest cnt and mem (GB) over servers, as the mode compares them."""
    mem: Floats = keyed(instance.mem_gb(placement), mode)
    return int(keyed(instance.cnt(placement), mode).max()), float(mem.max())
