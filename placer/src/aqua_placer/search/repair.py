"""Pins and sets kept apart: move the groups that violate them, one exchange at a time.

A violating group moves to a server that it may be on, in exchange for up to three groups where
there is no room. Which group and which server is drawn, so that repairs do not run in circles.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np
from jaxtyping import Bool

from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.instance import Instance, Placement

MAX_REPAIRS: Final = 10_000
"""Moves before repair gives up: some hundred per constrained group in practice. Doubled, a
problem without a solution takes twice as long to refuse."""


def constrained_groups(instance: Instance) -> Bool[np.ndarray, " groups"]:
    """Groups that are pinned or kept apart from another, shape (num_groups,)."""
    mask: Bool[np.ndarray, " servers"] = np.zeros(instance.num_groups, dtype=bool)
    mask[list(instance.allowed)] = True
    for members in instance.apart:
        mask[list(members)] = True
    return mask


def violations(instance: Instance, placement: Placement) -> list[int]:
    """Groups on a server they may not be on, or beside one they are kept apart from."""
    wrong = {g for g, mask in instance.allowed.items() if not mask[placement[g]]}
    for members in instance.apart:
        seen: set[int] = set()
        for group in members:
            server = int(placement[group])
            if server in seen:
                wrong.add(group)
            seen.add(server)
    return sorted(wrong)


def repair(instance: Instance, placement: Placement, seed: int) -> Placement:
    """A placement that satisfies all constraints, near the given one.

    Raises:
        ProblemInfeasibleError: None was found, which is no proof that there is none.
    """
    placement = placement.copy()
    rng = np.random.default_rng(seed)
    mates: dict[int, list[tuple[int, ...]]] = {}
    for members in instance.apart:
        for group in members:
            mates.setdefault(group, []).append(members)
    tried = 0
    while wrong := violations(instance, placement):
        tried += 1
        group = wrong[int(rng.integers(len(wrong)))]
        if tried > MAX_REPAIRS or not _relocate(instance, placement, group, mates, rng):
            name = instance.names[group]
            raise ProblemInfeasibleError(
                f"found no server for group {name!r} that its pins and the sets kept apart allow",
                remedy="Loosen its pin or anti-affinity, or add a server.",
                group=name,
            )
    return placement


def _may(
    instance: Instance,
    placement: Placement,
    group: int,
    server: int,
    mates: list[tuple[int, ...]],
    leaving: set[int],
) -> bool:
    mask = instance.allowed.get(group)
    if mask is not None and not mask[server]:
        return False
    return not any(
        other != group and other not in leaving and placement[other] == server
        for members in mates
        for other in members
    )


def _relocate(
    instance: Instance,
    placement: Placement,
    group: int,
    mates: dict[int, list[tuple[int, ...]]],
    rng: np.random.Generator,
) -> bool:
    """Move `group` to a server that it may be on, exchanging up to three groups for room."""
    size = int(instance.tp[group])
    home = int(placement[group])
    capacity = instance.servers.capacity
    used = np.bincount(placement, weights=instance.tp, minlength=len(capacity)).astype(np.int64)
    for server in rng.permutation(len(capacity)).tolist():
        if server == home:
            continue
        here = np.nonzero(placement == server)[0]
        candidates: list[tuple[int, ...]] = [()]
        for count in (1, 2, 3):
            candidates += combinations(here.tolist(), count)
        for leaving in candidates:
            moved = int(instance.tp[list(leaving)].sum()) if leaving else 0
            if used[server] - moved + size > capacity[server]:
                continue
            if used[home] - size + moved > capacity[home]:
                continue
            gone = set(leaving)
            if not _may(instance, placement, group, server, mates.get(group, []), gone):
                continue
            if all(
                _may(instance, placement, other, home, mates.get(other, []), {group})
                for other in leaving
            ):
                placement[group] = server
                placement[list(leaving)] = home
                return True
    return False
