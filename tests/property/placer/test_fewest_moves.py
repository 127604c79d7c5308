"""The fewest migrations, against all placements of small problems and against the search."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aqua_placer.budget import Budget
from aqua_placer.plans.checking import check_plan
from aqua_placer.problem.columns import Ints
from aqua_placer.problem.families import churned, generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.reading import instance_from
from aqua_placer.programs.thresholds import Mode
from aqua_placer.replan.cycles import Cycles, Spent
from aqua_placer.replan.fewest import fewest_migrations
from aqua_placer.replan.gains import NEVER, Gains
from aqua_placer.replan.replacing import Relocation, relocate
from aqua_placer.search.dealing import worst
from aqua_placer.search.exchange import Aim, Layout
from aqua_placer.search.pursuit import judge_for
from aqua_placer.solvers.solving import Request, place
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


def aim_of(instance: Instance, placement: Ints) -> Aim:
    cnt, mem_gb = worst(instance, placement, Mode.ABS)
    return Aim(cnt, mem_gb, Mode.ABS, instance.hbm_gb)


@SLOW
@given(small_problems(weights=True, classes=True), st.data())
def test_no_placement_of_a_small_problem_migrates_fewer_and_one_migrates_as_few(
    problem: dict[str, Any], data: st.DataObject
) -> None:
    every = feasible(problem)
    assume(every)
    tp = problem["groups"]["tp"]
    start = data.draw(st.sampled_from(every))
    runs = data.draw(st.lists(st.booleans(), min_size=len(tp), max_size=len(tp)))
    current = [server if stays else -1 for server, stays in zip(start, runs, strict=True)]
    instance = instance_from({**problem, "groups": {**problem["groups"], "current": current}})
    aim = aim_of(instance, np.array(start))
    gb = {servers: covered(problem, servers) for servers in every}
    within = [
        servers
        for servers in every
        if worst(instance, np.array(servers), Mode.ABS)[0] <= aim.cnt
        and worst(instance, np.array(servers), Mode.ABS)[1] <= aim.mem_gb + GRAIN_GB
    ]
    goal = data.draw(st.floats(0, 1)) * max(gb[servers] for servers in within)

    def fewest(goal_gb: float) -> int:
        return min(migrated(tp, current, servers) for servers in within if gb[servers] >= goal_gb)

    # What covers the goal but for a grain reaches it. Only where a placement lies in between, as
    # with a goal of nearly nothing, do the two differ.
    least = fewest(goal)
    found = fewest_migrations(instance, np.array(start), aim, goal, Budget(30), seed=0)
    assert found is not None
    assert found.bound <= least
    assert found.placement is not None
    assert fewest(goal - GRAIN_GB) <= found.shards <= least
    assert gb[tuple(found.placement.tolist())] >= goal - GRAIN_GB
    assert migrated(tp, current, tuple(found.placement.tolist())) == found.shards


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
    instance, start = instance_from(problem), np.array([0, 1])
    aim = Aim(99, 1e6, Mode.ABS, instance.hbm_gb)
    found = fewest_migrations(instance, start, aim, goal_gb, Budget(30), seed=0)
    assert found is not None
    assert (found.shards, found.bound) == ((0, 0) if goal_gb <= GRAIN_GB else (1, 1))


@pytest.mark.parametrize("family", ["refmix", "tpmix", "tpscarce"])
@pytest.mark.parametrize("occupancy", [1.0, 0.9])
def test_typed_clusters_are_replaced_with_a_proof_that_fewer_moves_do_not_do(
    family: str, occupancy: float
) -> None:
    problem = generate(family, 256, 3, occupancy=occupancy)
    today = place(instance_from(problem), Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    later = instance_from(churned(problem, servers, 0.1, 3, in_place=True))
    plan, result = relocate(later, None, Request(), Relocation(), Budget(30))
    assert result.reached
    assert 0 < plan.migrations_bound == plan.migrations
    assert check_plan(later, plan).passed
    short, missed = relocate(
        later, None, Request(), Relocation(max_moves=plan.migrations - 1), Budget(30)
    )
    assert not missed.reached
    assert short.migrations_bound == plan.migrations


def search_on(problem: dict[str, Any], home: list[int]) -> tuple[Layout, Cycles, Gains]:
    """Cycles towards more than can be covered, and the table of all servers."""
    instance = instance_from(problem)
    layout = Layout(instance, np.array(home))
    judge = judge_for(layout, Aim(99, 1e6, Mode.ABS, instance.hbm_gb))
    prices = judge.price(layout.slots, layout.class_of, layout.mem_gb(), layout.counts())
    homes = np.append(np.array(home), -1)
    cycles = Cycles(layout, judge, prices, homes, 1e6)
    gains = Gains(layout, judge, prices, homes)
    return layout, cycles, gains


def test_a_cycle_of_three_is_found_where_no_exchange_of_two_pays() -> None:
    # Every server has the producer that the next one's consumer wants, and no pair of them can
    # help each other: 30 GB goes to a need of 10, 10 to 20, 20 to 30.
    problem = {
        "servers": [{"count": 3, "gpus": 2, "hbm_gb": 80}],
        "groups": {
            "name": [f"g{index}" for index in range(6)],
            "tp": [1] * 6,
            "r_gb": [10.0, -20.0, 20.0, -30.0, 30.0, -10.0],
        },
    }
    layout, cycles, gains = search_on(problem, [0, 0, 1, 1, 2, 2])
    assert (gains.gain > NEVER / 2).any()
    spent = Spent(None)
    cycles.run(spent, Budget(10))
    assert -float(cycles.prices.sum()) == pytest.approx(60.0)
    assert spent.shards == 3
    assert len(set(layout.placement().tolist())) == 3


def test_a_group_moves_alone_into_unused_gpus() -> None:
    problem = {
        "servers": [{"count": 2, "gpus": 4, "hbm_gb": 80}],
        "groups": {
            "name": ["lends", "needs", "small", "other"],
            "tp": [2, 2, 1, 1],
            "r_gb": [30.0, -30.0, 5.0, -5.0],
        },
    }
    layout, cycles, _ = search_on(problem, [0, 1, 0, 0])
    spent = Spent(None)
    cycles.run(spent, Budget(10))
    # Either of the pair moves beside the other, into two GPUs that nobody uses.
    assert -float(cycles.prices.sum()) == pytest.approx(65.0)
    assert spent.shards == 2
    assert layout.free().tolist() != [0, 2]


@settings(max_examples=examples(10, whole=30))
@given(st.integers(0, 100), st.sampled_from(["tpmix", "tpmix-cont"]), st.booleans())
def test_the_table_says_what_a_replacement_gains(seed: int, family: str, part: bool) -> None:
    problem = generate(family, 64, seed, occupancy=0.8 if part else 1.0)
    instance = instance_from(problem)
    home = place(instance, Request(), Budget(30))
    *_, gains = search_on(problem, [a.server_index for a in home.assignments])
    x, y = np.nonzero(gains.gain > NEVER / 2)
    drawn = np.random.default_rng(seed).permutation(len(x))[:40]
    exact = gains.gained(x[drawn], gains.group[y[drawn]])
    # Between knots a gain may bend, by less than the sizes there differ.
    slack = 1e-6 if family == "tpmix" else 4 * 8.0
    assert np.abs(exact - gains.gain[x[drawn], y[drawn]]).max(initial=0.0) <= slack
    assert (gains.size[x] == gains.size[y]).all()
    assert (gains.server[x] != gains.server[y]).all()
