"""The strategy for pins and sets kept apart: repair the unconstrained optimum, then search on.

Without its constraints a problem is a relaxation: its bound holds for the constrained problem too,
and its placement is a good start. Constrained groups stay where repair has put them while all
others go on exchanging. Small problems that repair finds no way for go to the program over
binaries, which knows all constraints and can prove that they cannot be met together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.plan.assembly import SolveResult
from aqua_placer.problem.instance import Instance, Placement
from aqua_placer.problem.request import Backend, Request
from aqua_placer.search.balance import improve_balance
from aqua_placer.search.coverage import cost_for, improve_coverage
from aqua_placer.search.feasibility import any_placement
from aqua_placer.search.layout import Effort, Layout
from aqua_placer.search.repair import constrained_groups, repair
from aqua_placer.solve.paper_program import solve_program
from aqua_placer.value.balance import BalanceMode, worst
from aqua_protocol.plan import Objective

SMALL_PROGRAM: Final = 60_000
"""Group x server binaries up to which feasibility is left to the program; chosen by hand.
Doubled, a proof that there is no placement may take several times as long."""


def constrain(
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
        target = relaxed.coverage_bound_gb or np.inf
        cost = cost_for(layout, aim)
        for order in (1, 2):
            effort = Effort(60, order, tolerance=2.0)
            improve_coverage(layout, cost, rng, budget, effort, target_gb=target)
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
