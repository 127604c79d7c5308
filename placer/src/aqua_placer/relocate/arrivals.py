"""Where groups that run nowhere yet go first: into free GPUs, with room made where needed."""

from __future__ import annotations

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInvalidError
from aqua_placer.problem.instance import Instance, Placement
from aqua_placer.search.feasibility import any_placement
from aqua_placer.solve.constrained import repaired


def with_arrivals(instance: Instance, budget: Budget, seed: int) -> Placement:
    """Today's placement with the groups that have none put into free GPUs."""
    capacity = instance.servers.capacity
    placed = instance.current >= 0
    used = np.bincount(
        instance.current[placed], weights=instance.tp[placed], minlength=len(capacity)
    ).astype(np.int64)
    if (used > capacity).any():
        server = int((used > capacity).argmax())
        raise ProblemInvalidError(
            f"server {instance.servers.name(server)} holds {int(used[server])} shards today but "
            f"has {int(capacity[server])} GPUs",
            remedy="Correct `current`, or leave it out for groups that are not running.",
        )
    placement = instance.current.copy()
    waiting = np.nonzero(~placed)[0]
    waiting = waiting[np.argsort(-instance.tp[waiting], kind="stable")]
    free = capacity - used
    sign = np.where(instance.r_gb[:, 0] > 0, 1, -1)
    cnt = np.bincount(
        instance.current[placed], weights=(instance.tp * sign)[placed], minlength=len(capacity)
    )
    stuck = []
    for group in waiting.tolist():
        fits = np.nonzero(free >= instance.tp[group])[0]
        if not len(fits):
            stuck.append(group)
            continue
        # Producers to servers of consumers and the other way round; exchanges do the rest.
        server = int(fits[np.lexsort((free[fits], sign[group] * cnt[fits]))[0]])
        placement[group] = server
        free[server] -= instance.tp[group]
        cnt[server] += instance.tp[group] * sign[group]
    if stuck:
        placement = _make_room(instance, placement, stuck, budget)
    return repaired(instance, placement, budget, seed) if instance.is_constrained else placement


def _make_room(
    instance: Instance, placement: Placement, stuck: list[int], budget: Budget
) -> Placement:
    """Free GPUs are too scattered for large groups: empty the servers that need fewest moves."""
    placement = placement.copy()
    free = instance.servers.capacity - np.bincount(
        placement[placement >= 0],
        weights=instance.tp[placement >= 0],
        minlength=instance.servers.count,
    ).astype(np.int64)
    for group in stuck:
        size = int(instance.tp[group])
        for server in np.argsort(-free, kind="stable").tolist():
            here = np.nonzero(placement == server)[0]
            here = here[np.argsort(instance.tp[here], kind="stable")]
            trial, room = placement.copy(), free.copy()
            for other in here.tolist():
                if room[server] >= size:
                    break
                shards = int(instance.tp[other])
                fits = np.nonzero((room >= shards) & (np.arange(len(room)) != server))[0]
                if len(fits):
                    goal = int(fits[room[fits].argmin()])
                    trial[other] = goal
                    room[goal] -= shards
                    room[server] += shards
            if room[server] >= size:
                placement, free = trial, room
                placement[group] = server
                free[server] -= size
                break
        else:
            # Scattered beyond such repairs: start over from any placement that fits.
            return any_placement(instance, budget)
    return placement
