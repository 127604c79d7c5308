"""How fast consumers may copy: what it costs a lender, and what of the link is used, on paper.

A lender's steps take longer while the link is busy, and vary besides. A consumer has always
something to copy in the background. Both sides are the product's; the clock is virtual.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan
from typing import TYPE_CHECKING, Final

import pytest

from aqua_protocol import MIB
from aqua_protocol.wire import MAX_SECONDS
from aqualib.memory.copy_pace import MAX_DEBT_S, CopyPace
from aqualib.producer.copy_limit import (
    FIRST_RATE,
    HARM_SHARE,
    MAX_LASTING_S,
    MAX_QUIET_S,
    MAX_RATE,
    MIN_RATE,
    MIN_STEPS,
    PAUSE_FACTOR,
    CopyLimit,
    CopyRate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LINK: Final = 50e9
"""Bytes per second."""
PIECE: Final = 64 * MIB
STEP_S: Final = 0.03


@dataclass
class Run:
    """What came of it.

    Attributes:
        harm: By how much all steps together took longer.
        rate: Bytes per second copied in the background.
    """

    harm: float
    rate: float


def simulate(
    *,
    harm: float,
    jitter: float = 0.01,
    seed: int = 0,
    is_limited: bool = True,
    step_s: Callable[[float], float] = lambda _: STEP_S,
    demand: float = 0.0,
    until_s: float = 40.0,
) -> Run:
    """Let a lender work and a consumer copy.

    Args:
        harm: Slowdown of a step while the link is busy.
        jitter: Standard deviation of a step's own duration.
        is_limited: Whether the consumer keeps to the pace.
        step_s: A step's own duration at a time.
        demand: Bytes per second that requests wait for.
    """
    luck = random.Random(seed)
    limit, pace = CopyLimit(), CopyPace()
    now_s = work_s = free_at_s = 0.0
    copied = demanded = 0
    while now_s < until_s:
        began_s = now_s
        left_s = step_s(now_s) * (1 + luck.gauss(0, jitter))
        work_s += left_s
        while left_s > 1e-12:
            if free_at_s > now_s:  # The link is busy.
                done_s = (free_at_s - now_s) / (1 + harm)
                if done_s >= left_s:
                    now_s, left_s = now_s + left_s * (1 + harm), 0.0
                else:
                    now_s, left_s = free_at_s, left_s - done_s
                continue
            is_awaited = demand * now_s > demanded
            ready_at_s = now_s if is_awaited or not is_limited else pace.ready_at_s(now_s)
            if ready_at_s > now_s:
                end_s = min(now_s + left_s, ready_at_s)
                now_s, left_s = end_s, now_s + left_s - end_s
                continue
            free_at_s = now_s + PIECE / LINK
            pace.copied(PIECE, now_s, is_awaited=is_awaited)
            if is_awaited:
                demanded += PIECE
            else:
                copied += PIECE
        told = limit.stepped(now_s - began_s, now_s)
        if told is not None:
            pace.ask(told.bytes_per_s, told.lasts_s, now_s)
    return Run(now_s / work_s - 1, copied / now_s)


def test_without_a_limit_copies_harm_a_lender() -> None:
    assert simulate(harm=0.1, is_limited=False).harm > 4 * HARM_SHARE


@pytest.mark.parametrize("harm", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("jitter", [0.003, 0.01, 0.05])
def test_harm_stays_below_its_share_and_what_it_allows_is_used(harm: float, jitter: float) -> None:
    allowed = LINK * HARM_SHARE / harm
    for seed in range(2):
        run = simulate(harm=harm, jitter=jitter, seed=seed)
        assert run.harm < HARM_SHARE, run
        # What cannot be told from luck is not taken.
        assert run.rate > (0.4 if jitter < 0.02 else 0.1) * allowed, run


def test_a_link_whose_use_harms_nothing_is_used() -> None:
    assert simulate(harm=0.0).rate > 0.7 * LINK


def test_steps_that_get_longer_by_themselves_cost_no_rate() -> None:
    run = simulate(harm=0.0, step_s=lambda now_s: STEP_S if now_s < 20 else 2 * STEP_S)
    assert run.rate > 0.7 * LINK


def test_a_lender_whose_steps_change_is_still_protected() -> None:
    run = simulate(harm=0.1, step_s=lambda now_s: STEP_S if now_s < 20 else 2 * STEP_S)
    assert run.harm < HARM_SHARE


def test_the_background_makes_room_for_what_requests_wait_for() -> None:
    alone, beside = simulate(harm=0.1), simulate(harm=0.1, demand=5e9)
    assert beside.rate < alone.rate
    own = 0.1 * 5e9 / LINK  # What demand costs is not the background's to save.
    assert beside.harm - own < HARM_SHARE


def after(steps: int, seconds: float, limit: CopyLimit, now_s: float = 0.0) -> list[CopyRate]:
    told = [limit.stepped(seconds, now_s + number * seconds) for number in range(steps)]
    return [rate for rate in told if rate is not None]


def test_a_lender_begins_by_measuring_its_steps_without_copies() -> None:
    limit = CopyLimit()
    told = after(12, STEP_S, limit)
    assert [rate.bytes_per_s for rate in told] == [0.0, FIRST_RATE]


def test_a_rate_is_told_again_before_it_lapses() -> None:
    limit = CopyLimit()
    ends_s = 0.0
    for number in range(1000):
        now_s = number * STEP_S
        told = limit.stepped(STEP_S, now_s)
        if told is not None:
            ends_s = now_s + told.lasts_s
        assert ends_s > now_s + STEP_S


def test_harm_beyond_doubt_is_answered_within_a_window_and_more_each_time() -> None:
    limit = CopyLimit()
    limit.bytes_per_s = MAX_RATE
    rates = []
    for _ in range(12):
        after(8, STEP_S, limit)
        after(8, 1.5 * STEP_S, limit)  # They say enough.
        rates.append(limit.bytes_per_s)
    assert rates[:3] == [0.75 * MAX_RATE, 0.75 * 0.375 * MAX_RATE, 0.75 * 0.375 * 0.1875 * MAX_RATE]
    assert rates[-1] == MIN_RATE


def test_pauses_between_requests_are_no_harm() -> None:
    limit = CopyLimit()
    for number in range(400):
        limit.stepped(STEP_S if number % 20 else 2 * PAUSE_FACTOR * STEP_S, 0.0)
    assert limit.bytes_per_s > FIRST_RATE


@pytest.mark.parametrize("quiet_first", [True, False])
def test_an_engine_that_became_much_slower_is_measured_anew(*, quiet_first: bool) -> None:
    limit = CopyLimit()
    after(100, STEP_S, limit)
    while limit.is_quiet is not quiet_first:
        after(1, STEP_S, limit)
    slower_s = 2 * PAUSE_FACTOR * STEP_S
    states = []
    for _ in range(6 * MIN_STEPS):
        after(1, slower_s, limit)
        states.append(limit.is_quiet)
    assert True in states
    assert not states[-1]
    # Harm is seen against the steps of now, until it remains in quiet, too.
    before, found = limit.bytes_per_s, []
    for _ in range(2 * MIN_STEPS):
        after(1, slower_s * 1.5, limit)
        found.append(limit.bytes_per_s)
    assert min(found) < before


def test_background_copies_wait_for_a_measurement_no_longer_than_its_bound() -> None:
    limit, luck = CopyLimit(), random.Random(0)
    now_s = began_s = 1.0
    while limit.is_quiet:
        seconds = STEP_S * 10 ** luck.uniform(0.0, 1.5)
        now_s += seconds
        limit.stepped(seconds, now_s)
        assert now_s - began_s < MAX_QUIET_S + 2.0


def test_a_measurement_that_a_pause_cut_short_begins_again() -> None:
    limit = CopyLimit()
    limit.stepped(STEP_S, 1.0)
    limit.stepped(STEP_S, 1.0 + 3 * MAX_QUIET_S)
    assert limit.is_quiet


def test_steps_of_one_kind_are_compared_with_each_other_alone() -> None:
    limit = CopyLimit()
    for number in range(400):
        quiet_kind, paced_kind = ("1-16", STEP_S), ("17-128", 3 * STEP_S)
        kind, seconds = quiet_kind if number % 3 else paced_kind
        limit.stepped(seconds, 0.0, kind)
    assert limit.bytes_per_s > FIRST_RATE


def test_work_of_another_kind_says_that_no_copy_has_slowed_the_last() -> None:
    limit = CopyLimit()
    after(100, STEP_S, limit)
    while limit.is_quiet:
        after(1, STEP_S, limit)
    before = limit.bytes_per_s
    while limit.bytes_per_s >= before:
        after(1, 1.5 * STEP_S, limit)
    after(MIN_STEPS, 2 * PAUSE_FACTOR * STEP_S, limit)  # Its steps are other ones now,
    for _ in range(2 * MIN_STEPS):
        limit.stepped(STEP_S, 0.0, "another kind")  # and then there are none of it.
    assert limit.bytes_per_s >= before


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_a_step_whose_duration_is_none_says_nothing(seconds: float) -> None:
    limit = CopyLimit()
    for _ in range(4 * MIN_STEPS):
        assert limit.stepped(seconds, 0.0) is None
    assert after(12, STEP_S, limit)[-1].bytes_per_s == FIRST_RATE


def test_a_step_of_hours_is_no_reason_to_hold_consumers_back_for_days() -> None:
    told = CopyLimit().stepped(MAX_SECONDS, MAX_SECONDS)
    assert told == CopyRate(0.0, MAX_LASTING_S)


# --- The consumer's side ----------------------------------------------------------------------


def test_the_background_waits_as_long_as_the_rate_takes() -> None:
    pace = CopyPace()
    assert pace.ready_at_s(0.0) == 0.0
    pace.ask(1e9, 60.0, 0.0)
    pace.copied(10**9 // 2, 1.0, is_awaited=False)
    assert pace.ready_at_s(1.0) == 1.5
    pace.copied(10**9, 1.5, is_awaited=False)
    assert pace.ready_at_s(1.5) == 2.5


def test_what_requests_wait_for_leaves_a_bounded_debt() -> None:
    pace = CopyPace()
    pace.ask(1e6, 60.0, 0.0)
    pace.copied(10**9, 0.0, is_awaited=True)
    assert pace.ready_at_s(0.0) == MAX_DEBT_S


def test_the_background_goes_on_though_requests_alone_take_more_than_the_rate() -> None:
    pace = CopyPace()
    now_s, made_at_s = 0.0, list[float]()
    while now_s < 20.0:
        pace.ask(1e6, 60.0, now_s)
        pace.copied(20_000, now_s, is_awaited=True)
        if pace.ready_at_s(now_s) <= now_s:
            pace.copied(500_000, now_s, is_awaited=False)
            made_at_s.append(now_s)
        now_s += 0.01
    gaps_s = [later - earlier for earlier, later in pairwise(made_at_s)]
    assert made_at_s[0] == pytest.approx(MAX_DEBT_S, abs=0.02)
    assert gaps_s == pytest.approx([0.5 + MAX_DEBT_S] * len(gaps_s), abs=0.02)
    assert len(made_at_s) == 13


def test_a_pace_lapses_and_zero_holds_until_then() -> None:
    pace = CopyPace()
    pace.ask(0.0, 2.0, 0.0)
    assert pace.ready_at_s(1.0) == 2.0
    assert pace.ready_at_s(2.0) == 2.0
    assert pace.bytes_per_s is None
