"""What time does to the books, and what the absence of coordinators does not."""

from __future__ import annotations

import asyncio

import pytest

from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import CONSTANTS, load_library
from aqua_protocol import LeaseState, UnknownResourceError
from aqua_protocol.errors import StaleEpochError
from aqua_protocol.leases import EventKind
from harness.bounds import stopwatch
from harness.ledger_room import ATTACH_WINDOW_S, NOW_S, SILENT_S, LedgerRoom, held, room_of
from harness.members_on_paper import SLAB, Pair


async def test_a_grant_that_nobody_attaches_to_expires_and_frees_its_bytes(
    room: LedgerRoom, pair: Pair
) -> None:
    _, consumer = pair
    lease = (await room.grant(consumer, 2)).lease
    await room.pass_time(ATTACH_WINDOW_S - 1)
    assert await room.sweep() == 0
    await room.pass_time(1.1)
    assert await room.sweep() == 1
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes) == (LeaseState.RELEASED, 0)
    with pytest.raises(StaleEpochError):
        await room.ledger.renew_lease(lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer=None)


async def test_an_expired_lease_is_fenced_and_stays_booked_until_its_slabs_are_back(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    await room.pass_time(15)
    await room.tell(producer)
    await room.pass_time(15.1)
    await room.sweep()
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes, view.expires_in_s) == (LeaseState.FENCED, 2 * SLAB, 0)
    booked = await room.tell(producer)
    assert [notice.reason for notice in booked.ended] == ["expired"]
    producer.take_back(lease)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.RELEASED


async def test_nothing_expires_for_the_time_in_which_no_coordinator_was_there(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    passed_s = stopwatch()
    lease = await room.attached(producer, consumer)
    grant = (await room.grant(consumer)).lease
    await room.sweep()
    await room.stand_still(3600)
    assert await room.sweep() == 0
    assert (await room.ledger.lease(grant.lease_id)).expires_in_s > (
        ATTACH_WINDOW_S - 0.9 - passed_s()
    )
    assert (await room.ledger.lease(lease.lease_id)).expires_in_s > 29.1 - passed_s()
    assert (await room.ledger.producer("producer")).silent_s < 0.9 + passed_s()
    await room.pass_time(31)
    assert await room.sweep() > 0


async def test_a_step_of_redis_time_backwards_makes_nobody_younger_or_older(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    passed_s = stopwatch()
    lease = await room.attached(producer, consumer)
    # The last sweep lies in the future: the clock has been set back by an hour since.
    await room.pipeline.command("HINCRBY", KEYS["books"], "swept_us", 3_600_000_000)
    await room.pipeline.command("HINCRBY", KEYS["books"], "paused_us", 3_600_000_000)
    assert await room.sweep() == 0
    assert 29 - passed_s() < (await room.ledger.lease(lease.lease_id)).expires_in_s <= 31


async def test_a_silent_producer_is_lost_with_its_leases_and_resumes_them_when_it_returns(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    grant = (await room.grant(consumer)).lease
    await room.pass_time(SILENT_S + 0.1)
    await room.hear(consumer)
    await room.sweep()
    with pytest.raises(UnknownResourceError):
        await room.ledger.producer("producer")
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.LOST
    assert (await room.hear(consumer)).ended[0].reason == "producer_lost"
    await room.tell(producer)
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes, view.epoch) == (LeaseState.ACTIVE, 2 * SLAB, lease.epoch)
    assert (await room.ledger.lease(grant.lease_id)).state is not LeaseState.ACTIVE
    assert (await room.hear(consumer)).ended == []


async def test_a_silent_consumer_leaves_but_its_leases_live_until_they_expire(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    await room.pass_time(SILENT_S + 0.1)
    await room.tell(producer)
    await room.sweep()
    with pytest.raises(UnknownResourceError):
        await room.ledger.consumer("consumer")
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
    kinds = [event.kind for event in await room.ledger.events(after="0")]
    assert kinds[-1] is EventKind.CONSUMER_LOST


async def test_many_sweepers_at_once_end_every_lease_exactly_once(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    producer.slabs = 600
    await room.tell(producer)
    for _ in range(12):
        await asyncio.gather(*(room.grant(consumer) for _ in range(50)))
    await room.pass_time(ATTACH_WINDOW_S + 1)
    assert sum(await asyncio.gather(*(room.sweep() for _ in range(4)))) == 600
    events = await room.ledger.events(after="0", limit=5000)
    ended = [event for event in events if event.state is LeaseState.RELEASED]
    assert len(ended) == 600


async def test_a_producer_with_more_leases_than_one_step_handles_is_lost_in_several(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    producer.slabs = 600
    await room.tell(producer)
    for _ in range(12):
        await asyncio.gather(*(room.grant(consumer, ttl_s=600) for _ in range(50)))
    await room.ledger.sweep(silent_s=SILENT_S)
    await room.pipeline.command(
        "ZADD", KEYS["producers_seen"], "0", "producer"
    )  # Silent since the beginning of time; the grants are not due yet.
    assert await room.sweep() == 600 + 1
    assert await room.ledger.producers() == []


async def test_ended_leases_are_forgotten_after_a_while(room: LedgerRoom, pair: Pair) -> None:
    _, consumer = pair
    lease = (await room.grant(consumer)).lease
    await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
    ttl_ms = await room.pipeline.command("PTTL", KEYS["lease"] + lease.lease_id)
    retention_ms = CONSTANTS["ended_retention_ms"]
    assert isinstance(retention_ms, int)
    assert 0 < ttl_ms <= retention_ms
    assert await room.ledger.leases() == ([], None)


async def test_epochs_grow_even_when_the_books_fall_back_to_an_older_copy(
    room: LedgerRoom, pair: Pair
) -> None:
    _, consumer = pair
    before = await room.pipeline.command("HGET", KEYS["books"], "epoch")
    first = (await room.grant(consumer)).lease
    # What a failover to a lagging replica does.
    await room.pipeline.command("HSET", KEYS["books"], "epoch", before)
    async with room_of(room.url, held(load_library(), NOW_S + 1)) as later:
        assert (await later.grant(consumer, key="later")).lease.epoch > first.epoch
