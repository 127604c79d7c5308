"""When the books' clock stands, and for how long: nobody ages for what no one can hear."""

from __future__ import annotations

import itertools

import pytest

from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import MAX_GAP_S, SWEEP_PERIOD_S
from aqua_protocol import LeaseState
from harness.bounds import stopwatch
from harness.ledger_room import ATTACH_WINDOW_S, MAX_STOP_S, SILENT_S, LedgerRoom
from harness.members_on_paper import PaperConsumer, PaperProducer

MANY = 12
SLACK_S = 3.0
"""Sweeps and reports fall where they may."""


async def joined(room: LedgerRoom, number: int) -> list[PaperProducer]:
    """So many producers."""
    return [await room.join(PaperProducer(f"p{each}")) for each in range(number)]


async def stopped_s(room: LedgerRoom) -> dict[str, float]:
    """How long the clock has stood, by reason."""
    return {name: round(s) for name, s in (await room.ledger.summary()).stood_s.items() if s > 0.1}


async def names(room: LedgerRoom) -> set[str]:
    """Producers in the books."""
    return {row.producer_id for row in await room.ledger.producers()}


async def test_members_that_fall_silent_together_are_kept_for_the_limit_and_no_longer(
    room: LedgerRoom,
) -> None:
    producers, consumer = await joined(room, MANY), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producers[0], consumer)
    await room.live(SILENT_S, *producers, consumer)
    await room.live(SILENT_S / 2 + MAX_STOP_S)
    assert len(await names(room)) == MANY
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
    assert (await stopped_s(room))["silence"] == pytest.approx(MAX_STOP_S, abs=SLACK_S)
    await room.live(SILENT_S / 2 + SLACK_S)
    assert await names(room) == set()


async def test_members_that_come_back_in_time_have_lost_nothing(room: LedgerRoom) -> None:
    producers, consumer = await joined(room, MANY), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producers[0], consumer)
    for _ in range(3):
        assert await room.live(SILENT_S + MAX_STOP_S / 2) == 0
        assert await room.live(2 * SILENT_S, *producers, consumer) == 0
        await room.live(2 * MAX_STOP_S, *producers, consumer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
    assert (await room.hear(consumer)).ended == []


@pytest.mark.parametrize(
    ("number", "silent", "is_kept"),
    [
        (1, 1, False),
        (2, 1, False),
        (2, 2, True),
        (3, 1, False),
        (3, 2, False),
        (3, 3, True),
        (9, 8, False),
        (MANY, 1, False),
        (MANY, 6, False),
        (MANY, 7, True),
    ],
)
async def test_one_silent_member_is_lost_as_always_and_so_is_half_of_a_cluster(
    room: LedgerRoom, number: int, silent: int, *, is_kept: bool
) -> None:
    producers = await joined(room, number)
    await room.live(SILENT_S + SLACK_S, *producers[silent:])
    assert len(await names(room)) == number - (0 if is_kept else silent)
    assert ("silence" in await stopped_s(room)) is is_kept


async def test_refused_reports_stop_the_clock_for_the_limit_and_no_longer(
    room: LedgerRoom,
) -> None:
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    lease = (await room.grant(consumer)).lease
    await room.live(MAX_STOP_S - SLACK_S, producer, consumer, is_refusing=True)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.GRANTED
    assert await room.live(ATTACH_WINDOW_S + 2 * SLACK_S, producer, consumer, is_refusing=True)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.RELEASED
    assert (await stopped_s(room)) == {"refusal": pytest.approx(MAX_STOP_S, abs=SLACK_S)}


async def test_interruptions_do_not_renew_the_limit_but_as_long_a_calm_does(
    room: LedgerRoom,
) -> None:
    producer = await room.join(PaperProducer())
    for _ in range(5):
        await room.live(MAX_STOP_S / 2, producer, is_refusing=True)
        await room.live(MAX_STOP_S / 2, producer)
    once = (await stopped_s(room))["refusal"]
    assert once == pytest.approx(MAX_STOP_S, abs=SLACK_S)
    await room.live(MAX_STOP_S + SLACK_S, producer)
    await room.live(2 * MAX_STOP_S, producer, is_refusing=True)
    assert (await stopped_s(room))["refusal"] == pytest.approx(2 * MAX_STOP_S, abs=2 * SLACK_S)


async def test_what_one_coordinator_refuses_stops_the_clock_that_others_sweep(
    room: LedgerRoom,
) -> None:
    producer = await room.join(PaperProducer())
    before_us = await room.clock_us()
    for _ in range(20):
        await room.live(SWEEP_PERIOD_S, producer, is_refusing=True)
        await room.live(SWEEP_PERIOD_S)
    assert (await room.clock_us() - before_us) / 1e6 < 2 * SWEEP_PERIOD_S


async def test_a_late_sweep_of_one_who_was_there_stops_the_clock_for_no_longer_than_it_is_late(
    room: LedgerRoom,
) -> None:
    await joined(room, 1)
    before_us, passed_s = await room.clock_us(), stopwatch()
    for number in range(1, 4):
        await room.let_pass(4 * MAX_GAP_S)
        await room.sweep(is_present=True)
        went_s = (await room.clock_us() - before_us) / 1e6
        assert number * MAX_GAP_S <= went_s <= number * MAX_GAP_S + passed_s()
    await room.let_pass(4 * MAX_GAP_S)
    await room.sweep(is_present=False)
    assert (await room.clock_us() - before_us) / 1e6 <= 3 * MAX_GAP_S + passed_s()


async def test_an_absence_is_not_part_of_the_limit(room: LedgerRoom) -> None:
    producers = await joined(room, MANY)
    await room.live(SILENT_S)
    await room.let_pass(3600)
    await room.sweep()
    await room.live(MAX_STOP_S / 2)
    assert len(await names(room)) == MANY
    assert (await stopped_s(room))["absence"] == 3600
    assert await room.live(SILENT_S, *producers) == 0


async def test_the_clock_never_goes_back(room: LedgerRoom) -> None:
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producer, consumer)
    seen = [30.0]
    for is_refusing, gap_s in itertools.product((True, False, True), (0.4, 2.9, 0.1, 1.5)):
        await room.let_pass(gap_s)
        seen.append((await room.ledger.lease(lease.lease_id)).expires_in_s)
        await room.sweep(is_refusing=is_refusing, is_present=True)
        seen.append((await room.ledger.lease(lease.lease_id)).expires_in_s)
    assert all(later <= before for before, later in itertools.pairwise(seen))
    assert seen[-1] > 15


async def test_reports_are_further_apart_the_more_members_there_are_and_silence_is_as_patient(
    room: LedgerRoom,
) -> None:
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producer, consumer, ttl_s=5.0)
    await room.sweep()
    assert room.spread_s < 0.1
    assert room.silent_s == SILENT_S
    crowd = [f"q{number}" for number in range(10_000 // 3)]
    clock_us = str(await room.clock_us())
    for first in range(0, len(crowd), 1000):
        rows = [word for name in crowd[first : first + 1000] for word in (clock_us, name)]
        await room.command("ZADD", KEYS["consumers_seen"], *rows)
    await room.sweep()
    assert room.spread_s == pytest.approx(20, rel=0.01)
    assert room.silent_s == pytest.approx(60, rel=0.01)
    await room.hear(consumer)
    assert (await room.ledger.lease(lease.lease_id)).expires_in_s == pytest.approx(60, rel=0.05)
    # Who has been told of a long heartbeat keeps to it when the others are gone.
    await room.command("ZREM", KEYS["consumers_seen"], *crowd)
    told_s = room.spread_s
    assert await room.live(2.5 * told_s, consumer) == 0
    assert await names(room) == {"producer"}
    assert await stopped_s(room) == {}
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
    assert room.spread_s == pytest.approx(told_s * (1 - 2.5 / 30), rel=0.1)
    await room.live(told_s, consumer)
    assert await names(room) == set()
