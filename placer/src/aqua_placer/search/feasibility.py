"""Whether groups fit their servers at all: first fit, then a proof.

Shards that fit the cluster in number may still not fit in blocks: three groups of 3 on two servers
of 4 do not. First fit by falling size settles nearly every case; the integer program over contents
of sizes settles the rest.
"""

from __future__ import annotations

import numpy as np

from aqua_placer.bounds.thresholds import fractional_servers
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.contents import content_space
from aqua_placer.problem.instance import Instance, Placement, Types
from aqua_placer.search.construction import assign_contents
from aqua_placer.search.whole_servers import contents_by_server, whole_servers


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
    if fraction is None:
        return None
    chosen = whole_servers(space, fraction, budget)
    if chosen is None:
        return None
    return assign_contents(instance, types, contents_by_server(space, chosen))
