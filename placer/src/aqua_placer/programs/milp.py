"""The paper's program over group x server binaries, as referee: one model, three solvers.

    min  H x C + M          |cnt_s| <= C, |mem_s| <= M for every server (signed: one side only)
    max  sum w tp t_c       t_c <= need, t_c <= spare of every producer that c uses

C and M are free variables: all-consumer clusters stay feasible, which the artifact's form (maxima
with lower bound 0, tied by equality) is not. Pins and sets kept apart are rows like any other. It
is slow beyond a few hundred GPUs, because servers of a class are interchangeable; `auto` is not.

Gurobi's free licence stops at 2,000 variables and rows; it says so in its own words, and we pass
them on. CBC gives no bound after a time limit; the linear relaxation by HiGHS stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import ModuleType
from typing import Any, Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError, ProblemInvalidError, SolverUnavailableError
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.linear import Answer, Model, Verdict, solve
from aqua_protocol.plan import Objective

MAX_VARIABLES: Final = 400_000
"""Beyond this the model alone takes gigabytes and no solver finishes."""


MAX_ROWS: Final = 1_000_000
"""Rows of the coverage program: consumers x producers x servers."""


class Backend(StrEnum):
    """Solvers that can take the program."""

    HIGHS = "highs"
    GUROBI = "gurobi"
    CBC = "cbc"


@dataclass
class Rows:
    """A program being written, entry by entry."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def variable(self, cost: float, lower: float, upper: float, *, whole: bool) -> int:
        """A new column; returns its index."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """A new row: lower <= sum of value x column <= upper."""
        index = len(self.row_lower)
        self.entries += [(column, index, value) for column, value in terms]
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def model(self) -> Model:
        """The program in columns."""
        entries = sorted(self.entries)
        column = np.array([entry[0] for entry in entries], dtype=np.int64)
        starts = np.zeros(len(self.cost) + 1, dtype=np.int64)
        np.cumsum(np.bincount(column, minlength=len(self.cost)), out=starts[1:])
        return Model(
            cost=np.array(self.cost),
            lower=np.array(self.lower),
            upper=np.array(self.upper),
            starts=starts,
            rows=np.array([entry[1] for entry in entries], dtype=np.int64),
            values=np.array([entry[2] for entry in entries]),
            row_lower=np.array(self.row_lower),
            row_upper=np.array(self.row_upper),
            integral=np.array(self.integral, dtype=np.int64),
        )


@dataclass(frozen=True, eq=False)
class MilpResult:
    """A placement and what the solver proved: `value` and `bound` in the objective's direction."""

    placement: Ints | None
    value: float
    bound: float
    verdict: Verdict


def solve_milp(
    instance: Instance, objective: Objective, backend: Backend, budget: Budget, seed: int
) -> MilpResult:
    """Solve the program for `objective` with `backend`.

    Raises:
        SolverUnavailableError: Not installed, no licence, or too large for the licence.
        ProblemInfeasibleError: Proven that no placement satisfies pins and sets kept apart.
        ProblemInvalidError: Too large for this formulation.
    """
    if instance.num_groups * instance.servers.count > MAX_VARIABLES:
        raise ProblemInvalidError(
            f"{instance.num_groups} groups on {instance.servers.count} servers are too many for "
            "the group x server program",
            remedy="Use `--solver auto`.",
        )
    rows = Rows()
    x = _assignment(instance, rows)
    if objective is Objective.COVERAGE:
        _coverage(instance, rows, x)
    else:
        _minmax(instance, rows, x, objective)
    budget.report(f"{backend} starts")
    answer = BACKENDS[backend](rows.model(), budget, seed)
    if answer.verdict is Verdict.INFEASIBLE:
        raise ProblemInfeasibleError(
            "no placement satisfies group sizes, pins and sets kept apart together",
            remedy="Loosen a pin or an anti-affinity, or add a server.",
        )
    placement = None
    if answer.x is not None:
        placement = answer.x[x].argmax(axis=1).astype(np.int64)
    sign = -1.0 if objective is Objective.COVERAGE else 1.0
    return MilpResult(placement, sign * answer.cost, sign * answer.bound, answer.verdict)


def _assignment(instance: Instance, rows: Rows) -> Ints:
    servers = instance.servers
    x = np.zeros((instance.num_groups, servers.count), dtype=np.int64)
    for group in range(instance.num_groups):
        mask = instance.allowed.get(group)
        for server in range(servers.count):
            fits = instance.tp[group] <= servers.capacity[server]
            may = fits and (mask is None or mask[server])
            x[group, server] = rows.variable(0.0, 0.0, float(may), whole=True)
        rows.row([(int(column), 1.0) for column in x[group]], 1.0, 1.0)
    for server in range(servers.count):
        terms = [(int(x[g, server]), float(instance.tp[g])) for g in range(instance.num_groups)]
        rows.row(terms, -np.inf, float(servers.capacity[server]))
        for members in instance.apart:
            rows.row([(int(x[g, server]), 1.0) for g in members], -np.inf, 1.0)
    return x


def _minmax(instance: Instance, rows: Rows, x: Ints, objective: Objective) -> None:
    most = float((instance.tp[:, None] * np.abs(instance.r_gb)).sum())
    lower = 0.0 if objective is Objective.ABS else -most
    mem = rows.variable(1.0, lower, most, whole=False)
    shards = float(instance.tp.sum())
    # cnt is a whole number anyway; saying so lets the solver branch on it.
    cnt_lower = 0.0 if objective is Objective.ABS else -shards
    cnt = rows.variable(instance.hbm_gb, cnt_lower, shards, whole=True)
    for server in range(instance.servers.count):
        kind = int(instance.servers.class_of[server])
        for maximum, column in ((mem, instance.r_gb), (cnt, instance.sign)):
            terms = [
                (int(x[g, server]), float(instance.tp[g] * column[g, kind]))
                for g in range(instance.num_groups)
                if column[g, kind]
            ]
            rows.row([*terms, (maximum, -1.0)], -np.inf, 0.0)
            if objective is Objective.ABS:
                rows.row([*terms, (maximum, 1.0)], 0.0, np.inf)


def _coverage(instance: Instance, rows: Rows, x: Ints) -> None:
    """Which producers each consumer uses, on one server; sizes must not depend on the class."""
    if not (np.abs(instance.r_gb - instance.r_gb[:, :1]) < GRAIN_GB).all():
        raise ProblemInvalidError(
            "coverage as a program needs sizes that are the same on every server class",
            remedy="Use `--solver auto`, or the objective abs.",
        )
    r_gb = instance.r_gb[:, 0]
    consumers = np.nonzero(r_gb < -GRAIN_GB / 2)[0].tolist()
    producers = np.nonzero(r_gb > GRAIN_GB / 2)[0].tolist()
    if len(consumers) * len(producers) * instance.servers.count > MAX_ROWS:
        raise ProblemInvalidError(
            f"coverage of {len(consumers)} consumers by {len(producers)} producers on "
            f"{instance.servers.count} servers is too large for the program over binaries",
            remedy="Use `--solver auto`.",
        )
    lent: dict[int, list[int]] = {producer: [] for producer in producers}
    for consumer in consumers:
        need, shards = -float(r_gb[consumer]), float(instance.tp[consumer])
        worth = float(instance.weight[consumer]) * shards
        covered = rows.variable(-worth, 0.0, need, whole=False)
        served = rows.variable(0.0, 0.0, 1.0, whole=True)
        rows.row([(covered, 1.0), (served, -need)], -np.inf, 0.0)
        taken = []
        for producer in producers:
            spare = float(r_gb[producer])
            uses = rows.variable(0.0, 0.0, 1.0, whole=True)
            most = float(min(instance.tp[consumer], instance.tp[producer]))
            amount = rows.variable(0.0, 0.0, most, whole=True)
            rows.row([(amount, 1.0), (uses, -most)], -np.inf, 0.0)
            if spare < need:
                rows.row([(covered, 1.0), (uses, need - spare)], -np.inf, need)
            for server in range(instance.servers.count):
                here, there = int(x[consumer, server]), int(x[producer, server])
                rows.row([(here, 1.0), (there, -1.0), (uses, 1.0)], -np.inf, 1.0)
            taken.append((amount, 1.0))
            lent[producer].append(amount)
        rows.row([*taken, (served, -shards)], 0.0, 0.0)
    for producer in producers:
        rows.row([(a, 1.0) for a in lent[producer]], -np.inf, float(instance.tp[producer]))


def _with_highs(model: Model, budget: Budget, seed: int) -> Answer:
    return solve(model, budget, limit_s=budget.remaining_s(), seed=seed)


def _with_gurobi(model: Model, budget: Budget, seed: int) -> Answer:
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


def _by_gurobi(gp: Any, model: Model, budget: Budget, seed: int) -> Answer:  # noqa: ANN401 - optional
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


def _with_cbc(model: Model, budget: Budget, seed: int) -> Answer:
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


def _by_pulp(pulp: ModuleType, model: Model, budget: Budget, seed: int) -> Answer:
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
    relaxed = solve(replace(model, integral=False), budget, limit_s=limit_s)
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


def _lower(model: Model) -> Floats:
    return np.zeros(len(model.cost)) if model.lower is None else model.lower


def _flags(model: Model) -> list[bool]:
    assert not isinstance(model.integral, bool), "the program says which columns are whole"
    return [bool(flag) for flag in model.integral]


def _rows(model: Model) -> list[tuple[list[tuple[int, float]], float, float]]:
    """The program by rows: (column, value) terms and both sides."""
    terms: list[list[tuple[int, float]]] = [[] for _ in model.row_lower]
    for column in range(len(model.cost)):
        for at in range(int(model.starts[column]), int(model.starts[column + 1])):
            terms[int(model.rows[at])].append((column, float(model.values[at])))
    sides = zip(terms, model.row_lower.tolist(), model.row_upper.tolist(), strict=True)
    return [(row, low, high) for row, low, high in sides if row]


BACKENDS: Final[dict[Backend, Callable[[Model, Budget, int], Answer]]] = {
    Backend.HIGHS: _with_highs,
    Backend.GUROBI: _with_gurobi,
    Backend.CBC: _with_cbc,
}
