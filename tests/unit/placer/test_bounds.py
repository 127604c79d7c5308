"""Bounds: they hold at any prices, and are near where something is known of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aqua_placer.bounds.blocks import Market, Prices, Side, bound_at, solve_blocks
from aqua_placer.bounds.layer_cake import layer_bound_gb, lockstep_bound_gb
from aqua_placer.budget import Budget
from aqua_placer.plan.assembly import SolveResult, assign_gpus, plan_of
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.search.layout import Layout
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Objective, Plan
from harness.changed_problems import on_mixed_servers, weighted

WEIGHT = 2.0


def on_two_cards(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with half of its servers on cards of 96 GB, where models spare 16 GB more."""
    groups, (servers,) = problem["groups"], problem["servers"]
    half = servers["count"] // 2
    return {
        "servers": [
            {**servers, "name": "old", "count": servers["count"] - half},
            {**servers, "name": "new", "count": half, "hbm_gb": 96},
        ],
        "models": [
            {"name": f"m{index}", "tp": tp, "memory_gb": gb, "profiled_hbm_gb": 80}
            for index, (tp, gb) in enumerate(zip(groups["tp"], groups["r_gb"], strict=True))
        ],
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_best_block_of_a_group_is_found_without_looking_at_all(size: int) -> None:
    rng, nobody = np.random.default_rng(size), np.zeros(0, dtype=np.int64)
    market = Market.of(instance_from(generate("tpmix", 64, 0)), None, None)
    for _ in range(200):
        lenders, borrowers = rng.integers(1, 12, 2)
        # Whole numbers, so that spare and need are often equal.
        spare = np.sort(rng.choice(40, lenders, replace=False)).astype(np.float64)
        need = rng.integers(1, 40, borrowers).astype(np.float64)
        price = np.sort(rng.integers(0, 6, lenders)).astype(np.float64)
        ones, many = np.ones(lenders, dtype=np.int64), np.ones(borrowers)
        some = replace(
            market,
            lenders=Side(spare[:, None], np.zeros(lenders), ones, np.ones(lenders), nobody),
            borrowers=Side(need[:, None], many, size * many.astype(int), WEIGHT * many, nobody),
        )
        gains = size * (WEIGHT * np.minimum(need[:, None], spare) - price)
        expected = np.maximum(gains.max(axis=1), 0.0).sum()
        found = bound_at(Prices(spare, price, {(size, 0): 0.0}, 0.0), some)
        assert found == pytest.approx(expected)


def test_any_prices_bound_what_blocks_cover() -> None:
    """Without prices every consumer gets what it needs; dear producers cost what they cover."""
    instance = instance_from(weighted(generate("tpmix-cont", 64, 0), 0))
    market = Market.of(instance, None, None)
    lenders, borrowers = market.lenders, market.borrowers
    places = dict.fromkeys([(size, 0) for size in market.sizes], 0.0)
    order = np.argsort(lenders.size_gb[:, 0])
    spare = lenders.size_gb[order, 0]
    most = float(spare.max())
    asked = (borrowers.count * borrowers.weight * borrowers.tp) @ np.minimum(
        borrowers.size_gb[:, 0], most
    )
    free = Prices(spare, np.zeros(len(spare)), places, 0.0)
    assert bound_at(free, market) == pytest.approx(float(asked))
    dear = Prices(spare, float(borrowers.weight.max()) * spare, places, 0.0)
    assert bound_at(dear, market) == pytest.approx(float(lenders.count[order] @ dear.shard))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tpmix", "tpscarce"])
@pytest.mark.parametrize("server_gpus", [4, 5, 8, 16])
def test_no_bound_is_below_what_a_plan_covers_nor_far_above(family: str, server_gpus: int) -> None:
    problem = generate(family, 16 * server_gpus, 1, server_gpus=server_gpus)
    for changed in (problem, weighted(problem, 1)):
        instance = instance_from(changed)
        plan = place(instance, Request(), Budget(30.0))
        blocks = solve_blocks(instance, Budget(30.0)).bound_gb
        for bound in (blocks, layer_bound_gb(instance), lockstep_bound_gb(instance)):
            assert bound >= plan.coverage_gb - 1e-3
        assert plan.coverage_gb >= 0.98 * blocks


@pytest.mark.slow
def test_servers_of_several_sizes_and_cards_are_bounded_by_what_fits_each() -> None:
    problem = generate("tpmix-cont", 96, 2)
    instance = instance_from(on_mixed_servers(problem))
    plan = place(instance, Request(), Budget(30.0))
    assert plan.coverage_gb <= solve_blocks(instance, Budget(30.0)).bound_gb + 1e-3
    cards = instance_from(on_two_cards(problem))
    covered = place(cards, Request(), Budget(30.0))
    bound = solve_blocks(cards, Budget(30.0)).bound_gb
    assert covered.coverage_gb <= bound + 1e-3
    assert bound < 0.9 * layer_bound_gb(cards), "many groups need memory on the old cards only"
    assert covered.coverage_gb >= 0.995 * bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "gpus", "server_gpus"),
    [("refmix", 144, 3), ("tpscarce", 120, 5), ("tpmix", 144, 6), ("tpmix", 128, 8)],
)
def test_all_distinct_sizes_are_balanced_within_a_percent_of_the_bound(
    family: str, gpus: int, server_gpus: int
) -> None:
    """Also where what fits together decides: on servers of few GPUs, and on two kinds of cards."""
    problem = generate(f"{family}-cont", gpus, 0, server_gpus=server_gpus)
    if server_gpus == 8:
        problem = on_two_cards(problem)
    plan = place(instance_from(problem), Request(Objective.ABS), Budget(30.0))
    assert plan.bound <= plan.value <= 1.01 * plan.bound


def test_a_bound_of_nothing_is_a_bound() -> None:
    groups = {"name": ["lends"], "tp": [1], "r_gb": [10.0]}
    servers = [{"count": 1, "gpus": 8, "hbm_gb": 80}]
    instance = instance_from({"servers": servers, "groups": groups})
    placement = np.zeros(1, dtype=np.int64)

    def told(bound: float) -> Plan:
        found = SolveResult(placement, signed_bound=bound)
        slots, gpus = Layout(instance, placement).slots, assign_gpus(instance, placement)
        clocks = time.perf_counter(), time.process_time()
        return plan_of(instance, Request(Objective.SIGNED), found, slots, gpus, clocks)

    assert told(0.0).bound == 0.0 < told(0.0).value
    assert not told(0.0).proven
    assert told(np.inf).bound == told(np.inf).value
