"""What a server's content covers: every way of computing it against trying all orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from jaxtyping import Float64, Int64

from aqua_placer.value.coverage import (
    GroupTable,
    at_most_gb,
    chosen_groups,
    covered_gb,
    group_table,
)

GPUS = 16


def served_in(order: tuple[int, ...], table: GroupTable, spare: list[float]) -> float:
    """What blocks in this order cover, each with the next producer shards."""
    total, used = 0.0, 0
    for group in order:
        size = int(table.tp[group])
        used += size
        if used > len(spare):
            break
        weakest = spare[used - 1]
        total += float(table.weight[group]) * size * min(float(-table.r_gb[group]), weakest)
    return total


Contents = tuple[
    Int64[np.ndarray, " groups"],
    Float64[np.ndarray, " groups"],
    Float64[np.ndarray, " groups"],
    Int64[np.ndarray, "servers gpus"],
]


def some_contents(weights: list[float], seed: int) -> Contents:
    """Groups (shards, GB, weight) and servers of 16 GPUs with up to five consumers each."""
    rng = np.random.default_rng(seed)
    tp = rng.choice([1, 1, 2, 4], 60)
    r_gb = np.round(rng.uniform(5, 60, 60) * np.where(np.arange(60) < 25, -1, 1), 3)
    weight = rng.choice(weights, 60)
    rows = np.full((12, GPUS), -1)
    for row in rows:
        drawn = np.concatenate([rng.permutation(25)[:5], 25 + rng.permutation(35)])
        fitting = drawn[np.cumsum(tp[drawn]) <= GPUS]
        row[: len(fitting)] = rng.permutation(fitting)
    return tp, r_gb, weight, rows


def best_of(row: Int64[np.ndarray, " gpus"], table: GroupTable) -> tuple[float, list[float]]:
    """What the best order of blocks covers, and the spare of the server's producer shards."""
    held = [int(group) for group in row if group >= 0]
    shards = [float(table.r_gb[g]) for g in held for _ in range(table.tp[g]) if table.r_gb[g] > 0]
    spare = sorted(shards, reverse=True)[: GPUS // 2]
    consumers = [group for group in held if table.r_gb[group] < 0]
    best = max(
        served_in(order, table, spare)
        for count in range(len(consumers) + 1)
        for order in permutations(consumers, count)
    )
    return best, spare


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 5.0]])
def test_the_exact_way_covers_what_the_best_order_of_blocks_does(weights: list[float]) -> None:
    tp, r_gb, weight, rows = some_contents(weights, seed=len(weights))
    table = replace(group_table(tp, r_gb, weight, GPUS), is_exact=True)
    covered = covered_gb(table, rows)
    chosen = chosen_groups(table, rows)
    for row, total, groups in zip(rows, covered, chosen, strict=True):
        best, spare = best_of(row, table)
        assert total == pytest.approx(best)
        assert served_in(tuple(groups), table, spare) == pytest.approx(best)


def test_many_weights_are_ranked_and_what_is_found_can_be_served() -> None:
    tp, r_gb, weight, rows = some_contents([0.3, 0.7, 1.1, 1.9, 2.5], seed=5)
    table = group_table(tp, r_gb, weight, GPUS)
    assert not table.is_exact, "so many kinds on 16 GPUs have too many states"
    covered = covered_gb(table, rows)
    chosen = chosen_groups(table, rows)
    most = 0.0
    for row, total, groups in zip(rows, covered, chosen, strict=True):
        best, spare = best_of(row, table)
        assert total <= best + 1e-6
        assert served_in(tuple(groups), table, spare) >= total - 1e-6
        most += best
    assert covered.sum() >= 0.98 * most


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 5.0]])
def test_the_quick_bound_is_never_below_what_is_covered(weights: list[float]) -> None:
    tp, r_gb, weight, rows = some_contents(weights, seed=7)
    table = group_table(tp, r_gb, weight, GPUS)
    nobody = np.full((1, GPUS), -1)
    lenders_alone = np.where(rows >= 25, rows, -1)
    for contents in (rows, nobody, lenders_alone):
        most, covered = at_most_gb(table, contents), covered_gb(table, contents)
        assert (most >= covered - 1e-9).all()
    assert not at_most_gb(table, lenders_alone).any()
