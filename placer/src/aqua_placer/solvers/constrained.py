"""Pins and sets kept apart: repair what the unconstrained optimum violates, then search on.

Without its constraints a problem is a relaxation: its bound holds for the constrained problem too,
and its placement is a good start. Violated groups move to the allowed server where the exchange
costs least; constrained groups then stay where they are while all others go on exchanging. Small
problems also go to the program over binaries, which knows all constraints and can prove that they
cannot be met together.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.columns import Bools, Ints
from aqua_placer.problem.instance import Instance
from aqua_placer.programs.milp import Backend, solve_milp
from aqua_protocol.plan import Objective

MAX_REPAIRS: Final = 10_000
"""Moves before repair gives up: some hundred per constrained group in practice."""

SMALL_PROGRAM: Final = 60_000
"""Group x server binaries up to which feasibility is left to the program."""


def constrained_groups(instance: Instance) -> Bools:
    """Groups that are pinned or kept apart from another, shape (num_groups,)."""
    mask: Bools = np.zeros(instance.num_groups, dtype=bool)
    mask[list(instance.allowed)] = True
    for members in instance.apart:
        mask[list(members)] = True
    return mask


def violations(instance: Instance, placement: Ints) -> list[int]:
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


def repair(instance: Instance, placement: Ints, budget: Budget, seed: int) -> Ints:
    """A placement that satisfies all constraints, near the given one.

    Raises:
        ProblemInfeasibleError: Proven for small problems; for large ones, not found.
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
            return _by_program(instance, group, budget, seed)
    return placement


def _may(
    instance: Instance,
    placement: Ints,
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
    placement: Ints,
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


def _by_program(instance: Instance, group: int, budget: Budget, seed: int) -> Ints:
    name = instance.names[group]
    if instance.num_groups * instance.servers.count <= SMALL_PROGRAM:
        result = solve_milp(instance, Objective.ABS, Backend.HIGHS, budget, seed)
        if result.placement is not None:
            return result.placement
    raise ProblemInfeasibleError(
        f"found no server for group {name!r} that its pins and the sets kept apart allow",
        remedy="Loosen its pin or anti-affinity, or add a server.",
        group=name,
    )
