"""Where a placement is decided: an instance and a request in, a plan out.

`STRATEGIES` says which strategy solves what; each has a module of its own. Promises that the plan
is complete (every group has GPUs), that its bound holds for every placement, and that an interrupt
or the time limit still gives both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.plan.assembly import SolveResult, assign_gpus, plan_of
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.request import Request, Solver
from aqua_placer.search.layout import Layout
from aqua_placer.solve.constrained import constrain
from aqua_placer.solve.coverage import solve_coverage
from aqua_placer.solve.minmax import solve_minmax
from aqua_placer.solve.paper_program import solve_paper_program
from aqua_placer.value.balance import BalanceMode
from aqua_placer.value.matches import match_servers
from aqua_protocol.plan import Objective, Plan

Strategy: TypeAlias = Callable[[Instance, Request, Budget], SolveResult]


def _coverage(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    best = solve_coverage(instance, budget, request.seed)
    return SolveResult(best.placement, best.balance.bound, coverage_bound_gb=best.bound_gb)


def _abs(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    best = solve_minmax(instance, BalanceMode.ABS, budget, request.seed)
    return SolveResult(best.found, best.bound)


def _signed(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    # The balance of a plan is told in absolute values whatever it was solved for.
    best = solve_minmax(instance, BalanceMode.SIGNED, budget, request.seed)
    return SolveResult(best.found, 0.0, signed_bound=best.bound)


STRATEGIES: Final[dict[tuple[Solver, Objective], Strategy]] = {
    (Solver.AUTO, Objective.COVERAGE): _coverage,
    (Solver.AUTO, Objective.ABS): _abs,
    (Solver.AUTO, Objective.SIGNED): _signed,
    (Solver.MILP, Objective.COVERAGE): solve_paper_program,
    (Solver.MILP, Objective.ABS): solve_paper_program,
    (Solver.MILP, Objective.SIGNED): solve_paper_program,
}
"""Who solves what. The paper's program knows pins and sets kept apart; what the others find is
repaired (`constrained`)."""


def place(instance: Instance, request: Request, budget: Budget) -> Plan:
    """Solve and match.

    Raises:
        ProblemInfeasibleError: No placement satisfies the problem.
        SolverUnavailableError: The selected solver cannot take it.
    """
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    if instance.num_groups:
        found = STRATEGIES[request.solver, request.objective](instance, request, budget)
        if instance.is_constrained and request.solver is Solver.AUTO:
            found = constrain(instance, request, budget, found)
    else:
        found = SolveResult(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0)
    gpus = assign_gpus(instance, found.placement)
    slots = Layout(instance, found.placement).slots
    matches = match_servers(instance, slots, gpus, request.matching)
    spent = (time.perf_counter() - started_s, time.process_time() - cpu_started_s)
    return plan_of(instance, request, found, gpus, matches, spent)
