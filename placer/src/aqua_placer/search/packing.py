"""Whether groups fit their servers at all: first fit, then a proof.

Shards that fit the cluster in number may still not fit in blocks: three groups of 3 on two servers
of 4 do not. First fit by falling size settles nearly every case; the integer program over contents
of sizes settles the rest.
"""

from __future__ import annotations

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.columns import Ints
from aqua_placer.problem.instance import Instance, Types
from aqua_placer.programs.contents import content_space
from aqua_placer.programs.thresholds import contents_by_server, cover, whole_servers
from aqua_placer.search.dealing import deal_contents, first_fit


def pack(instance: Instance, budget: Budget) -> Ints:
    """Any placement that fits.

    Raises:
        ProblemInfeasibleError: There is none, or none was found.
    """
    placement = first_fit(instance)
    if placement is not None:
        return placement
    sizes, of_group, counts = np.unique(instance.tp, return_inverse=True, return_counts=True)
    nothing = np.zeros((len(sizes), len(instance.servers.counts)))
    types = Types(
        sizes, nothing, np.ones(len(sizes)), counts.astype(np.int64), of_group.reshape(-1), nothing
    )
    space = content_space(instance.servers, types, full=instance.is_full)
    if space is not None:
        everything = np.ones(len(space.rows), dtype=bool)
        _, servers_of, _, _ = cover(space, everything, budget)
        if servers_of is not None:
            chosen, _, _ = whole_servers(space, everything, servers_of, budget, limit_s=20.0)
            if chosen is not None:
                return deal_contents(instance, types, contents_by_server(space, chosen))
    demand = ", ".join(f"{n} of {s}" for s, n in zip(sizes.tolist(), counts.tolist(), strict=True))
    raise ProblemInfeasibleError(
        f"the groups' shards ({demand}) cannot be divided over the servers, although "
        f"{int(instance.tp.sum())} shards are not more than {instance.servers.total_gpus} GPUs",
        remedy="Lower the tensor parallelism of some groups, or add a server.",
    )
