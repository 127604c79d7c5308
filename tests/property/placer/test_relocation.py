"""Re-placement against all placements of small problems, and how far a limit of moves goes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.relocate.exchange_search import Replaced, Target, replace_groups
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.search.coverage import ServerCost, best_exchanges, draw_pairs, make
from aqua_placer.search.layout import Layout, subsets
from aqua_placer.solve.placement import place
from aqua_placer.value.balance import BalanceMode
from aqua_placer.value.coverage import group_tables
from aqua_protocol.plan import Objective
from harness.changed_problems import churned
from harness.placement import covered_by_exhaustion, sizes_of, small_problems
from harness.slices import examples

SLOW = settings(max_examples=examples(60, whole=120))
GRAIN_GB = 1e-5


def covered(problem: dict[str, Any], servers: tuple[int, ...]) -> float:
    """Of a placement, by arithmetic that shares nothing with the placer's."""
    columns = problem["groups"]
    weight = columns.get("weight") or [1.0] * len(servers)
    return sum(
        covered_by_exhaustion(
            [group for group, own in enumerate(servers) if own == server],
            columns["tp"],
            columns["r_gb"],
            weight,
        )
        for server in set(servers)
    )


def feasible(problem: dict[str, Any]) -> list[tuple[int, ...]]:
    """All placements, servers told apart."""
    sizes, tp = sizes_of(problem["servers"]), problem["groups"]["tp"]
    return [
        servers
        for servers in product(range(len(sizes)), repeat=len(tp))
        if all(
            sum(size for size, own in zip(tp, servers, strict=True) if own == server) <= gpus
            for server, gpus in enumerate(sizes)
        )
    ]


def migrated(tp: list[int], current: list[int], servers: tuple[int, ...]) -> int:
    """Shards that a placement moves off the server on which they are today."""
    return sum(
        size
        for size, now, then in zip(tp, current, servers, strict=True)
        if now >= 0 and now != then
    )


def replaced(instance: Instance, goal_gb: float, max_moves: int | None = None) -> Replaced:
    """Towards a coverage, whatever the balance."""
    target = Target(Objective.COVERAGE, goal_gb, 99, 1e6)
    return replace_groups(instance, target, Budget(30), seed=0, max_moves=max_moves)


@SLOW
@given(small_problems(weights=True, classes=True), st.data())
def test_what_re_placement_says_of_a_small_problem_is_so(
    problem: dict[str, Any], data: st.DataObject
) -> None:
    every = feasible(problem)
    assume(every)
    tp = problem["groups"]["tp"]
    start = data.draw(st.sampled_from(every))
    instance = instance_from({**problem, "groups": {**problem["groups"], "current": list(start)}})
    gb = {servers: covered(problem, servers) for servers in every}
    goal = data.draw(st.floats(0, 1)) * max(gb.values())
    found = replaced(instance, goal)
    servers = tuple(found.placement.tolist())
    assert found.migrated_shards == migrated(tp, list(start), servers)
    assert gb[servers] >= gb[start] - GRAIN_GB
    if found.reached:
        assert gb[servers] >= goal - GRAIN_GB
    # What covers the goal but for a grain reaches it, and then nothing has to move.
    if gb[start] >= goal - GRAIN_GB / 100:
        assert (found.reached, found.migrated_shards) == (True, 0)


@pytest.mark.parametrize("goal_gb", [0.0, 2e-219, 5e-324, 1e-12, 1e-6, 2e-5, 1.0])
def test_a_goal_of_a_grain_or_less_asks_for_no_migration(goal_gb: float) -> None:
    problem = {
        "servers": [{"count": 1, "gpus": 1, "hbm_gb": 80}, {"count": 1, "gpus": 3, "hbm_gb": 80}],
        "groups": {
            "name": ["lends", "needs"],
            "tp": [1, 1],
            "r_gb": [43.045, -33.678],
            "weight": [4.471, 0.5],
            "current": [0, 1],
        },
    }
    found = replaced(instance_from(problem), goal_gb)
    assert found.reached
    assert found.migrated_shards == (0 if goal_gb <= GRAIN_GB else 1)


@pytest.mark.parametrize("family", ["refmix", "tpmix", "tpscarce"])
@pytest.mark.parametrize("occupancy", [1.0, 0.9])
def test_typed_clusters_are_replaced_and_a_lower_limit_covers_less_or_as_much(
    family: str, occupancy: float
) -> None:
    problem = generate(family, 256, 3, occupancy=occupancy)
    today = place(instance_from(problem), Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    later = instance_from(churned(problem, servers, 0.1, 3, in_place=True))
    plan, result = relocate(later, None, Request(), Relocation(), Budget(30))
    assert result.reached
    assert check_plan(later, plan).passed
    # A tenth of the shards have changed, and a fraction of those have to move.
    assert 0 < plan.migrations <= 0.08 * later.tp.sum()
    assert plan.migrations_bound == 0, "how few would do is not proven"
    limit = plan.migrations // 2
    short, missed = relocate(later, None, Request(), Relocation(max_moves=limit), Budget(30))
    assert not missed.reached
    assert short.migrations <= limit
    assert short.coverage_gb <= plan.coverage_gb + GRAIN_GB


def test_where_three_groups_would_have_to_take_turns_what_is_found_is_told_as_it_is() -> None:
    # Every server has the producer that the next one's consumer wants, and no pair of them can
    # help each other: 30 GB goes to a need of 10, 10 to 20, 20 to 30. Exchanges are of two servers.
    sizes = [10.0, -20.0, 20.0, -30.0, 30.0, -10.0]
    problem = {
        "servers": [{"count": 3, "gpus": 2, "hbm_gb": 80}],
        "groups": {
            "name": [f"g{index}" for index in range(6)],
            "tp": [1] * 6,
            "r_gb": sizes,
            "current": [0, 0, 1, 1, 2, 2],
        },
    }
    found = replaced(instance_from(problem), 60.0)
    total = covered(problem, tuple(found.placement.tolist()))
    assert found.reached == (total >= 60.0 - GRAIN_GB)
    assert total >= 40.0 - GRAIN_GB
    fresh = place(instance_from(problem), Request(), Budget(10))
    assert fresh.coverage_gb == pytest.approx(60.0)


def test_a_group_moves_alone_into_unused_gpus() -> None:
    problem = {
        "servers": [{"count": 2, "gpus": 4, "hbm_gb": 80}],
        "groups": {
            "name": ["lends", "needs", "small", "other"],
            "tp": [2, 2, 1, 1],
            "r_gb": [30.0, -30.0, 5.0, -5.0],
            "current": [0, 1, 0, 0],
        },
    }
    found = replaced(instance_from(problem), 65.0)
    # Either of the pair moves beside the other, into two GPUs that nobody uses.
    assert found.reached
    assert found.migrated_shards == 2


@settings(max_examples=examples(10, whole=30))
@given(st.integers(0, 100), st.sampled_from(["tpmix", "tpmix-cont"]), st.booleans())
def test_an_exchange_brings_what_it_was_said_to_bring(seed: int, family: str, part: bool) -> None:
    problem = generate(family, 64, seed, occupancy=0.8 if part else 1.0)
    instance = instance_from(problem)
    rng = np.random.default_rng(seed)
    placed = place(instance, Request(Objective.ABS), Budget(30))
    layout = Layout(instance, np.array([entry.server_index for entry in placed.assignments]))
    aim = Thresholds(99, 1e6, BalanceMode.ABS, instance.hbm_gb)
    cost = ServerCost(aim, group_tables(instance))
    prices = cost.price(layout.slots, layout.class_of, *layout.sums())
    for order in (1, 2):
        pairs = draw_pairs(prices - prices.min(), rng, everyone=True)
        table = subsets(layout.window(order), order)
        found = best_exchanges(layout, cost, prices, pairs, table, rng, tolerance=0.0)
        if found is None:
            continue
        before = float(prices.sum())
        make(layout, prices, found)
        fresh = cost.price(layout.slots, layout.class_of, *layout.sums())
        np.testing.assert_allclose(prices, fresh, atol=1e-6)
        assert float(prices.sum()) < before
        held = layout.slots[layout.slots >= 0]
        assert sorted(held.tolist()) == list(range(instance.num_groups))
        assert (layout.free() >= 0).all()
