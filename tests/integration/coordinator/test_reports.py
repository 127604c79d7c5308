"""What a producer's or consumer's report does to the books."""

from __future__ import annotations

import pytest

from aqua_coordinator.store.keys import KEYS
from aqua_protocol import LeaseState, ProtocolError, UnknownResourceError
from aqua_protocol.errors import StaleEpochError, StaleRevisionError
from aqua_protocol.leases import EventKind
from aqua_protocol.members import OfferUpdate
from harness.bounds import stopwatch
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, Pair, PaperConsumer, PaperProducer


async def test_the_first_report_registers_and_the_echo_of_the_books_makes_grantable(
    room: LedgerRoom,
) -> None:
    producer = PaperProducer(slabs=4)
    first = await room.tell(producer)
    assert not first.grantable
    view = await room.ledger.producer("producer")
    assert (view.offered_bytes, view.leased_bytes, view.free_bytes) == (4 * SLAB, 0, 4 * SLAB)
    assert not view.grantable
    second = await room.tell(producer)
    assert second.grantable
    assert second.books_id == first.books_id
    kinds = [event.kind for event in await room.ledger.events(after="0")]
    assert kinds == [EventKind.BOOKS_CREATED, EventKind.PRODUCER_JOINED]


async def test_an_older_revision_is_refused_and_changes_nothing(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, _ = pair
    await room.tell(producer)
    with pytest.raises(StaleRevisionError):
        await room.ledger.report_producer(producer.report(revision=0, offered_bytes=0))
    assert (await room.ledger.producer("producer")).offered_bytes == 16 * SLAB


async def test_a_report_may_be_repeated_word_for_word_but_not_with_other_words(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, _ = pair
    report = producer.report()
    assert await room.ledger.report_producer(report) == await room.ledger.report_producer(report)
    with pytest.raises(StaleRevisionError):
        await room.ledger.report_producer(report.model_copy(update={"offered_bytes": 0}))


async def test_a_granted_lease_that_the_producer_does_not_mention_stays(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer)).lease
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.GRANTED


async def test_attachment_is_booked_when_the_producer_reports_it(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer, 2)).lease
    producer.hand_out(lease)
    passed_s = stopwatch()
    booked = await room.tell(producer)
    assert len(booked.attached_s) == 1
    view = await room.ledger.lease(lease.lease_id)
    assert view.state is LeaseState.ACTIVE
    assert 29.9 - passed_s() < view.expires_in_s <= 30


async def test_fewer_slabs_than_granted_free_the_rest(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer, 4)).lease
    producer.hand_out(lease, slabs=3)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).bytes == 3 * SLAB
    assert (await room.ledger.producer("producer")).free_bytes == 13 * SLAB


async def test_slab_by_slab_a_reclaim_returns_bytes_to_the_offer(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 4)
    producer.hand_out(lease, slabs=4, reclaiming_bytes=2 * SLAB)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.RECLAIMING
    producer.hand_out(lease, slabs=3, reclaiming_bytes=SLAB)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).bytes == 3 * SLAB
    producer.hand_out(lease, slabs=2)
    await room.tell(producer)
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes) == (LeaseState.ACTIVE, 2 * SLAB)


async def test_bytes_leave_the_books_only_when_the_producer_has_the_slabs(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 4)
    await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
    assert (await room.ledger.producer("producer")).leased_bytes == 4 * SLAB
    booked = await room.tell(producer)
    assert [(notice.lease_id, notice.reason) for notice in booked.ended] == [
        (lease.lease_id, "released")
    ]
    producer.take_back(lease)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.RELEASED
    assert (await room.ledger.producer("producer")).leased_bytes == 0


async def test_a_lost_consumer_is_fenced_and_its_bytes_stay_booked(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    producer.hand_out(lease, consumer_lost=True)
    booked = await room.tell(producer)
    assert booked.ended[0].reason == "consumer_lost"
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes) == (LeaseState.FENCED, 2 * SLAB)
    assert view.epoch > lease.epoch
    heard = await room.hear(consumer)
    assert [notice.lease_id for notice in heard.ended] == [lease.lease_id]


async def test_a_shrunken_offer_cancels_unattached_grants_newest_first(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    held = await room.attached(producer, consumer, 4)
    older = (await room.grant(consumer, 4)).lease
    newer = (await room.grant(consumer, 4)).lease
    producer.slabs = 8
    await room.tell(producer)
    states = [(await room.ledger.lease(lease.lease_id)).state for lease in (held, older, newer)]
    assert states == [LeaseState.ACTIVE, LeaseState.GRANTED, LeaseState.RELEASED]
    view = await room.ledger.producer("producer")
    assert (view.offered_bytes, view.leased_bytes) == (8 * SLAB, 8 * SLAB)


async def test_an_unknown_lease_that_is_held_is_adopted_with_its_right(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    await room.lose_books()
    await room.tell(producer)
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes, view.epoch) == (LeaseState.ACTIVE, 2 * SLAB, lease.epoch)
    assert (await room.hear(consumer)).ended == []


async def test_a_released_lease_that_is_held_after_all_is_adopted_without_its_right(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer, 2)).lease
    await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
    producer.hand_out(lease)
    booked = await room.tell(producer)
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes) == (LeaseState.FENCED, 2 * SLAB)
    assert booked.ended[0].lease_id == lease.lease_id


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_lease_that_came_and_went_does_not_push_out_who_was_granted_its_bytes(
    room: LedgerRoom, pair: Pair, *, is_forgotten: bool
) -> None:
    producer, consumer = pair
    rival = PaperConsumer(name="rival")
    await room.hear(rival)
    went = (await room.grant(consumer, 16)).lease
    await room.ledger.release_lease(went.lease_id, epoch=went.epoch, as_consumer=None)
    fresh = (await room.grant(rival, 16)).lease
    if is_forgotten:
        await room.command("DEL", KEYS["lease"] + went.lease_id)
    producer.hand_out(went, slabs=1, reclaiming_bytes=SLAB)
    for _ in range(2):
        told = await room.tell(producer)
        assert [notice.lease_id for notice in told.ended] == [went.lease_id]
        assert (await room.ledger.lease(fresh.lease_id)).state is LeaseState.GRANTED
    # What is held after all is booked as soon as it takes nothing from others.
    await room.ledger.release_lease(fresh.lease_id, epoch=fresh.epoch, as_consumer=None)
    await room.tell(producer)
    booked = LeaseState.RECLAIMING if is_forgotten else LeaseState.FENCED
    assert (await room.ledger.lease(went.lease_id)).state is booked
    producer.take_back(went)
    await room.tell(producer)
    assert (await room.ledger.producer("producer")).leased_bytes == 0


async def test_adoption_takes_precedence_over_unattached_grants(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    producer.slabs = 2
    await room.tell(producer)
    lease = await room.attached(producer, consumer, 2)
    await room.lose_books()
    producer_before = PaperProducer(slabs=2, revision=producer.revision)
    await room.join(producer_before)
    await room.hear(consumer)
    rival = (await room.grant(consumer, 1)).lease
    producer.revision, producer.books_id = producer_before.revision, producer_before.books_id
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
    assert (await room.ledger.lease(rival.lease_id)).state is LeaseState.RELEASED


async def test_a_new_life_of_the_producer_ends_the_leases_of_the_old_one(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    old_report = producer.report()
    producer.restart()
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.LOST
    assert (await room.ledger.producer("producer")).leased_bytes == 0
    with pytest.raises(StaleRevisionError, match="newer process"):
        await room.ledger.report_producer(old_report)


@pytest.mark.parametrize("field", ["consumer_id", "producer"])
async def test_a_lease_of_others_cannot_be_reported(
    room: LedgerRoom, pair: Pair, field: str
) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer)).lease
    if field == "producer":
        producer = await room.join(PaperProducer(name="thief"))
        producer.hand_out(lease)
    else:
        producer.hand_out(lease, consumer_id="somebody-else")
    with pytest.raises(ProtocolError, match="belongs to others"):
        await room.tell(producer)
    producer.held.clear()
    await room.tell(producer)


@pytest.mark.parametrize("epoch", [1, (1 << 53) - 1])
async def test_an_epoch_that_was_never_issued_is_refused(
    room: LedgerRoom, pair: Pair, epoch: int
) -> None:
    producer, consumer = pair
    lease = (await room.grant(consumer)).lease
    producer.hand_out(lease, epoch=epoch)
    with pytest.raises(StaleEpochError):
        await room.tell(producer)


async def test_the_slab_size_is_fixed_for_a_life(room: LedgerRoom, pair: Pair) -> None:
    producer, _ = pair
    with pytest.raises(ProtocolError, match="slab_bytes"):
        await room.tell(producer, slab_bytes=2 * SLAB)
    producer.restart()
    await room.tell(producer, slab_bytes=2 * SLAB)


async def test_a_producer_that_moves_lends_in_its_new_domain_only(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    producer.domain = "domain-1"
    await room.tell(producer)
    assert (await room.hear(consumer)).available_bytes == 0
    consumer.domain = "domain-1"
    assert (await room.hear(consumer)).available_bytes == 16 * SLAB


async def test_an_offer_can_change_between_reports_under_the_same_revision_order(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    await room.attached(producer, consumer, 4)
    grant = (await room.grant(consumer, 8)).lease
    update = OfferUpdate(
        incarnation=producer.incarnation, revision=producer.revision + 1, offered_bytes=8 * SLAB
    )
    offer = await room.ledger.update_offer("producer", update)
    assert (offer.offered_bytes, offer.leased_bytes, offer.free_bytes) == (
        8 * SLAB,
        4 * SLAB,
        4 * SLAB,
    )
    assert (await room.ledger.lease(grant.lease_id)).state is LeaseState.RELEASED
    assert await room.ledger.update_offer("producer", update) == offer
    with pytest.raises(StaleRevisionError):
        await room.ledger.update_offer("producer", update.model_copy(update={"offered_bytes": 0}))


@pytest.mark.parametrize(
    ("slabs", "fault"), [(3, "lent stay under the offer"), (4.5, "multiple of slab_bytes")]
)
async def test_an_offer_below_what_is_lent_or_of_half_slabs_is_refused(
    room: LedgerRoom, pair: Pair, slabs: float, fault: str
) -> None:
    producer, consumer = pair
    await room.attached(producer, consumer, 4)
    with pytest.raises(ProtocolError, match=fault):
        await room.ledger.update_offer(
            "producer",
            OfferUpdate(
                incarnation=producer.incarnation,
                revision=producer.revision + 1,
                offered_bytes=int(slabs * SLAB),
            ),
        )


async def test_a_consumer_report_renews_every_lease_it_names(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    await room.pass_time(15)
    assert (await room.ledger.lease(lease.lease_id)).expires_in_s < 16
    passed_s = stopwatch()
    await room.hear(consumer)
    assert (await room.ledger.lease(lease.lease_id)).expires_in_s > 29.9 - passed_s()


async def test_naming_a_grant_does_not_prolong_the_time_for_attaching(
    room: LedgerRoom, pair: Pair
) -> None:
    _, consumer = pair
    lease = (await room.grant(consumer)).lease
    consumer.use(lease)
    await room.pass_time(6)
    await room.hear(consumer)
    assert (await room.ledger.lease(lease.lease_id)).expires_in_s < 5


async def test_an_unknown_lease_is_called_ended_only_after_a_while(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    await room.lose_books()
    assert (await room.hear(consumer)).ended == []
    await room.pass_time(15)
    assert (await room.hear(consumer)).ended == []
    await room.pass_time(20)
    assert [notice.reason for notice in (await room.hear(consumer)).ended] == ["unknown"]
    assert lease.lease_id in consumer.used


async def test_a_consumer_cannot_renew_the_lease_of_another(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    thief = PaperConsumer(name="thief")
    thief.use(lease)
    with pytest.raises(ProtocolError, match="another consumer"):
        await room.hear(thief)


async def test_a_producer_leaves_only_when_nothing_is_lent(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    with pytest.raises(ProtocolError, match="still hold slabs"):
        await room.ledger.remove_producer("producer", producer.incarnation)
    producer.take_back(lease)
    await room.tell(producer)
    pending = (await room.grant(consumer)).lease
    with pytest.raises(StaleRevisionError):
        await room.ledger.remove_producer("producer", "another-life")
    await room.ledger.remove_producer("producer", producer.incarnation)
    assert (await room.ledger.lease(pending.lease_id)).state is LeaseState.RELEASED
    with pytest.raises(UnknownResourceError):
        await room.ledger.producer("producer")


async def test_a_consumer_that_leaves_gives_up_its_rights(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer)
    await room.ledger.remove_consumer("consumer", consumer.incarnation)
    assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.FENCED
    with pytest.raises(UnknownResourceError):
        await room.ledger.remove_consumer("consumer", consumer.incarnation)
