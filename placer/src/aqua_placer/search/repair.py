"""Groups without a server, or on one where they may not be: each is put where it may be.

Newcomers, pins and sets kept apart are one problem. Of the groups that wait the largest goes first,
into free GPUs where there are any; else the groups that are in its way leave the server that
has fewest of them, and wait in turn. Which ones leave is drawn: repairs do not run in circles.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from jaxtyping import Bool

from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.instance import Instance, Placement

MAX_STEPS: Final = 2_000
"""Groups put somewhere, beside those that waited at first, before repair gives up: a few per group
in practice. Doubled, a problem without a solution takes twice as long to refuse."""


def constrained_groups(instance: Instance) -> Bool[np.ndarray, " groups"]:
    """Groups that are pinned or kept apart from another, shape (num_groups,)."""
    mask: Bool[np.ndarray, " groups"] = np.zeros(instance.num_groups, dtype=bool)
    mask[list(instance.allowed)] = True
    for members in instance.apart:
        mask[list(members)] = True
    return mask


def _misplaced(instance: Instance, placement: Placement) -> list[int]:
    """Groups on no server, on one they may not be on, or beside one they are kept apart from."""
    wrong = set(np.nonzero(placement < 0)[0].tolist())
    wrong |= {g for g, mask in instance.allowed.items() if not mask[placement[g]]}
    for members in instance.apart:
        seen: set[int] = set()
        for group in members:
            server = int(placement[group])
            if server in seen:
                wrong.add(group)
            seen.add(server)
    return sorted(wrong)


def repair(instance: Instance, placement: Placement, seed: int) -> Placement:
    """A placement that satisfies all constraints, near the given one; -1 there is no server.

    Raises:
        ProblemInfeasibleError: None was found, which is no proof that there is none.
    """
    placement, rng = placement.copy(), np.random.default_rng(seed)
    servers, tp, fixed = instance.servers, instance.tp, constrained_groups(instance)
    mates: dict[int, set[int]] = defaultdict(set)
    for members in instance.apart:
        for group in members:
            mates[group] |= set(members) - {group}
    homeless = _misplaced(instance, placement)
    placement[homeless] = -1
    placed = np.nonzero(placement >= 0)[0]
    sign = instance.sign[:, 0]
    used, cnt = (
        np.bincount(placement[placed], weights=column[placed], minlength=servers.count)
        for column in (tp, tp * sign)
    )
    free = servers.capacity - used.astype(np.int64)
    waiting = [(-int(tp[group]), group) for group in homeless]
    heapify(waiting)
    steps = MAX_STEPS + len(waiting)
    while waiting:
        steps -= 1
        size, group = int(tp[waiting[0][1]]), heappop(waiting)[1]
        may = np.nonzero(instance.allowed.get(group, servers.capacity >= size))[0]
        may = may[servers.capacity[may] >= size]
        beside = np.array([placement[mate] for mate in sorted(mates[group])], dtype=np.int64)
        fits = may[(free[may] >= size) & ~np.isin(may, beside)]
        if not steps or not len(may):
            raise ProblemInfeasibleError(
                f"found no server for group {instance.names[group]!r} that its size, its pins and "
                "the sets kept apart allow",
                remedy="Loosen its pin or anti-affinity, or add a server.",
                group=instance.names[group],
            )
        if len(fits):
            # Producers to servers of consumers and the other way round; exchanges do the rest.
            server = int(fits[np.lexsort((free[fits], sign[group] * cnt[fits]))[0]])
        else:
            missing = np.maximum(size - free[may], 0) + np.isin(may, beside)
            server = int(may[(missing + rng.random(len(may)) * size).argmin()])
        here = np.nonzero(placement == server)[0] if not len(fits) else may[:0]
        order = np.lexsort((rng.random(len(here)), tp[here], fixed[here]))
        for other in here[order].tolist():
            if other in mates[group] or free[server] < size:
                placement[other] = -1
                free[server] += tp[other]
                cnt[server] -= tp[other] * sign[other]
                heappush(waiting, (-int(tp[other]), other))
        placement[group] = server
        free[server] -= size
        cnt[server] += size * sign[group]
    return placement
