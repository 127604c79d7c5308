from __future__ import annotations

from dataclasses import replace

import pytest

from aqualib.consumer.demand import (
    CALM_S,
    FIRST_PAUSE_S,
    MAX_ATTACHMENTS,
    MAX_CALM_S,
    MAX_PAUSE_S,
    SHORT_LEASE_S,
    SURPLUS_GRACE_S,
    Ask,
    GiveBack,
    Need,
    Restraint,
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
    restraint = Restraint()
    assert restraint.decide(SPILLING, NOW_S) == Ask(4)
    assert restraint.decide(replace(SPILLING, available_count=3), NOW_S) == Ask(3)


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
    assert Restraint().decide(need, NOW_S) is None


def test_a_wish_counts_even_when_nothing_is_used_but_never_above_the_limit() -> None:
    need = replace(SPILLING, used_count=0, kept_count=0, wished_count=5)
    assert Restraint().decide(need, NOW_S) == Ask(5)
    assert Restraint().decide(replace(need, limit_count=3), NOW_S) == Ask(3)


def test_after_a_reclaim_nothing_is_asked_until_the_calm_is_over() -> None:
    restraint = Restraint()
    restraint.note_attached(NOW_S - SHORT_LEASE_S)
    restraint.note_reclaim(NOW_S)
    assert restraint.decide(SPILLING, NOW_S) is None
    assert restraint.wake_s(NOW_S) == NOW_S + CALM_S
    assert restraint.decide(SPILLING, NOW_S + CALM_S) == Ask(4)


def test_the_calm_doubles_with_every_short_lease_up_to_a_bound_and_ends_with_a_long_one() -> None:
    restraint = Restraint()
    now_s, waits = NOW_S, []
    for _ in range(9):
        restraint.note_attached(now_s)
        restraint.note_reclaim(now_s + 1)
        until_s = restraint.wake_s(now_s + 1)
        assert until_s is not None
        waits.append(until_s - now_s - 1)
        now_s = until_s
    assert waits[:4] == [2 * CALM_S, 4 * CALM_S, 8 * CALM_S, 16 * CALM_S]
    assert waits[-1] == MAX_CALM_S
    restraint.note_attached(now_s)
    restraint.note_reclaim(now_s + SHORT_LEASE_S)
    assert restraint.wake_s(now_s + SHORT_LEASE_S) == now_s + SHORT_LEASE_S + CALM_S


def test_many_messages_of_one_reclaim_count_once() -> None:
    restraint = Restraint()
    restraint.note_attached(NOW_S)
    for _ in range(10):
        restraint.note_reclaim(NOW_S)
    assert restraint.wake_s(NOW_S) == NOW_S + 2 * CALM_S


def test_a_refusal_is_obeyed_and_pauses_double_where_it_names_none() -> None:
    restraint = Restraint()
    restraint.note_refusal(NOW_S, 7.0)
    assert restraint.wake_s(NOW_S) == NOW_S + 7.0
    now_s, pauses = NOW_S + 7.0, []
    for _ in range(9):
        restraint.note_refusal(now_s, None)
        until_s = restraint.wake_s(now_s)
        assert until_s is not None
        pauses.append(until_s - now_s)
        now_s = until_s
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    restraint.note_attached(now_s)
    restraint.note_refusal(now_s, None)
    assert restraint.wake_s(now_s) == now_s + FIRST_PAUSE_S


def test_a_refusal_cannot_silence_a_consumer_for_hours() -> None:
    restraint = Restraint()
    restraint.note_refusal(NOW_S, 86_400.0)
    assert restraint.decide(SPILLING, NOW_S + MAX_PAUSE_S) == Ask(4)


def test_slabs_that_hold_nothing_go_back_once_they_have_for_a_while() -> None:
    restraint = Restraint()
    surplus = replace(SPILLING, kept_count=9)
    assert restraint.decide(surplus, NOW_S) is None
    assert restraint.wake_s(NOW_S) == NOW_S + SURPLUS_GRACE_S
    assert restraint.decide(surplus, NOW_S + SURPLUS_GRACE_S - 0.1) is None
    assert restraint.decide(surplus, NOW_S + SURPLUS_GRACE_S) == GiveBack(3)


def test_a_store_that_breathes_gives_nothing_back() -> None:
    restraint = Restraint()
    surplus = replace(SPILLING, kept_count=9)
    for turn in range(10):
        now_s = NOW_S + turn * SURPLUS_GRACE_S
        assert restraint.decide(surplus, now_s) is None
        assert restraint.decide(SATISFIED, now_s + 1) is None


def test_what_is_wished_for_is_not_surplus() -> None:
    restraint = Restraint()
    wished = replace(SPILLING, used_count=0, kept_count=5, wished_count=5)
    assert restraint.decide(wished, NOW_S) is None
    assert restraint.decide(wished, NOW_S + 10 * SURPLUS_GRACE_S) is None
