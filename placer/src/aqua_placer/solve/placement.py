"""Where a placement is decided: an instance and a request in, a plan out.

`STRATEGIES` says which strategy solves what; each has a module of its own. Promises that the plan
is complete (every group has GPUs), that its bound holds for every placement, and that an interrupt
or the time limit still gives both.

Without its pins and sets kept apart a problem is a relaxation: its bound holds for the whole
problem too, and its placement, repaired, is a good start. Constrained groups stay where repair has
put them while all others go on exchanging. Small problems that repair finds no way for go to the
program over binaries, which can prove that the constraints cannot be met together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.plan.assembly import SolveResult, assign_gpus, plan_of
from aqua_placer.problem.instance import Instance, Placement
from aqua_placer.problem.request import Backend, Request, Solver
from aqua_placer.search.balance import improve_balance
from aqua_placer.search.construction import any_placement
from aqua_placer.search.coverage import ServerCost, improve_coverage
from aqua_placer.search.layout import Effort, Layout
from aqua_placer.search.repair import constrained_groups, repair
from aqua_placer.solve.coverage import solve_coverage
from aqua_placer.solve.minmax import solve_minmax
from aqua_placer.solve.paper_program import solve_paper_program, solve_program
from aqua_placer.value.balance import BalanceMode, worst
from aqua_placer.value.coverage import group_tables
from aqua_protocol.plan import Objective, Plan

SMALL_PROGRAM: Final = 60_000
"""Group x server binaries up to which feasibility is left to the program; chosen by hand.
Doubled, a proof that there is no placement may take several times as long."""

Strategy: TypeAlias = Callable[[Instance, Request, Budget], SolveResult]


def _coverage(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    best = solve_coverage(instance, budget, request.seed)
    return SolveResult(best.placement, best.balance.bound, coverage_bound_gb=best.bound_gb)


def _minmax(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    mode = BalanceMode(request.objective.value)
    best = solve_minmax(instance, mode, budget, request.seed)
    return SolveResult.of(request.objective, best.found, best.bound)


STRATEGIES: Final[dict[tuple[Solver, Objective], Strategy]] = {
    (Solver.AUTO, Objective.COVERAGE): _coverage,
    (Solver.AUTO, Objective.ABS): _minmax,
    (Solver.AUTO, Objective.SIGNED): _minmax,
    **{(Solver.MILP, objective): solve_paper_program for objective in Objective},
}
"""Who solves what. The paper's program knows pins and sets kept apart; what the others find is
repaired (`_constrain`)."""


def place(instance: Instance, request: Request, budget: Budget) -> Plan:
    """Solve and match.

    Raises:
        ProblemInfeasibleError: No placement satisfies the problem.
        SolverUnavailableError: The selected solver cannot take it.
    """
    started = time.perf_counter(), time.process_time()
    if instance.num_groups:
        found = STRATEGIES[request.solver, request.objective](instance, request, budget)
        if instance.is_constrained and request.solver is Solver.AUTO:
            found = _constrain(instance, request, budget, found)
    else:
        found = SolveResult(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0)
    slots, gpus = Layout(instance, found.placement).slots, assign_gpus(instance, found.placement)
    return plan_of(instance, request, found, slots, gpus, started)


def _constrain(
    instance: Instance, request: Request, budget: Budget, relaxed: SolveResult
) -> SolveResult:
    """The relaxation's bounds; its placement repaired, then exchanges around what is fixed.

    Raises:
        ProblemInfeasibleError: Proven for small problems; for large ones, not found.
    """
    placement = repaired(instance, relaxed.placement, budget, request.seed)
    signed = request.objective is Objective.SIGNED
    mode = BalanceMode.SIGNED if signed else BalanceMode.ABS
    cnt, mem = worst(instance, relaxed.placement, mode)
    aim = Thresholds(cnt, mem, mode, instance.hbm_gb)
    rng = np.random.default_rng(request.seed)
    layout = Layout(instance, placement, constrained_groups(instance))
    improve_balance(layout, aim, rng, budget, Effort(100, 1))
    improve_balance(layout, aim, rng, budget, Effort(100, 2, tolerance=2.0))
    if request.objective is Objective.COVERAGE:
        cost = ServerCost(aim, group_tables(instance))
        for order in (1, 2):
            effort = Effort(60, order, tolerance=2.0)
            improve_coverage(layout, cost, rng, budget, effort, target_gb=relaxed.coverage_bound_gb)
    return replace(relaxed, placement=layout.placement())


def repaired(instance: Instance, placement: Placement, budget: Budget, seed: int) -> Placement:
    """A placement that satisfies all constraints, near the given one where repair finds it.

    Raises:
        ProblemInfeasibleError: Proven for small problems; for large ones, not found.
    """
    try:
        return repair(instance, placement, seed)
    except ProblemInfeasibleError:
        if not instance.is_constrained:
            # Scattered beyond repair: start over from any placement that fits.
            return any_placement(instance, budget)
        if instance.num_groups * instance.servers.count > SMALL_PROGRAM:
            raise
        found, _ = solve_program(instance, Objective.ABS, Backend.HIGHS, budget, seed)
        if found is None:
            raise
        return found
