"""Grants, renewals, releases and revocations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from aqua_protocol import CapacityError, LeaseLostError, LeaseState, UnknownResourceError
from aqua_protocol.errors import (
    BooksRebuildingError,
    ForbiddenError,
    IdempotencyConflictError,
    InvalidTransitionError,
    StaleEpochError,
)
from aqua_protocol.leases import LeaseView, Pairing, PlacementPlan
from harness.bounds import stopwatch
from harness.ledger_room import ATTACH_WINDOW_S, NOW_S, LedgerRoom
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer


@pytest.fixture
async def consumer(room: LedgerRoom) -> PaperConsumer:
    """A consumer that may ask."""
    consumer = PaperConsumer()
    await room.hear(consumer)
    return consumer


async def _producers(room: LedgerRoom, **slabs: int) -> dict[str, PaperProducer]:
    return {name: await room.join(PaperProducer(name=name, slabs=n)) for name, n in slabs.items()}


# --- Matching ----------------------------------------------------------------------------


async def test_the_tightest_fit_of_the_domain_lends(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, wide=16, tight=5, small=3)
    await room.join(PaperProducer(name="elsewhere", slabs=4, domain="domain-1"))
    assert (await room.grant(consumer, 4)).lease.producer_id == "tight"


async def test_bytes_are_rounded_up_to_whole_slabs(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    grant = await room.grant(consumer, bytes=SLAB + 1)
    assert grant.lease.bytes == 2 * SLAB
    assert grant.endpoint == "/run/aqua/producer.sock"
    assert grant.slab_bytes == SLAB


async def test_without_enough_the_roomiest_lends_all_it_has_if_that_is_the_least_wanted(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, one=2, two=3)
    grant = await room.grant(consumer, 8, min_bytes=3 * SLAB)
    assert (grant.lease.producer_id, grant.lease.bytes) == ("two", 3 * SLAB)
    with pytest.raises(CapacityError) as caught:
        await room.grant(consumer, 8, min_bytes=3 * SLAB)
    assert caught.value.details["available_bytes"] == 2 * SLAB


async def test_the_placers_pairing_is_obeyed_in_its_order_and_exclusively(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, best=4, second=8, tempting=2)
    pairing = Pairing(consumer_id="consumer", producers=["best", "second"], reason="near")
    plan = PlacementPlan(plan_hash="p1", pairings=[pairing])
    await room.ledger.put_placements(plan)
    assert await room.ledger.placements() == (plan, 1, None)
    lenders = [(await room.grant(consumer, 2)).lease.producer_id for _ in range(6)]
    assert lenders == ["best", "best", "second", "second", "second", "second"]
    with pytest.raises(CapacityError) as caught:
        await room.grant(consumer, 2)
    assert caught.value.details["paired"] == "yes"
    await room.ledger.put_placements(PlacementPlan(pairings=[]))
    assert (await room.grant(consumer, 2)).lease.producer_id == "tempting"


async def test_a_pairing_across_domains_lends_nothing(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await room.join(PaperProducer(name="elsewhere", domain="domain-1"))
    await room.ledger.put_placements(
        PlacementPlan(pairings=[Pairing(consumer_id="consumer", producers=["elsewhere"])])
    )
    with pytest.raises(CapacityError):
        await room.grant(consumer)


async def test_with_a_pairing_the_roomiest_of_it_is_the_fallback(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, one=2, two=3, big=16)
    await room.ledger.put_placements(
        PlacementPlan(pairings=[Pairing(consumer_id="consumer", producers=["one", "two"])])
    )
    assert (await room.hear(consumer)).available_bytes == 3 * SLAB
    assert (await room.grant(consumer, 8, min_bytes=SLAB)).lease.producer_id == "two"


async def test_a_consumer_that_never_reported_is_unknown(room: LedgerRoom) -> None:
    await _producers(room, producer=4)
    with pytest.raises(UnknownResourceError):
        await room.grant(PaperConsumer(name="stranger"))


async def test_while_producers_confirm_new_books_a_grant_is_told_to_wait(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await room.tell(PaperProducer())
    with pytest.raises(BooksRebuildingError) as caught:
        await room.grant(consumer)
    assert caught.value.retry_after_s is not None


async def test_no_byte_is_granted_twice_under_concurrency(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, one=7, two=9)
    grants = await asyncio.gather(
        *(room.grant(consumer, 2) for _ in range(40)), return_exceptions=True
    )
    granted = [grant for grant in grants if not isinstance(grant, BaseException)]
    refused = [error for error in grants if isinstance(error, CapacityError)]
    assert len(granted) == 3 + 4
    assert len(granted) + len(refused) == 40
    assert len({grant.lease.epoch for grant in granted}) == len(granted)


# --- Idempotency -------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_same_answer_and_one_lease(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    first = await room.grant(consumer, 2, key="key")
    await room.ledger.release_lease(first.lease.lease_id, epoch=first.lease.epoch, as_consumer=None)
    assert await room.grant(consumer, 2, key="key") == first
    assert (await room.ledger.producer("producer")).leased_bytes == 0


async def test_a_key_with_another_request_is_a_conflict(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    await room.grant(consumer, 1, key="key")
    with pytest.raises(IdempotencyConflictError):
        await room.grant(consumer, 2, key="key")
    with pytest.raises(IdempotencyConflictError):
        await room.grant(consumer, 1, ttl_s=60, key="key")


async def test_a_refusal_is_not_kept_so_a_retry_may_find_memory(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    with pytest.raises(CapacityError):
        await room.grant(consumer, 1, key="key")
    await _producers(room, producer=4)
    assert (await room.grant(consumer, 1, key="key")).lease.bytes == SLAB


# --- The life of a lease -----------------------------------------------------------------


async def test_renewal_starts_the_time_to_live_anew_with_its_own_length(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    producer = (await _producers(room, producer=4))["producer"]
    lease = await room.attached(producer, consumer)
    passed_s = stopwatch()
    view = await room.ledger.renew_lease(
        lease.lease_id, epoch=lease.epoch, ttl_s=60, as_consumer=None
    )
    assert 59.9 - passed_s() < view.expires_in_s <= 60


async def test_release_is_harmless_when_repeated_and_final_before_attachment(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    lease = (await room.grant(consumer)).lease
    for _ in range(3):
        view = await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
        assert (view.state, view.bytes) == (LeaseState.RELEASED, 0)
    assert view.epoch > lease.epoch


async def test_after_its_right_has_ended_a_holder_is_told_that_its_epoch_is_stale(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    producer = (await _producers(room, producer=4))["producer"]
    lease = await room.attached(producer, consumer)
    fenced = await room.ledger.revoke_lease(lease.lease_id, epoch=lease.epoch)
    assert fenced.state is LeaseState.FENCED
    assert fenced.epoch > lease.epoch
    with pytest.raises(StaleEpochError):
        await room.ledger.renew_lease(lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer=None)
    with pytest.raises(InvalidTransitionError):
        await room.ledger.renew_lease(
            lease.lease_id, epoch=fenced.epoch, ttl_s=30, as_consumer=None
        )


async def test_a_lost_lease_cannot_be_renewed_and_keeps_its_epoch(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    producer = (await _producers(room, producer=4))["producer"]
    lease = await room.attached(producer, consumer)
    producer.restart()
    await room.tell(producer)
    with pytest.raises(LeaseLostError):
        await room.ledger.renew_lease(lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer=None)


@pytest.mark.parametrize("epoch_change", [-1, 1])
@pytest.mark.parametrize("action", ["renew", "release", "revoke"])
async def test_an_epoch_that_the_lease_never_had_is_stale(
    room: LedgerRoom, consumer: PaperConsumer, action: str, epoch_change: int
) -> None:
    await _producers(room, producer=4)
    lease = (await room.grant(consumer)).lease
    epoch = lease.epoch + epoch_change
    actions: dict[str, Callable[..., Awaitable[LeaseView]]] = {
        "renew": partial(room.ledger.renew_lease, ttl_s=30, as_consumer=None),
        "release": partial(room.ledger.release_lease, as_consumer=None),
        "revoke": room.ledger.revoke_lease,
    }
    with pytest.raises(StaleEpochError):
        await actions[action](lease.lease_id, epoch=epoch)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.GRANTED


async def test_a_bound_caller_cannot_touch_the_lease_of_another(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    lease = (await room.grant(consumer)).lease
    for call in (
        room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer="thief"),
        room.ledger.renew_lease(lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer="thief"),
    ):
        with pytest.raises(ForbiddenError):
            await call


async def test_unknown_leases_are_unknown_to_every_action(room: LedgerRoom) -> None:
    for call in (
        room.ledger.lease("nothing"),
        room.ledger.renew_lease("nothing", epoch=1, ttl_s=30, as_consumer=None),
        room.ledger.release_lease("nothing", epoch=1, as_consumer=None),
        room.ledger.revoke_lease("nothing", epoch=1),
    ):
        with pytest.raises(UnknownResourceError):
            await call


async def test_a_grant_says_until_when_its_token_may_be_used(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, producer=4)
    grant = await room.grant(consumer)
    assert grant.lease.expires_in_s == ATTACH_WINDOW_S
    assert grant.not_after_s == NOW_S + ATTACH_WINDOW_S


# --- Listings ----------------------------------------------------------------------------


async def test_leases_are_listed_by_producer_and_grant_page_by_page(
    room: LedgerRoom, consumer: PaperConsumer
) -> None:
    await _producers(room, a=3, b=4, c=8)
    grants = [(await room.grant(consumer)).lease for _ in range(12)]
    grants.sort(key=lambda lease: (lease.producer_id, lease.epoch))
    listed: list[str] = []
    cursor: str | None = None
    for _ in range(8):
        page, cursor = await room.ledger.leases(cursor=cursor, limit=2)
        listed += [lease.lease_id for lease in page]
        if cursor is None:
            break
    assert listed == [lease.lease_id for lease in grants]
    assert cursor is None


async def test_leases_can_be_filtered(room: LedgerRoom, consumer: PaperConsumer) -> None:
    producers = await _producers(room, one=1, two=4)
    other = PaperConsumer(name="other")
    await room.hear(other)
    first = await room.attached(producers["one"], consumer)
    second = (await room.grant(other, 2)).lease
    by_state, _ = await room.ledger.leases(state=LeaseState.ACTIVE)
    by_producer, _ = await room.ledger.leases(producer_id="two")
    by_consumer, _ = await room.ledger.leases(consumer_id="other")
    assert [lease.lease_id for lease in by_state] == [first.lease_id]
    assert [lease.lease_id for lease in by_producer] == [second.lease_id]
    assert [lease.lease_id for lease in by_consumer] == [second.lease_id]
    summary = await room.ledger.summary()
    assert summary.leases_by_state(summary.sums)[LeaseState.ACTIVE] == 1
    assert summary.leases_by_state(summary.sums)[LeaseState.GRANTED] == 1


async def test_members_are_listed_by_name_page_by_page(room: LedgerRoom) -> None:
    await _producers(room, b=1, c=1, a=1)
    first = await room.ledger.producers(limit=2)
    rest = await room.ledger.producers(cursor=first[-1].producer_id, limit=2)
    assert [row.producer_id for row in first + rest] == ["a", "b", "c"]
