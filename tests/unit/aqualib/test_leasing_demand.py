from __future__ import annotations

from dataclasses import replace

import pytest

from aqualib.leasing.demand import (
    CALM_S,
    FIRST_PAUSE_S,
    MAX_ATTACHMENTS,
    MAX_CALM_S,
    MAX_PAUSE_S,
    SHORT_LEASE_S,
    SURPLUS_GRACE_S,
    LeaseBackoff,
    Need,
    RequestLease,
    ReturnSurplus,
)

NOW_S = 1000.0
SPILLING = Need(
    used_count=6,
    wished_count=0,
    limit_count=100,
    kept_count=2,
    available_count=10,
    attachment_count=1,
)
SATISFIED = replace(SPILLING, kept_count=6)


def test_what_is_missing_is_asked_for_as_far_as_it_is_available() -> None:
    backoff = LeaseBackoff()
    assert backoff.decide(SPILLING, NOW_S) == RequestLease(4)
    assert backoff.decide(replace(SPILLING, available_count=3), NOW_S) == RequestLease(3)


@pytest.mark.parametrize(
    "need",
    [
        SATISFIED,
        replace(SPILLING, available_count=0),
        replace(SPILLING, attachment_count=MAX_ATTACHMENTS),
    ],
    ids=["nothing missing", "nothing available", "too many leases"],
)
def test_nothing_is_asked_without_need_offer_or_room(need: Need) -> None:
    assert LeaseBackoff().decide(need, NOW_S) is None


def test_a_wish_counts_even_when_nothing_is_used_but_never_above_the_limit() -> None:
    need = replace(SPILLING, used_count=0, kept_count=0, wished_count=5)
    assert LeaseBackoff().decide(need, NOW_S) == RequestLease(5)
    assert LeaseBackoff().decide(replace(need, limit_count=3), NOW_S) == RequestLease(3)


def test_after_a_reclaim_nothing_is_asked_until_the_calm_is_over() -> None:
    backoff = LeaseBackoff()
    backoff.note_attached(NOW_S - SHORT_LEASE_S)
    backoff.note_reclaim(NOW_S)
    assert backoff.decide(SPILLING, NOW_S) is None
    assert backoff.wake_s(NOW_S) == NOW_S + CALM_S
    assert backoff.decide(SPILLING, NOW_S + CALM_S) == RequestLease(4)


def test_the_calm_doubles_with_every_short_lease_up_to_a_bound_and_ends_with_a_long_one() -> None:
    backoff = LeaseBackoff()
    now_s, waits = NOW_S, []
    for _ in range(9):
        backoff.note_attached(now_s)
        backoff.note_reclaim(now_s + 1)
        until_s = backoff.wake_s(now_s + 1)
        assert until_s is not None
        waits.append(until_s - now_s - 1)
        now_s = until_s
    assert waits[:4] == [2 * CALM_S, 4 * CALM_S, 8 * CALM_S, 16 * CALM_S]
    assert waits[-1] == MAX_CALM_S
    backoff.note_attached(now_s)
    backoff.note_reclaim(now_s + SHORT_LEASE_S)
    assert backoff.wake_s(now_s + SHORT_LEASE_S) == now_s + SHORT_LEASE_S + CALM_S


def test_many_messages_of_one_reclaim_count_once() -> None:
    backoff = LeaseBackoff()
    backoff.note_attached(NOW_S)
    for _ in range(10):
        backoff.note_reclaim(NOW_S)
    assert backoff.wake_s(NOW_S) == NOW_S + 2 * CALM_S


def test_a_refusal_is_obeyed_and_pauses_double_where_it_names_none() -> None:
    backoff = LeaseBackoff()
    backoff.note_refusal(NOW_S, 7.0)
    assert backoff.wake_s(NOW_S) == NOW_S + 7.0
    now_s, pauses = NOW_S + 7.0, []
    for _ in range(9):
        backoff.note_refusal(now_s, None)
        until_s = backoff.wake_s(now_s)
        assert until_s is not None
        pauses.append(until_s - now_s)
        now_s = until_s
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    backoff.note_attached(now_s)
    backoff.note_refusal(now_s, None)
    assert backoff.wake_s(now_s) == now_s + FIRST_PAUSE_S


def test_a_refusal_cannot_silence_a_consumer_for_hours() -> None:
    backoff = LeaseBackoff()
    backoff.note_refusal(NOW_S, 86_400.0)
    assert backoff.decide(SPILLING, NOW_S + MAX_PAUSE_S) == RequestLease(4)


def test_slabs_that_hold_nothing_go_back_once_they_have_for_a_while() -> None:
    backoff = LeaseBackoff()
    surplus = replace(SPILLING, kept_count=9)
    assert backoff.decide(surplus, NOW_S) is None
    assert backoff.wake_s(NOW_S) == NOW_S + SURPLUS_GRACE_S
    assert backoff.decide(surplus, NOW_S + SURPLUS_GRACE_S - 0.1) is None
    assert backoff.decide(surplus, NOW_S + SURPLUS_GRACE_S) == ReturnSurplus(3)


def test_a_store_that_breathes_gives_nothing_back() -> None:
    backoff = LeaseBackoff()
    surplus = replace(SPILLING, kept_count=9)
    for turn in range(10):
        now_s = NOW_S + turn * SURPLUS_GRACE_S
        assert backoff.decide(surplus, now_s) is None
        assert backoff.decide(SATISFIED, now_s + 1) is None


def test_what_is_wished_for_is_not_surplus() -> None:
    backoff = LeaseBackoff()
    wished = replace(SPILLING, used_count=0, kept_count=5, wished_count=5)
    assert backoff.decide(wished, NOW_S) is None
    assert backoff.decide(wished, NOW_S + 10 * SURPLUS_GRACE_S) is None
