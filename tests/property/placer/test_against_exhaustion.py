"""Every solver against all placements of small problems."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings

from aqua_placer.bounds.blocks import solve_blocks
from aqua_placer.bounds.flows import least_means
from aqua_placer.bounds.layer_cake import layer_bound_gb, lockstep_bound_gb
from aqua_placer.bounds.thresholds import Thresholds, mean_bounds
from aqua_placer.budget import Budget
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.solve.placement import place
from aqua_placer.value.balance import BalanceMode
from aqua_protocol.plan import MatchingMode, Objective, Plan
from harness.placement import best_by_exhaustion, small_problems
from harness.slices import examples

TOLERANCE_GB = 2e-3
SHORTFALL = 5e-3
"""Coverage that a plan may fall short of its bound: profiles are good to 1.8%."""
SLOW = settings(max_examples=examples(60, whole=120))


def columns(
    gpus: int, servers: int, tp: list[int], r_gb: list[float], weight: list[float]
) -> dict[str, Any]:
    """A problem in column form."""
    names = [f"g{index}" for index in range(len(tp))]
    return {
        "servers": [{"count": servers, "gpus": gpus, "hbm_gb": 80}],
        "groups": {"name": names, "tp": tp, "r_gb": r_gb, "weight": weight},
    }


UNITS_THAT_DO_NOT_PACK = columns(5, 2, [1, 1, 4, 4], [-9.4, 21.2, -7.3, -14.8], [1, 2, 2, 1])
"""A consumer and its producer are 2 GPUs, and beside the groups of 4 only 1 + 1 are left."""

MANY_WEIGHTS = columns(
    4,
    3,
    [1, 1, 1, 4, 2, 1, 1, 1],
    [-20, -10, 20, 10, -10, -20, 10, -20],
    [6.812, 8.687, 0.962, 6.474, 2.044, 3.49, 5.794, 8.396],
)
HEAVY_BUT_MODEST = columns(4, 2, [1, 1, 1, 1], [-10, -9, 10, 1], [1, 2, 1, 1])
"""Zipped by need the light consumer would get the large producer: 12 GB instead of 19."""

HEAVY_AND_NEEDY = (
    1,
    [1] * 10,
    [-6, -10, 10, 5, *[-0.5] * 6],
    [10, 1, 1, 1, *(1.1 + 0.1 * kind for kind in range(6))],
)
"""65 GB are possible; who serves the needy in turn, whatever their weight, sees 60.8."""


def solved(problem: dict[str, Any], objective: Objective) -> Plan:
    instance = instance_from(problem)
    plan = place(instance, Request(objective=objective), Budget(30.0))
    verdicts = check_plan(instance, plan)
    assert verdicts.passed, verdicts.problems
    return plan


def flow_bound_gb(problem: dict[str, Any], objective: Objective, *, above: float) -> float:
    """What flows bound the objective by, sought up to a little `above`."""
    instance, mode = instance_from(problem), BalanceMode(objective.value)
    start = Thresholds(*mean_bounds(instance.servers, instance.types, mode), mode, instance.hbm_gb)
    return least_means(instance, start, above + 10.0, 0.0, Budget(30.0)).level_gb


@SLOW
@given(small_problems())
def test_minmax_bounds_hold_and_values_are_optimal_or_close(problem: dict[str, Any]) -> None:
    best = best_by_exhaustion(problem)
    for objective, optimum in ((Objective.ABS, best.abs), (Objective.SIGNED, best.signed)):
        plan = solved(problem, objective)
        assert plan.bound <= optimum + TOLERANCE_GB
        assert plan.value >= optimum - TOLERANCE_GB
        # All-distinct sizes stop within a fraction of a percent of the bound.
        assert plan.value <= optimum + TOLERANCE_GB + 0.01 * abs(optimum), (plan.value, optimum)
        if plan.proven:
            assert plan.value == pytest.approx(optimum, abs=TOLERANCE_GB)
        assert flow_bound_gb(problem, objective, above=optimum) <= optimum + TOLERANCE_GB


@SLOW
@given(small_problems())
def test_coverage_bounds_hold_and_the_best_coverage_is_found(problem: dict[str, Any]) -> None:
    best = best_by_exhaustion(problem)
    plan = solved(problem, Objective.COVERAGE)
    assert plan.coverage_bound_gb >= best.coverage - TOLERANCE_GB
    assert plan.coverage_gb <= best.coverage + TOLERANCE_GB
    assert plan.coverage_gb >= best.coverage * (1 - SHORTFALL) - TOLERANCE_GB
    assert plan.balance_bound <= best.abs + TOLERANCE_GB


@SLOW
@example(UNITS_THAT_DO_NOT_PACK)
@example(MANY_WEIGHTS)
@example(HEAVY_BUT_MODEST)
@given(small_problems(weights=True))
def test_weights_count_in_coverage_and_its_bound(problem: dict[str, Any]) -> None:
    best = best_by_exhaustion(problem)
    plan = solved(problem, Objective.COVERAGE)
    assert plan.coverage_bound_gb >= best.coverage - TOLERANCE_GB
    assert best.coverage * (1 - SHORTFALL) - TOLERANCE_GB <= plan.coverage_gb
    assert plan.coverage_gb <= best.coverage + TOLERANCE_GB
    instance = instance_from(problem)
    assert lockstep_bound_gb(instance) >= best.coverage - TOLERANCE_GB
    assert layer_bound_gb(instance) >= lockstep_bound_gb(instance) - TOLERANCE_GB
    assert solve_blocks(instance, Budget(30.0)).bound_gb >= best.coverage - TOLERANCE_GB


@SLOW
@example(UNITS_THAT_DO_NOT_PACK)
@example(MANY_WEIGHTS)
@given(small_problems(weights=True, classes=True))
def test_servers_of_several_sizes_are_bounded_and_used_well(problem: dict[str, Any]) -> None:
    best = best_by_exhaustion(problem)
    plan = solved(problem, Objective.COVERAGE)
    assert plan.coverage_bound_gb >= best.coverage - TOLERANCE_GB
    assert best.coverage * (1 - SHORTFALL) - TOLERANCE_GB <= plan.coverage_gb
    assert plan.coverage_gb <= best.coverage + TOLERANCE_GB
    instance = instance_from(problem)
    assert solve_blocks(instance, Budget(30.0)).bound_gb >= best.coverage - TOLERANCE_GB
    assert lockstep_bound_gb(instance) >= best.coverage - TOLERANCE_GB
    assert plan.balance_bound <= best.abs + TOLERANCE_GB
    assert flow_bound_gb(problem, Objective.ABS, above=best.abs) <= best.abs + TOLERANCE_GB


@SLOW
@example(HEAVY_BUT_MODEST)
@given(small_problems(weights=True))
def test_every_matching_mode_gives_a_valid_plan(problem: dict[str, Any]) -> None:
    instance = instance_from(problem)
    covered = {}
    for mode in MatchingMode:
        plan = place(instance, Request(objective=Objective.ABS, matching=mode), Budget(30.0))
        verdicts = check_plan(instance, plan)
        assert verdicts.passed, (mode, verdicts.problems)
        covered[mode] = plan.coverage_gb
    assert max(covered.values()) <= covered[MatchingMode.EXACT] + TOLERANCE_GB
    assert covered[MatchingMode.STABLE] == pytest.approx(covered[MatchingMode.EXACT])


@pytest.mark.parametrize("gpus", [10, 16, 20, 72])
def test_many_kinds_on_wide_servers_are_covered_and_bounded(gpus: int) -> None:
    plan = solved(columns(gpus, *HEAVY_AND_NEEDY), Objective.COVERAGE)
    heavy, light = 10 * 6, 1 * 5
    assert plan.coverage_bound_gb >= heavy + light - TOLERANCE_GB
    assert plan.coverage_gb >= (heavy + light) * (1 - SHORTFALL)
