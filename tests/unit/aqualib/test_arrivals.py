"""How seldom chance takes memory back, and how soon a change of the load does."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqualib.producer.arrivals import (
    FALLS,
    FALSE_ALARM_SPACING_S,
    RISES,
    ArrivalWatch,
    Chart,
    Dispersion,
)

STEADY = 2.5
"""Requests/s: the paper's Llama 3.1 8B."""

LOOK_S = 0.25
HOUR_S = 3600.0


def arrivals(rng: random.Random, per_s: float, *, cv: float = 1.0) -> Iterator[float]:
    """Times of a renewal process; `cv` is the coefficient of variation of its gaps."""
    shape = cv**-2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (shape * per_s)) for _ in iter(int, 1))


def looks(
    times: Iterator[float], seconds: float, look_s: float = LOOK_S
) -> Iterator[tuple[float, int]]:
    """Time and count of each look."""
    count, following = 0, next(times)
    for index in range(int(seconds / look_s)):
        now_s = index * look_s
        while following <= now_s:
            count, following = count + 1, next(times)
        yield now_s, count


def lived(
    hours: float, load: float, *, cv: float = 1.0, steady: float = STEADY
) -> tuple[float, float]:
    """False alarms an hour, and the share of the time without, after an hour to learn."""
    watch, alarms, calm, total = ArrivalWatch(), 0, 0, 0
    times = arrivals(random.Random(11), load * steady, cv=cv)
    for now_s, count in looks(times, (hours + 1) * HOUR_S, look_s=1.0):
        before, watch = watch.is_fast, watch.seen(count, steady, now_s)
        if now_s >= HOUR_S:
            alarms += watch.is_fast and not before
            calm += not watch.is_fast
            total += 1
    return alarms / hours, calm / total


@pytest.mark.parametrize(("load", "cv"), [(0.5, 1.0), (0.9, 1.0), (0.9, 2.0)])
def test_below_the_steady_rate_chance_seldom_looks_like_a_rise(load: float, cv: float) -> None:
    per_hour, share = lived(4, load, cv=cv)
    assert per_hour <= 2
    assert share >= 0.9


def test_exactly_at_the_steady_rate_memory_is_lent_most_of_the_time() -> None:
    per_hour, share = lived(4, 1.0)
    assert per_hour <= 10
    assert share >= 0.75


def noticed_s(seed: int, before: float, after: float, *, steady: float = STEADY) -> float:
    """Seconds from a change, which falls between two looks, until it is noticed."""
    rng = random.Random(seed)
    change_s = 60.0 + rng.uniform(0.0, LOOK_S)
    first = itertools.takewhile(lambda at_s: at_s < change_s, arrivals(rng, before * steady))
    later = (change_s + at_s for at_s in arrivals(rng, after * steady))
    watch = ArrivalWatch()
    for now_s, count in looks(itertools.chain(first, later), 4000.0):
        if now_s < change_s and watch.is_fast:
            watch = watch.turned(is_fast=False)
        watch = watch.seen(count, steady, now_s)
        if now_s > change_s and watch.is_fast:
            return now_s - change_s
    raise AssertionError(f"a change to {after} of the steady rate was never noticed")


def test_a_doubled_rate_is_noticed_nearly_as_soon_as_by_a_test_that_knows_both_rates() -> None:
    # A CUSUM of 0.9 against 2, at two false alarms an hour, takes 4.9 s on average (the benchmark).
    delays_s = [noticed_s(seed, 0.9, 2.0) for seed in range(200)]
    assert statistics.fmean(delays_s) <= 1.25 * 4.9


def test_smaller_and_larger_rises_are_noticed_in_their_time() -> None:
    for after, within_s in ((1.2, 150.0), (1.5, 25.0), (4.0, 2.5)):
        delays_s = [noticed_s(seed, 0.9, after) for seed in range(10)]
        assert statistics.fmean(delays_s) <= within_s, after


def test_a_slow_drift_is_noticed_before_the_rate_has_doubled() -> None:
    rng, steady = random.Random(3), STEADY
    at_s, count, watch = 0.0, 0, ArrivalWatch()
    following = rng.expovariate(0.9 * steady)
    while not watch.is_fast:
        at_s += LOOK_S
        load = 0.9 + 0.5 * at_s / HOUR_S
        while following <= at_s:
            count, following = count + 1, following + rng.expovariate(load * steady)
        watch = watch.seen(count, steady, at_s)
        assert load < 1.4, "half as much again was never noticed"
    assert watch.dispersion.factor == 1.0, "a drift was taken for bursts"


def test_calm_is_noticed_after_a_rise_and_the_sooner_the_less_arrives() -> None:
    waits_s = {}
    for load in (0.0, 0.5, 0.9):
        watch = ArrivalWatch(at_s=0.0).turned(is_fast=True)
        count = 0.0
        for index in itertools.count(1):
            count += load * STEADY * LOOK_S
            watch = watch.seen(int(count), STEADY, index * LOOK_S)
            if not watch.is_fast:
                waits_s[load] = index * LOOK_S
                break
    assert waits_s[0.0] < waits_s[0.5] < waits_s[0.9] < 60


# --- Any counts --------------------------------------------------------------------------------


@given(
    steady=st.sampled_from([0.01, 0.1, 2.5, 100.0]),
    seen=st.lists(st.tuples(st.floats(0, 1e4), st.integers(-10, 10**6)), max_size=20),
)
def test_counts_of_any_kind_leave_evidence_that_can_be_compared(
    steady: float, seen: list[tuple[float, int]]
) -> None:
    watch, now_s, count = ArrivalWatch(), 0.0, 100
    for seconds, more in seen:
        now_s, count = now_s + seconds, max(0, count + more)
        watch = watch.seen(count, steady, now_s)
        assert len(watch.evidence) == len(FALLS if watch.is_fast else RISES)
        assert all(0 <= each < math.inf for each in watch.evidence)
        assert watch.dispersion.factor >= 1


def test_an_engine_that_begins_anew_is_not_taken_for_a_change() -> None:
    watch = ArrivalWatch().seen(1000, STEADY, 0.0).seen(3, STEADY, 1.0)
    assert watch == ArrivalWatch(at_s=1.0, arrived=3)


def test_thresholds_follow_from_how_seldom_chance_may_alarm() -> None:
    chart = Chart(0.9, 2.0, 1.0)
    base = chart.threshold(10_000, 1.0)
    assert chart.threshold(20_000, 1.0) == pytest.approx(base + math.log(2))
    assert Chart(0.9, 2.0, 0.5).threshold(10_000, 1.0) == pytest.approx(base + math.log(2))
    # Four arrivals that count as one: a quarter of the chances, and four times the evidence.
    assert chart.threshold(10_000, 4.0) == pytest.approx(4 * (base - math.log(4)))
    assert FALSE_ALARM_SPACING_S == 1800, "at most two an hour"


def test_one_step_of_the_load_is_not_taken_for_bursts() -> None:
    dispersion = Dispersion()
    rng = random.Random(5)
    for load in (0.9, 0.9, 0.9, 0.1, 0.9):
        for _ in range(20):
            count = sum(rng.random() < load / 10 for _ in range(500))
            dispersion = dispersion.seen(count, 50.0)
    assert dispersion.factor < 1.5
