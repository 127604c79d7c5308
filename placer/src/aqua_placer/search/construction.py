"""First placements: spread evenly, any that fits, and from what each server shall hold.

Shards that fit the cluster in number may still not fit in blocks: three groups of 3 on two servers
of 4 do not. First fit by falling size settles nearly every case; the integer program over contents
of sizes settles the rest.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.thresholds import Fraction, fractional_servers
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.contents import ContentSpace, content_space
from aqua_placer.problem.instance import Instance, Placement, Types
from aqua_placer.search.whole_servers import whole_servers


def any_placement(instance: Instance, budget: Budget) -> Placement:
    """Any placement that fits.

    Raises:
        ProblemInfeasibleError: There is none, or none was found.
    """
    placement = _first_fit(instance)
    if placement is None:
        placement = _by_program(instance, budget)
    if placement is not None:
        return placement
    sizes, counts = np.unique(instance.tp, return_counts=True)
    demand = ", ".join(f"{n} of {s}" for s, n in zip(sizes.tolist(), counts.tolist(), strict=True))
    raise ProblemInfeasibleError(
        f"the groups' shards ({demand}) cannot be divided over the servers, although "
        f"{int(instance.tp.sum())} shards are not more than {instance.servers.total_gpus} GPUs",
        remedy="Lower the tensor parallelism of some groups, or add a server.",
    )


def _first_fit(instance: Instance) -> Placement | None:
    """Largest groups first, each on the first server with room; None when one finds none."""
    free = instance.servers.capacity.copy()
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    for size in sorted(set(instance.tp.tolist()), reverse=True):
        members = np.nonzero(instance.tp == size)[0]
        slots = np.repeat(np.arange(len(free)), free // size)[: len(members)]
        if len(slots) < len(members):
            return None
        placement[members] = slots
        free -= size * np.bincount(slots, minlength=len(free))
    return placement


def _by_program(instance: Instance, budget: Budget) -> Placement | None:
    """Whole servers of sizes alone; None when there are none or too many contents."""
    nothing = np.zeros_like(instance.r_gb)
    types = Types.of(instance.tp, nothing, np.ones(instance.num_groups), nothing)
    space = content_space(instance.servers, types, full=instance.is_full)
    if space is None:
        return None
    _, fraction = fractional_servers(space, np.ones(len(space.rows), dtype=bool), budget)
    return None if fraction is None else whole_placement(instance, space, fraction, budget)


def whole_placement(
    instance: Instance,
    space: ContentSpace,
    fraction: Fraction,
    budget: Budget,
    *,
    worth: Float64[np.ndarray, " contents"] | None = None,
    enough: float = -np.inf,
    seed: int = 0,
) -> Placement | None:
    """A fractional solution made whole, as `whole_servers` does; None when it finds nothing."""
    chosen = whole_servers(space, fraction, budget, worth=worth, enough=enough, seed=seed)
    if chosen is None:
        return None
    order = np.argsort(space.kind, kind="stable")
    rows = np.repeat(space.rows[order], chosen[order], axis=0)
    return _assign_contents(instance, space.types, rows)


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


def _assign_contents(
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
