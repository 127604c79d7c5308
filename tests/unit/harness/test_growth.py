"""What counts as growth: a leak beside noise, and neither noise nor a step alone."""

from __future__ import annotations

import random

import pytest

from harness.growth import trend_of

ALLOWED = 0.25


def grows(*stretches: list[float]) -> bool:
    trend = trend_of(stretches)
    assert trend is not None
    return trend.at_least > ALLOWED


@pytest.mark.parametrize("first", [0, 27])
def test_one_thing_more_in_each_period_grows(first: int) -> None:
    assert grows([first + period for period in range(10)])
    trend = trend_of([[first + period for period in range(10)]])
    assert trend is not None
    assert (trend.per_period, trend.noise) == (1, 0)


def test_a_leak_is_found_beside_noise() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        assert grows([period + draw.gauss(0, 1) for period in range(10)]), seed


def test_noise_does_not_grow() -> None:
    found = 0
    for seed in range(1000):
        draw = random.Random(seed)
        found += grows([draw.gauss(0, 2) for _ in range(10)])
    assert found <= 10


@pytest.mark.parametrize(
    "values",
    [
        [27] * 10,
        [20, 22, *[23] * 8],  # It fills a cache.
        [*[27] * 6, *[30] * 4],  # Something happened once.
        [27, 27, 27, 400, 27, 27, 27, 27, 27, 27],
        [30, 29, 28, 27, 26, 25, 24, 23, 22, 21],
    ],
)
def test_what_changes_once_does_not_grow(values: list[float]) -> None:
    assert not grows(values)


def test_only_values_of_one_stretch_are_compared() -> None:
    # A new process begins higher, or lower, and neither says anything.
    assert not grows([10] * 7, [50] * 3)
    assert grows([100 + i for i in range(7)], list(range(3)))


def test_too_few_values_say_nothing() -> None:
    assert trend_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) is None
    assert trend_of([]) is None
