"""Blocks at given prices: the search per group against all blocks there are."""

from __future__ import annotations

import numpy as np
import pytest

from aqua_placer.coverage.lending import Prices, Pricing, Side, bound_at, sides
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.families import generate, weighted
from aqua_placer.problem.reading import instance_from

WEIGHT = 2.0


def side(size_gb: Floats, count: Floats, tp: Ints) -> Side:
    shape = np.ones(len(size_gb))
    return Side(size_gb[:, None], count, tp, WEIGHT * shape, np.arange(len(size_gb)), False)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_best_block_of_a_group_is_found_without_looking_at_all(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(200):
        lenders, borrowers = rng.integers(1, 12, 2)
        # Whole numbers, so that spare and need are often equal.
        spare = rng.integers(0, 10, lenders).astype(np.float64)
        shards = rng.integers(1, 4, lenders).astype(np.float64)
        lending = side(spare, shards, np.ones(lenders, dtype=np.int64))
        borrowing = side(
            rng.integers(1, 12, borrowers).astype(np.float64),
            np.ones(borrowers),
            np.full(borrowers, size),
        )
        pricing = Pricing(lending, 0, rng.integers(0, 6, lenders).astype(np.float64), [size])
        if not len(pricing.spare):
            continue
        expected = pricing.gains(borrowing, np.arange(borrowers), 0).max(axis=1)
        found = pricing.most(size, WEIGHT * size, borrowing.size_gb[:, 0])
        np.testing.assert_allclose(found, expected)


def test_any_prices_bound_what_blocks_cover() -> None:
    """Without prices everybody gets what it needs; dear lenders cost at least what they cover."""
    instance = instance_from(weighted(generate("tpmix-cont", 64, 0), 0))
    lenders, borrowers = sides(instance)
    demand = float((borrowers.count * borrowers.weight * borrowers.tp) @ borrowers.size_gb[:, 0])
    free = Prices(np.zeros(len(lenders.count)), {}, 0.0)
    dear = Prices(borrowers.weight.max() * lenders.size_gb[:, 0], {}, 0.0)
    most = float(lenders.size_gb[:, 0].max())
    needs = np.minimum(borrowers.size_gb[:, 0], most)
    assert bound_at(instance, free, (lenders, borrowers)) == pytest.approx(
        float((borrowers.count * borrowers.weight * borrowers.tp) @ needs)
    )
    assert bound_at(instance, free, (lenders, borrowers)) <= demand + 1e-6
    assert bound_at(instance, dear, (lenders, borrowers)) == pytest.approx(
        float(lenders.count @ dear.lender)
    )
