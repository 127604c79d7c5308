"""A producer and its consumers over real sockets: memory asked back, in time or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqua_protocol.channel import MAX_SLABS_PER_PACKET
from aqua_protocol.members import LeaseNotice, ReclaimOrder
from aqualib.producer.escalation import Escalation
from harness.bounds import HANG_S, until
from harness.producers import SLAB, lending
from harness.raw_consumer import ConsumerProcess, RawConsumer, TokenIssuer
from harness.transport_peer import descriptor_targets

if TYPE_CHECKING:
    from aqualib.producer.producer import Producer


# --- Reclaiming --------------------------------------------------------------------------------


def test_a_partial_reclaim_returns_slab_by_slab_in_the_order_asked(issuer: TokenIssuer) -> None:
    with lending(issuer, 4) as producer, RawConsumer(producer.endpoint) as consumer:
        slabs = consumer.attach(issuer.token(4 * SLAB))
        reclaim = producer.reclaim(2 * SLAB)
        asked = consumer.await_reclaim()
        assert asked == slabs[:1:-1]
        assert reclaim.returned_bytes == 0
        consumer.give_back(asked[0])
        until(lambda: reclaim.returned_bytes == SLAB, "one slab is back")
        assert reclaim.first_slab_ms is not None
        assert not reclaim.done
        consumer.give_back(asked[1])
        assert reclaim.wait(HANG_S)
        assert producer.offered_bytes == producer.leased_bytes == 2 * SLAB
        assert consumer.ping(1) == 1


def test_free_slabs_serve_a_reclaim_before_anyone_is_asked(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(2 * SLAB))
        reclaim = producer.reclaim(6 * SLAB)
        assert reclaim.wait(HANG_S)
        assert consumer.ping(1) == 1  # And not a Reclaim.
        assert producer.offered_bytes == 2 * SLAB


def test_a_reclaim_takes_the_newest_lease_first(producer: Producer, issuer: TokenIssuer) -> None:
    with RawConsumer(producer.endpoint) as old, RawConsumer(producer.endpoint) as new:
        old.attach(issuer.token(4 * SLAB))
        new.attach(issuer.token(4 * SLAB))
        producer.reclaim(5 * SLAB)
        assert len(new.await_reclaim()) == 4
        assert len(old.await_reclaim()) == 1


def test_memory_given_up_by_another_consumer_serves_an_open_reclaim(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as kind, RawConsumer(producer.endpoint) as slow:
        mine = kind.attach(issuer.token(4 * SLAB))
        slow.attach(issuer.token(4 * SLAB))
        reclaim = producer.reclaim(SLAB)
        slow.await_reclaim()
        kind.give_back(mine[0])
        assert reclaim.wait(HANG_S)


def test_a_large_reclaim_is_split_into_packets(issuer: TokenIssuer) -> None:
    count = MAX_SLABS_PER_PACKET + 5
    with lending(issuer, count) as producer, RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(count * SLAB))
        reclaim = producer.reclaim(count * SLAB)
        asked = consumer.await_reclaim() + consumer.await_reclaim()
        assert len(set(asked)) == count
        for slab in asked:
            consumer.give_back(slab)
        assert consumer.await_end() == "goodbye"
        assert reclaim.wait(HANG_S)


def test_reclaiming_more_than_is_offered_takes_all_of_it(producer: Producer) -> None:
    reclaim = producer.reclaim(100 * SLAB)
    assert reclaim.wait(HANG_S)
    assert reclaim.returned_bytes == 8 * SLAB
    assert producer.offered_bytes == 0
    assert producer.reclaim(SLAB).done


def test_reclaimed_memory_returns_to_the_operating_system(issuer: TokenIssuer) -> None:
    with lending(issuer, 4) as producer:
        before = _memfd_count()
        assert producer.reclaim(4 * SLAB).wait(HANG_S)
        assert _memfd_count() == before - 4


def test_an_offer_grows_again_after_a_reclaim(producer: Producer, issuer: TokenIssuer) -> None:
    assert producer.reclaim(8 * SLAB).wait(HANG_S)
    assert producer.offer(2 * SLAB) == 2 * SLAB
    with RawConsumer(producer.endpoint) as consumer:
        # Slab ids are never used again.
        assert min(consumer.attach(issuer.token(2 * SLAB))) >= 8


def test_answers_for_an_older_generation_change_nothing(issuer: TokenIssuer) -> None:
    with lending(issuer, 1) as producer, RawConsumer(producer.endpoint) as first:
        (slab,) = first.attach(issuer.token(SLAB))
        first.give_back(slab)
        first.await_end()
        with RawConsumer(producer.endpoint) as second:
            second.attach(issuer.token(SLAB))
            assert second.generations[slab] == 2
            second.released(slab, generation=1)
            second.released(slab + 1, generation=2)
            second.ping(1)
            assert producer.leased_bytes == SLAB


def test_an_ended_lease_is_asked_back_whole_and_stays_offered(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(3 * SLAB, lease_id="ended", epoch=50))
        notice = LeaseNotice(lease_id="ended", epoch=51, reason="expired")
        producer.acknowledge(issuer.ack(ended=[notice]))
        producer.acknowledge(issuer.ack(ended=[notice]))
        asked = consumer.await_reclaim()
        for slab in asked:
            consumer.give_back(slab)
        assert len(asked) == 3
        assert consumer.await_end() == "goodbye"  # And no second Reclaim.
        assert producer.free_bytes == producer.offered_bytes == 8 * SLAB


def test_a_notice_for_an_earlier_epoch_ends_nothing(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(SLAB, lease_id="mine", epoch=50))
        notice = LeaseNotice(lease_id="mine", epoch=49, reason="expired")
        producer.acknowledge(issuer.ack(ended=[notice]))
        assert consumer.ping(1) == 1


def test_an_operators_order_is_carried_out_once(producer: Producer, issuer: TokenIssuer) -> None:
    order = ReclaimOrder(reclaim_id="order-1", bytes=2 * SLAB, deadline_s=5)
    for _ in range(3):
        producer.acknowledge(issuer.ack(reclaims=[order]))
    assert producer.offered_bytes == 6 * SLAB


# --- Deadlines ---------------------------------------------------------------------------------


def test_a_passed_deadline_quarantines_and_a_late_answer_retires(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer, RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(2 * SLAB))
        reclaim = producer.reclaim(SLAB, deadline_s=0.01)
        (asked,) = consumer.await_reclaim()
        until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")
        assert reclaim.escalated
        assert not reclaim.done
        assert producer.offered_bytes == 2 * SLAB
        consumer.give_back(asked)
        assert reclaim.wait(HANG_S)
        assert producer.quarantined_bytes == 0
        assert producer.offered_bytes == SLAB


def test_a_quarantined_slab_of_an_ended_lease_is_replaced_by_a_new_one(issuer: TokenIssuer) -> None:
    with lending(issuer, 1, deadline_s=0.01) as producer:
        with RawConsumer(producer.endpoint) as consumer:
            (slab,) = consumer.attach(issuer.token(SLAB, lease_id="ended", epoch=50))
            notice = LeaseNotice(lease_id="ended", epoch=50, reason="revoked")
            producer.acknowledge(issuer.ack(ended=[notice]))
            consumer.await_reclaim()
            until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")
            consumer.give_back(slab)
            until(lambda: producer.free_bytes == SLAB, "a new slab is in its place")
        with RawConsumer(producer.endpoint) as second:
            assert second.attach(issuer.token(SLAB)) == [slab + 1]


def test_the_kill_policy_ends_a_hung_consumer_and_gets_the_memory(issuer: TokenIssuer) -> None:
    with (
        lending(issuer, 1, policy=Escalation.KILL, grace_s=0.01) as producer,
        ConsumerProcess(producer.endpoint) as consumer,
    ):
        consumer.call("attach", issuer.token(SLAB))
        consumer.freeze()
        reclaim = producer.reclaim(SLAB, deadline_s=0.01)
        assert reclaim.wait(HANG_S)
        assert reclaim.escalated
        assert consumer.process.wait(HANG_S) == -9


def test_the_wait_policy_lets_a_hung_consumer_live(issuer: TokenIssuer) -> None:
    with (
        lending(issuer, 1, grace_s=0.0) as producer,
        ConsumerProcess(producer.endpoint) as consumer,
    ):
        consumer.call("attach", issuer.token(SLAB))
        consumer.freeze()
        reclaim = producer.reclaim(SLAB, deadline_s=0.01)
        until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")
        assert consumer.process.poll() is None
        consumer.thaw()
        (asked,) = consumer.call("await_reclaim")
        consumer.call("give_back", asked)
        assert reclaim.wait(HANG_S)


def _memfd_count() -> int:
    return sum("aqua-slab" in target for target in descriptor_targets())
