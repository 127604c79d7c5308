"""What a server's content covers: every way of computing it against trying all orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from aqua_placer.coverage.prefixes import chosen_groups, covered_gb
from aqua_placer.coverage.rosters import Roster, Way, at_most_gb, roster
from aqua_placer.problem.columns import Floats, Ints

GPUS = 16


def served_in(order: tuple[int, ...], table: Roster, spare: list[float]) -> float:
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


def some_contents(weights: list[float], seed: int) -> tuple[Ints, Floats, Floats, Ints]:
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


@pytest.mark.parametrize("way", [Way.BY_KIND, Way.BY_GROUP])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 5.0], [0.3, 0.7, 1.1, 1.9, 2.5]])
def test_exact_ways_cover_what_the_best_order_of_blocks_does(
    way: Way, weights: list[float]
) -> None:
    tp, r_gb, weight, rows = some_contents(weights, seed=len(weights))
    table = replace(roster(tp, r_gb, weight, GPUS), way=way)
    covered = covered_gb(table, rows)
    chosen = chosen_groups(table, rows)
    for row, total, groups in zip(rows, covered, chosen, strict=True):
        held = [int(group) for group in row if group >= 0]
        spare = sorted(
            (float(r_gb[g]) for g in held for _ in range(tp[g]) if r_gb[g] > 0), reverse=True
        )[: GPUS // 2]
        consumers = [group for group in held if r_gb[group] < 0]
        best = max(
            served_in(order, table, spare)
            for count in range(len(consumers) + 1)
            for order in permutations(consumers, count)
        )
        assert total == pytest.approx(best)
        assert served_in(tuple(groups), table, spare) == pytest.approx(best)


def test_servers_of_16_are_judged_exactly_whatever_the_weights() -> None:
    weights = np.random.default_rng(0).uniform(1, 3, 40)
    tp = np.tile([1, 1, 2, 4], 10)
    table = roster(tp, np.where(np.arange(40) % 3, -20.0, 30.0), weights, GPUS)
    assert table.is_exact


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 5.0]])
def test_the_quick_bound_is_never_below_what_is_covered(weights: list[float]) -> None:
    tp, r_gb, weight, rows = some_contents(weights, seed=7)
    table = roster(tp, r_gb, weight, GPUS)
    nobody = np.full((1, GPUS), -1)
    lenders_alone = np.where(rows >= 25, rows, -1)
    for contents in (rows, nobody, lenders_alone):
        most, covered = at_most_gb(table, contents), covered_gb(table, contents)
        assert (most >= covered - 1e-9).all()
    assert not at_most_gb(table, lenders_alone).any()
