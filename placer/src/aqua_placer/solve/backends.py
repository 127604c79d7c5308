"""Three solvers that take the paper's program: HiGHS, Gurobi and CBC.

Gurobi's free licence stops at 2,000 variables and rows; it says so in its own words, and we pass
them on. CBC gives no bound after a time limit; the linear relaxation by HiGHS stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from aqua_placer.bounds.linear_program import Answer, LinearModel, Verdict, solve
from aqua_placer.budget import Budget
from aqua_placer.errors import SolverUnavailableError
from aqua_placer.problem.request import Backend


def _with_highs(model: LinearModel, budget: Budget, seed: int) -> Answer:
    return solve(model, budget, seed=seed)


def _with_gurobi(model: LinearModel, budget: Budget, seed: int) -> Answer:
    try:
        import gurobipy as gp
    except ImportError as error:
        raise SolverUnavailableError(
            "gurobipy is not installed", remedy="pip install 'aqua-placer[gurobi]'."
        ) from error
    try:
        return _by_gurobi(gp, model, budget, seed)
    except gp.GurobiError as error:
        raise SolverUnavailableError(
            f"Gurobi refuses: {error}",
            remedy="Its free licence stops at 2,000 variables and rows; use `--solver auto` or "
            "`--backend highs`.",
        ) from error


def _by_gurobi(gp: Any, model: LinearModel, budget: Budget, seed: int) -> Answer:  # noqa: ANN401 - optional
    with gp.Env(params={"OutputFlag": 0}) as env, gp.Model(env=env) as grb:
        grb.Params.Threads = 1
        grb.Params.Seed = seed
        grb.Params.TimeLimit = max(budget.remaining_s(), 0.01)
        grb.Params.MIPGap = 0.0
        lower = _lower(model)
        variables = [
            grb.addVar(
                lb=float(lower[i]),
                ub=float(model.upper[i]),
                obj=float(model.cost[i]),
                vtype=gp.GRB.INTEGER if whole else gp.GRB.CONTINUOUS,
            )
            for i, whole in enumerate(_flags(model))
        ]
        for terms, low, high in _rows(model):
            expression = gp.LinExpr([(value, variables[column]) for column, value in terms])
            if low == high:
                grb.addLConstr(expression, "=", low)
                continue
            if np.isfinite(low):
                grb.addLConstr(expression, ">", low)
            if np.isfinite(high):
                grb.addLConstr(expression, "<", high)

        def stop_when_asked(running: Any, where: int) -> None:  # noqa: ANN401 - Gurobi's model
            if where == gp.GRB.Callback.POLLING and budget.expired():
                running.terminate()

        grb.optimize(stop_when_asked)
        if grb.Status == gp.GRB.INFEASIBLE:
            return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
        if not grb.SolCount:
            return Answer(Verdict.UNKNOWN, None, np.inf, float(grb.ObjBound))
        point = np.array([variable.X for variable in variables])
        verdict = Verdict.OPTIMAL if grb.Status == gp.GRB.OPTIMAL else Verdict.FEASIBLE
        return Answer(verdict, point, float(grb.ObjVal), float(grb.ObjBound))


def _with_cbc(model: LinearModel, budget: Budget, seed: int) -> Answer:
    import warnings

    try:
        import pulp
    except ImportError as error:
        raise SolverUnavailableError(
            "PuLP is not installed", remedy="pip install 'aqua-placer[cbc]'."
        ) from error
    # PuLP 3 warns that PuLP 4 will take CBC from elsewhere; until then its own is the one at hand.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _by_pulp(pulp, model, budget, seed)


def _by_pulp(pulp: ModuleType, model: LinearModel, budget: Budget, seed: int) -> Answer:
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    lower = _lower(model)
    variables = [
        problem.add_variable(
            f"v{i}",
            float(lower[i]),
            float(model.upper[i]),
            cat="Integer" if whole else "Continuous",
        )
        for i, whole in enumerate(_flags(model))
    ]
    problem += pulp.LpAffineExpression(
        [(variables[i], float(cost)) for i, cost in enumerate(model.cost) if cost]
    )
    for terms, low, high in _rows(model):
        expression = pulp.LpAffineExpression([(variables[column], v) for column, v in terms])
        if low == high:
            problem += expression == low
            continue
        if np.isfinite(low):
            problem += expression >= low
        if np.isfinite(high):
            problem += expression <= high
    limit_s = max(budget.remaining_s(), 0.1)
    command = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)
    solver = command(msg=False, timeLimit=limit_s, threads=1, options=[f"randomS {seed}"])
    if not solver.available():
        raise SolverUnavailableError("PuLP finds no CBC", remedy="Install coin-or-cbc.")
    relaxed = solve(replace(model, integral=False), budget)
    problem.solve(solver)
    if problem.status == pulp.LpStatusInfeasible and relaxed.verdict is Verdict.INFEASIBLE:
        return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Answer(Verdict.UNKNOWN, None, np.inf, relaxed.bound)
    point = np.array([variable.varValue or 0.0 for variable in variables])
    value = float(model.cost @ point)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return Answer(Verdict.OPTIMAL, point, value, value)
    return Answer(Verdict.FEASIBLE, point, value, relaxed.bound)


def _lower(model: LinearModel) -> Float64[np.ndarray, " columns"]:
    return np.zeros(len(model.cost)) if model.lower is None else model.lower


def _flags(model: LinearModel) -> list[bool]:
    assert not isinstance(model.integral, bool), "the program says which columns are whole"
    return [bool(flag) for flag in model.integral]


def _rows(model: LinearModel) -> list[tuple[list[tuple[int, float]], float, float]]:
    """The program by rows: (column, value) terms and both sides."""
    terms: list[list[tuple[int, float]]] = [[] for _ in model.row_lower]
    for column in range(len(model.cost)):
        for at in range(int(model.starts[column]), int(model.starts[column + 1])):
            terms[int(model.rows[at])].append((column, float(model.values[at])))
    sides = zip(terms, model.row_lower.tolist(), model.row_upper.tolist(), strict=True)
    return [(row, low, high) for row, low, high in sides if row]


BACKENDS: Final[dict[Backend, Callable[[LinearModel, Budget, int], Answer]]] = {
    Backend.HIGHS: _with_highs,
    Backend.GUROBI: _with_gurobi,
    Backend.CBC: _with_cbc,
}
