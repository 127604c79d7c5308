"""Re-placement as a whole: problem and today's plan in, new plan with ordered moves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aqua_placer.bounds.layer_cake import layer_bound_gb
from aqua_placer.budget import Budget
from aqua_placer.errors import PlanInvalidError, ProblemInvalidError
from aqua_placer.plan.assembly import SolveResult, assign_gpus, plan_of
from aqua_placer.plan.files import placement_of
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.request import Request
from aqua_placer.relocate.exchange_search import Replaced, Target, replace_groups
from aqua_placer.relocate.moves import order_moves
from aqua_placer.search.layout import Layout
from aqua_placer.solve.minmax import solve_minmax
from aqua_placer.value.balance import BalanceMode, worst
from aqua_protocol.plan import Objective, Plan


@dataclass(frozen=True)
class Relocation:
    """What to reach and what it may cost.

    Attributes:
        epsilon: Relative distance to the optimum's bound that counts as reached.
        max_moves: Most shards that may leave their server.
    """

    epsilon: float = 0.01
    max_moves: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise ProblemInvalidError(
                f"epsilon is {self.epsilon}", remedy="Choose a share from 0 to below 1, like 0.01."
            )
        if self.max_moves is not None and self.max_moves < 0:
            raise ProblemInvalidError(f"max-moves is {self.max_moves}", remedy="Choose 0 or more.")


def relocate(
    instance: Instance, today: Plan | None, request: Request, relocation: Relocation, budget: Budget
) -> tuple[Plan, Replaced]:
    """The new plan and whether it reaches the target.

    Args:
        today: Where groups are now; without it, the problem's own `current`.

    Raises:
        ProblemInvalidError: Nothing says where anything is today, or it overfills a server.
        PlanInvalidError: `today` is for another cluster.
    """
    started = time.perf_counter(), time.process_time()
    gone: dict[str, tuple[int, list[int]]] = {}
    gpus: Sequence[list[int]] | None = None
    if today is not None:
        placement, own = placement_of(instance, today)
        instance, gpus = replace(instance, current=placement), own
        known = set(instance.names)
        gone = {
            entry.group: (entry.server_index, entry.gpus)
            for entry in today.assignments
            if entry.group not in known and entry.server_index < instance.servers.count
        }
    if instance.num_groups and (instance.current < 0).all() and not gone:
        raise ProblemInvalidError(
            "nothing says where any group is today",
            remedy="Give --current PLAN, or `current` in the problem; else use `solve`.",
        )
    before = _gpus_today(instance, gpus)
    target, bound = _target(instance, request, relocation, budget)
    result = replace_groups(
        instance, target, budget, seed=request.seed, max_moves=relocation.max_moves
    )
    moves, after = order_moves(instance, result.placement, before, gone)
    found = SolveResult.of(request.objective, result.placement, bound)
    slots, moved = Layout(instance, found.placement).slots, result.migrated_shards
    plan = plan_of(instance, request, found, slots, after, started, moves=moves, migrations=moved)
    return plan, result


def _gpus_today(instance: Instance, own: Sequence[list[int]] | None) -> list[list[int] | None]:
    """GPUs of the groups that run, from the plan or dealt out in order."""
    runs = instance.current >= 0
    if own is None:
        placed = replace(instance, tp=instance.tp[runs], names=[])
        dealt = iter(assign_gpus(placed, instance.current[runs]))
        return [next(dealt) if running else None for running in runs.tolist()]
    busy: dict[tuple[int, int], str] = {}
    for group in np.nonzero(runs)[0].tolist():
        if len(own[group]) != int(instance.tp[group]):
            raise PlanInvalidError(
                f"{instance.names[group]!r} has {int(instance.tp[group])} shards but "
                f"{len(own[group])} GPUs in the plan of today",
                remedy="A changed shape is a new model: give it a new name.",
            )
        for gpu in own[group]:
            rival = busy.setdefault((int(instance.current[group]), gpu), instance.names[group])
            if rival != instance.names[group]:
                raise PlanInvalidError(
                    f"{rival!r} and {instance.names[group]!r} share GPU {gpu} in today's plan",
                    remedy="Run `aqua-place check` on it.",
                )
    return [own[group] if runs[group] else None for group in range(instance.num_groups)]


def _target(
    instance: Instance, request: Request, relocation: Relocation, budget: Budget
) -> tuple[Target, float]:
    """What counts as reached, and the bound it is measured against.

    Coverage is measured against its bound, which costs milliseconds where the optimum costs
    seconds; the optimum is within a thousandth of it. Min-max targets need their solve.
    """
    if request.objective is Objective.COVERAGE:
        bound = layer_bound_gb(instance)
        return Target(Objective.COVERAGE, bound * (1 - relocation.epsilon), 0, 0.0), bound
    mode = BalanceMode(request.objective.value)
    best = solve_minmax(instance, mode, budget, request.seed)
    cnt, mem = worst(instance, best.found, mode)
    slack = relocation.epsilon * abs(best.value)
    return Target(request.objective, best.value + slack, cnt, mem + slack), best.bound
