"""Three solvers that take the paper's program: HiGHS, Gurobi and CBC.

The others read what HiGHS writes as an MPS file. Gurobi's free licence stops at 2,000 variables and
rows; it says so in its own words, and we pass them on. CBC gives no bound after a time limit; the
linear relaxation by HiGHS stands in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from aqua_placer.bounds.linear_program import Answer, LinearModel, Verdict, as_highs, solve
from aqua_placer.budget import Budget
from aqua_placer.errors import SolverUnavailableError
from aqua_placer.problem.request import Backend


def _with_gurobi(model: LinearModel, budget: Budget, seed: int) -> Answer:
    gp = _installed("gurobipy", "gurobi")

    def stop_when_asked(running: Any, where: int) -> None:  # noqa: ANN401 - Gurobi's model
        if where == gp.GRB.Callback.POLLING and budget.expired():
            running.terminate()

    try:
        with (
            TemporaryDirectory() as folder,
            gp.Env(params={"OutputFlag": 0}) as env,
            gp.read(_written(model, folder), env=env) as grb,
        ):
            grb.Params.Threads = 1
            grb.Params.Seed = seed
            grb.Params.TimeLimit = max(budget.remaining_s(), 0.01)
            grb.Params.MIPGap = 0.0
            grb.optimize(stop_when_asked)
            if grb.Status == gp.GRB.INFEASIBLE:
                return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
            if not grb.SolCount:
                return Answer(Verdict.UNKNOWN, None, np.inf, float(grb.ObjBound))
            verdict = Verdict.OPTIMAL if grb.Status == gp.GRB.OPTIMAL else Verdict.FEASIBLE
            point = np.array(grb.getAttr("X"))
            return Answer(verdict, point, float(grb.ObjVal), float(grb.ObjBound))
    except gp.GurobiError as error:
        raise SolverUnavailableError(
            f"Gurobi refuses: {error}",
            remedy="Its free licence stops at 2,000 variables and rows; use `--solver auto` or "
            "`--backend highs`.",
        ) from error


def _with_cbc(model: LinearModel, budget: Budget, seed: int) -> Answer:
    pulp = _installed("pulp", "cbc")
    relaxed = solve(replace(model, integral=False), budget)
    # PuLP 3 warns that PuLP 4 will take CBC from elsewhere; until then its own is the one at hand.
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", DeprecationWarning)
        # PuLP does not know the MPS bounds of integer columns: they are told apart here.
        columns, problem = pulp.LpProblem.fromMPS(_written(replace(model, integral=False), folder))
        whole = np.broadcast_to(np.asarray(model.integral), len(model.cost))
        for variable, is_whole in zip(columns.values(), whole.tolist(), strict=True):
            variable.cat = "Integer" if is_whole else "Continuous"
        command = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)
        limit_s = max(budget.remaining_s(), 0.1)
        solver = command(msg=False, timeLimit=limit_s, threads=1, options=[f"randomS {seed}"])
        if not solver.available():
            raise SolverUnavailableError("PuLP finds no CBC", remedy="Install coin-or-cbc.")
        problem.solve(solver)
    infeasible = problem.status == pulp.LpStatusInfeasible and (
        relaxed.verdict is Verdict.INFEASIBLE
    )
    if infeasible or problem.sol_status == pulp.LpSolutionInfeasible:
        return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Answer(Verdict.UNKNOWN, None, np.inf, relaxed.bound)
    point = np.array([variable.varValue or 0.0 for variable in columns.values()])
    value = float(model.cost @ point)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return Answer(Verdict.OPTIMAL, point, value, value)
    return Answer(Verdict.FEASIBLE, point, value, relaxed.bound)


def _installed(module: str, extra: str) -> Any:  # noqa: ANN401 - neither has types
    try:
        return import_module(module)
    except ImportError as error:
        raise SolverUnavailableError(
            f"{module} is not installed", remedy=f"pip install 'aqua-placer[{extra}]'."
        ) from error


def _written(model: LinearModel, folder: str) -> str:
    """The model as an MPS file in `folder`, columns in their order."""
    path = str(Path(folder) / "model.mps")
    as_highs(model).writeModel(path)
    return path


BACKENDS: Final[dict[Backend, Callable[[LinearModel, Budget, int], Answer]]] = {
    Backend.HIGHS: solve,
    Backend.GUROBI: _with_gurobi,
    Backend.CBC: _with_cbc,
}
