"""One suite over every solver: `auto` and the paper's program on each backend."""

from __future__ import annotations

from typing import Any

import pytest

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError, ProblemInvalidError, SolverUnavailableError
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Backend, Request, Solver
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Objective, Plan

SOLVERS = [
    pytest.param(Solver.AUTO, Backend.HIGHS, id="auto"),
    pytest.param(Solver.MILP, Backend.HIGHS, id="highs"),
    pytest.param(Solver.MILP, Backend.GUROBI, id="gurobi"),
    pytest.param(Solver.MILP, Backend.CBC, id="cbc"),
]
every_solver = pytest.mark.parametrize(("solver", "backend"), SOLVERS)


def solved(
    problem: dict[str, Any],
    objective: Objective,
    solver: Solver,
    backend: Backend,
    limit_s: float = 20.0,
) -> Plan:
    instance = instance_from(problem)
    plan = place(instance, Request(objective, solver, backend), Budget(limit_s))
    verdicts = check_plan(instance, plan)
    assert verdicts.passed, verdicts.problems
    return plan


@every_solver
@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("family", ["refmix", "tpmix"])
def test_all_solvers_agree_on_small_clusters(
    family: str, objective: Objective, solver: Solver, backend: Backend
) -> None:
    problem = generate(family, 12, 3, server_gpus=4)
    reference = solved(problem, objective, Solver.AUTO, Backend.HIGHS)
    plan = solved(problem, objective, solver, backend)
    assert plan.proven
    assert plan.value == pytest.approx(reference.value, abs=1e-3)


@every_solver
def test_medium_bounds_never_pass_what_another_solver_reached(
    solver: Solver, backend: Backend
) -> None:
    problem = generate("ref50", 64, 1)
    reached = solved(problem, Objective.ABS, Solver.AUTO, Backend.HIGHS).value
    plan = solved(problem, Objective.ABS, solver, backend, limit_s=5.0)
    assert plan.bound <= reached + 1e-3
    assert plan.value >= reached - 1e-3, "auto proved its value optimal"


@every_solver
@pytest.mark.parametrize("size", [30.0, -30.0])
def test_clusters_of_one_role_are_valid(size: float, solver: Solver, backend: Backend) -> None:
    groups = {"name": ["a", "b", "c"], "tp": [1, 2, 1], "r_gb": [size] * 3}
    problem = {"servers": [{"count": 2, "gpus": 4, "hbm_gb": 80}], "groups": groups}
    for objective in Objective:
        plan = solved(problem, objective, solver, backend)
        assert plan.proven
        assert plan.coverage_gb == 0
        assert len(plan.unmatched) == (3 if size < 0 else 0)


@every_solver
def test_pins_and_sets_kept_apart_hold(solver: Solver, backend: Backend) -> None:
    problem = {
        "servers": [{"name": "a", "count": 2, "gpus": 4, "hbm_gb": 80}],
        "models": [
            {"name": "lender", "replicas": 3, "spare_gb": 40, "anti_affinity": "x", "pin": ["a"]},
            {"name": "need", "replicas": 3, "need_gb": 30, "pin": ["a/1"]},
        ],
    }
    with pytest.raises(ProblemInfeasibleError):
        solved(problem, Objective.ABS, solver, backend)
    problem["servers"][0]["count"] = 3
    plan = solved(problem, Objective.COVERAGE, solver, backend)
    assert plan.coverage_gb == pytest.approx(30)


@every_solver
def test_pipeline_stages_are_kept_apart_when_asked(solver: Solver, backend: Backend) -> None:
    problem = {
        "servers": [{"count": 3, "gpus": 2, "hbm_gb": 80}],
        "models": [
            {"name": "pp", "stages": 3, "stages_apart": True, "need_gb": 10},
            {"name": "lend", "replicas": 3, "spare_gb": 12},
        ],
    }
    plan = solved(problem, Objective.COVERAGE, solver, backend)
    stages = {entry.server for entry in plan.assignments if entry.group.startswith("pp")}
    assert len(stages) == 3
    assert plan.coverage_gb == pytest.approx(30)


@every_solver
def test_the_same_seed_gives_the_same_plan(solver: Solver, backend: Backend) -> None:
    problem = generate("tpmix-cont", 16, 5)
    first = solved(problem, Objective.ABS, solver, backend)
    again = solved(problem, Objective.ABS, solver, backend)
    assert first.plan_hash == again.plan_hash


def test_a_program_too_large_for_the_free_gurobi_licence_says_so() -> None:
    problem = generate("tpmix-cont", 256, 0)
    with pytest.raises(SolverUnavailableError) as caught:
        solved(problem, Objective.ABS, Solver.MILP, Backend.GUROBI)
    assert "licence" in caught.value.remedy


def test_a_program_too_large_for_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(ProblemInvalidError, match="too many"):
        solved(generate("ref50", 16_384, 0), Objective.ABS, Solver.MILP, Backend.HIGHS)
