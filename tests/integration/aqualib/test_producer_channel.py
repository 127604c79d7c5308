"""A producer and its consumers over real sockets: attach, reclaim, and every way to misbehave."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aqua_protocol import TransportError
from aqua_protocol.channel import MAX_PACKET_BYTES, MAX_SLABS_PER_PACKET, Ping
from aqua_protocol.members import LeaseNotice, ReclaimOrder
from aqualib.channel import ChannelClosedError
from aqualib.producer import server
from aqualib.producer.escalation import Escalation
from harness.bounds import HANG_S
from harness.producers import SLAB, lending, until
from harness.raw_consumer import WITHIN_S, ConsumerProcess, RawConsumer, RefusedError, TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.producer.producer import Producer
    from aqualib.transports.base import Handle


@pytest.fixture
def issuer() -> TokenIssuer:
    return TokenIssuer()


@pytest.fixture
def producer(issuer: TokenIssuer) -> Iterator[Producer]:
    with lending(issuer, 8) as producer:
        yield producer


def refusal_code(consumer: RawConsumer) -> str:
    with pytest.raises(RefusedError) as refusal:
        consumer.receive()
    assert refusal.value.body.remedy
    return refusal.value.body.code


# --- Attaching ---------------------------------------------------------------------------------


def test_a_token_opens_a_channel_and_brings_zeroed_slabs(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        slabs = consumer.attach(issuer.token(3 * SLAB))
        assert len(slabs) == 3
        assert all(consumer.values(slab) == [0] for slab in slabs)
        assert producer.leased_bytes == 3 * SLAB
        assert producer.free_bytes == 5 * SLAB


def test_slabs_come_in_packets_that_the_kernel_can_carry(issuer: TokenIssuer) -> None:
    count = 2 * MAX_SLABS_PER_PACKET + 3
    with lending(issuer, count) as producer, RawConsumer(producer.endpoint) as consumer:
        assert len(set(consumer.attach(issuer.token(count * SLAB)))) == count


def test_a_lease_that_exceeds_what_is_free_gets_what_is_free(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        assert len(consumer.attach(issuer.token(20 * SLAB))) == 8


def test_nothing_free_is_refused_as_capacity(producer: Producer, issuer: TokenIssuer) -> None:
    producer.reclaim(8 * SLAB)
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB))
        assert refusal_code(consumer) == "capacity_exhausted"


def test_a_token_cannot_be_replayed_while_its_lease_lives(
    producer: Producer, issuer: TokenIssuer
) -> None:
    token = issuer.token(SLAB)
    with RawConsumer(producer.endpoint) as first, RawConsumer(producer.endpoint) as second:
        first.attach(token)
        second.hello(token)
        assert refusal_code(second) == "capability_rejected"


def test_a_token_cannot_be_replayed_after_its_lease_has_ended(
    producer: Producer, issuer: TokenIssuer
) -> None:
    token = issuer.token(SLAB)
    with RawConsumer(producer.endpoint) as first:
        for slab in first.attach(token):
            first.give_back(slab)
        assert first.await_end() == "goodbye"
    with RawConsumer(producer.endpoint) as second:
        second.hello(token)
        assert refusal_code(second) == "capability_rejected"


def test_a_token_of_lost_books_is_refused(producer: Producer, issuer: TokenIssuer) -> None:
    producer.acknowledge(issuer.ack(min_epoch=1000))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB, epoch=999))
        assert refusal_code(consumer) == "capability_rejected"


def test_a_late_answer_of_the_coordinator_does_not_reopen_lost_books(
    producer: Producer, issuer: TokenIssuer
) -> None:
    producer.acknowledge(issuer.ack(min_epoch=1000))
    producer.acknowledge(issuer.ack(min_epoch=1))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB, epoch=999))
        assert refusal_code(consumer) == "capability_rejected"


@pytest.mark.parametrize(
    "token",
    ["", "x", "a.b", "é.é", "." * 4096],
    ids=["empty", "no signature", "not ours", "not ascii", "long"],
)
def test_a_token_that_is_none_is_refused(producer: Producer, token: str) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(token)
        assert refusal_code(consumer) == "capability_rejected"


def test_tokens_for_others_and_expired_ones_are_refused(
    producer: Producer, issuer: TokenIssuer
) -> None:
    forged = TokenIssuer().token(SLAB)
    for token, consumer_id in [
        (forged, "consumer"),
        (issuer.token(SLAB, valid_s=-1), "consumer"),
        (issuer.token(SLAB, consumer_id="somebody"), "consumer"),
    ]:
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(token, consumer_id)
            assert refusal_code(consumer) == "capability_rejected"
    assert producer.free_bytes == 8 * SLAB


def test_a_user_that_is_not_allowed_is_refused(issuer: TokenIssuer) -> None:
    with lending(issuer, 1, allowed_uids={os.getuid() + 1}) as producer:
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(issuer.token(SLAB))
            assert refusal_code(consumer) == "capability_rejected"
        # The kernel lets others connect only where others are allowed at all.
        assert producer.endpoint.stat().st_mode & 0o777 == 0o666


def test_only_this_user_can_connect_unless_others_are_allowed(producer: Producer) -> None:
    assert producer.endpoint.stat().st_mode & 0o777 == 0o600


def test_without_a_coordinator_ever_seen_nobody_attaches(issuer: TokenIssuer) -> None:
    with lending(issuer, 1) as producer:
        producer._admission._key = None
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(issuer.token(SLAB))
            assert refusal_code(consumer) == "service_unavailable"


def test_another_protocol_version_is_refused_by_name(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB), version=999)
        assert refusal_code(consumer) == "version_mismatch"


def test_an_attach_to_a_producer_that_is_leaving_is_refused(
    producer: Producer, issuer: TokenIssuer
) -> None:
    producer._closed = True
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB))
        assert refusal_code(consumer) == "service_unavailable"
    producer._closed = False


def break_exports(producer: Producer, *, good_count: int, error: Exception) -> None:
    """Make all but the first slabs fail to export, as a driver may."""

    def fail() -> Handle:
        raise error

    for slab in list(producer._lending.pool._slabs.values())[good_count:]:
        slab.memory.export = fail  # type: ignore[method-assign] # a driver that fails


def test_a_handout_that_fails_at_once_costs_no_slab(
    producer: Producer, issuer: TokenIssuer
) -> None:
    break_exports(producer, good_count=0, error=TransportError("no handles left"))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(3 * SLAB))
        with pytest.raises(RefusedError, match="no handles left"):
            consumer.take()
    assert producer.free_bytes == 8 * SLAB
    assert producer.quarantined_bytes == 0


def test_a_handout_that_fails_halfway_keeps_what_was_sent_from_everybody(
    issuer: TokenIssuer,
) -> None:
    count = MAX_SLABS_PER_PACKET + 2
    with lending(issuer, count) as producer:
        break_exports(producer, good_count=count - 1, error=TransportError("no handles left"))
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(issuer.token(count * SLAB))
            with pytest.raises(RefusedError, match="no handles left"):
                consumer.take()
            assert producer.quarantined_bytes == MAX_SLABS_PER_PACKET * SLAB
            assert producer.free_bytes == 2 * SLAB


def test_an_error_that_nobody_foresaw_is_answered_and_logged_and_costs_no_slab(
    producer: Producer, issuer: TokenIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [slab.memory.export for slab in producer._lending.pool._slabs.values()]
    break_exports(producer, good_count=0, error=RuntimeError("device-side assert"))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(3 * SLAB))
        with pytest.raises(RefusedError, match="could not hand out") as refusal:
            consumer.take()
    assert refusal.value.body.code == "transport_failed"
    assert "device-side assert" in caplog.text
    assert producer.free_bytes == 8 * SLAB
    for slab, export in zip(producer._lending.pool._slabs.values(), whole, strict=True):
        slab.memory.export = export  # type: ignore[method-assign] # the driver has recovered
    with RawConsumer(producer.endpoint) as consumer:
        assert len(consumer.attach(issuer.token(8 * SLAB))) == 8


def test_a_process_that_may_have_no_more_threads_refuses_instead_of_falling_silent(
    producer: Producer, issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(3 * SLAB))
        assert refusal_code(consumer) == "capacity_exhausted"
    monkeypatch.undo()
    assert producer.free_bytes == 8 * SLAB
    with RawConsumer(producer.endpoint) as consumer:
        assert len(consumer.attach(issuer.token(8 * SLAB))) == 8


# --- Another consumer's bytes ------------------------------------------------------------------


def test_a_slab_is_zeroed_before_another_consumer_gets_it(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer:
        with RawConsumer(producer.endpoint) as first:
            for slab in first.attach(issuer.token(2 * SLAB, consumer_id="first"), "first"):
                first.fill(slab, 0xAB)
                first.give_back(slab)
            first.await_end()
        with RawConsumer(producer.endpoint) as second:
            slabs = second.attach(issuer.token(2 * SLAB, consumer_id="second"), "second")
            assert [second.values(slab) for slab in slabs] == [[0], [0]]


def test_a_slab_keeps_its_bytes_for_the_consumer_that_had_it(issuer: TokenIssuer) -> None:
    with lending(issuer, 1) as producer:
        for expected in ([0], [0xAB]):
            with RawConsumer(producer.endpoint) as consumer:
                (slab,) = consumer.attach(issuer.token(SLAB))
                assert consumer.values(slab) == expected
                consumer.fill(slab, 0xAB)
                consumer.give_back(slab)
                consumer.await_end()


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


# --- The end of a consumer ---------------------------------------------------------------------


def test_a_consumer_killed_before_hello_leaves_no_trace(producer: Producer) -> None:
    with ConsumerProcess(producer.endpoint) as consumer:
        until(lambda: len(producer._server._peers) == 1, "the consumer is connected")
        consumer.kill()
        until(lambda: not producer._server._peers, "the connection is gone")
    assert producer.free_bytes == 8 * SLAB


def test_a_consumer_killed_with_slabs_is_replaced_by_new_slabs(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with ConsumerProcess(producer.endpoint) as consumer:
        old = consumer.call("attach", issuer.token(3 * SLAB))
        consumer.kill()
    until(lambda: producer.free_bytes == 8 * SLAB, "every slab is free again")
    with RawConsumer(producer.endpoint) as survivor:
        new = survivor.attach(issuer.token(8 * SLAB))
    assert not set(old) & set(new)


def test_a_consumer_killed_while_its_slabs_are_on_the_way_is_cleaned_up(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("hello", issuer.token(3 * SLAB))
        consumer.kill()
    until(lambda: not producer._server._peers, "the connection is gone")
    until(lambda: producer.free_bytes == 8 * SLAB, "every slab is free again")


def test_a_consumer_killed_during_a_reclaim_completes_it(issuer: TokenIssuer) -> None:
    with lending(issuer, 4) as producer, ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(4 * SLAB))
        reclaim = producer.reclaim(3 * SLAB)
        asked = consumer.call("await_reclaim")
        consumer.call("unmap", asked[0])
        consumer.kill()
        assert reclaim.wait(HANG_S)
        # The fourth slab was retired as well; the offer still covers it.
        until(lambda: producer.free_bytes == producer.offered_bytes == SLAB, "one is offered")


def test_answers_sent_before_a_kill_still_count(issuer: TokenIssuer) -> None:
    with lending(issuer, 4) as producer, ConsumerProcess(producer.endpoint) as consumer:
        old = consumer.call("attach", issuer.token(4 * SLAB))
        with producer._lock:  # The server sees answers and death in one go.
            for slab in old:
                consumer.call("give_back", slab)
            consumer.kill()
        until(lambda: producer.free_bytes == 4 * SLAB, "every slab is free again")
        with RawConsumer(producer.endpoint) as survivor:
            # Returned, not retired: the same physical slabs.
            assert sorted(survivor.attach(issuer.token(4 * SLAB))) == sorted(old)


def test_answers_sent_before_a_close_with_unread_packets_still_count(issuer: TokenIssuer) -> None:
    """Such a close resets the connection, and Linux tells that ahead of what was sent before."""
    with lending(issuer, 2) as producer, RawConsumer(producer.endpoint) as consumer:
        slabs = consumer.attach(issuer.token(2 * SLAB))
        reclaim = producer.reclaim(SLAB)
        with producer._lock:
            for slab in slabs:
                consumer.give_back(slab)
            consumer.hang_up()
        assert reclaim.wait(WITHIN_S)
        until(lambda: producer.free_bytes == SLAB, "the other slab is free")
        assert producer.quarantined_bytes == 0


def test_a_closed_channel_quarantines_until_the_process_is_dead(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer, ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(2 * SLAB))
        consumer.call("hang_up")
        until(lambda: producer.quarantined_bytes == 2 * SLAB, "both slabs are quarantined")
        with RawConsumer(producer.endpoint) as other:
            other.hello(issuer.token(SLAB))
            assert refusal_code(other) == "capacity_exhausted"
        assert producer.quarantined_bytes == 2 * SLAB
        consumer.kill()
        until(lambda: producer.free_bytes == 2 * SLAB, "two new slabs are free")


def test_a_goodbye_with_slabs_in_hand_is_silence_and_no_return(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(SLAB))
        consumer.goodbye()
        until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")


def test_descriptors_do_not_leak_over_two_hundred_attachments(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer:
        before = _descriptor_count()
        for _ in range(200):
            with RawConsumer(producer.endpoint) as consumer:
                for slab in consumer.attach(issuer.token(2 * SLAB)):
                    consumer.give_back(slab)
                consumer.await_end()
        until(lambda: not producer._server._peers, "every connection is gone")
        assert _descriptor_count() == before
        assert len(producer._handouts) == 0


# --- Misbehaviour ------------------------------------------------------------------------------


def test_a_packet_larger_than_the_protocol_allows_is_refused(producer: Producer) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.channel._socket.send(b"x" * (MAX_PACKET_BYTES + 1))
        with pytest.raises(RefusedError, match="larger than"):
            consumer.receive()


def test_descriptors_from_a_consumer_are_closed_and_refused(producer: Producer) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.ping(1)  # The producer has opened what it needs for this peer.
        before = _descriptor_count()
        packet = b'{"type": "ping", "number": 1}'
        socket.send_fds(consumer.channel._socket, [packet], [0, 1, 2])
        with pytest.raises(RefusedError, match="no descriptors"):
            consumer.receive()
        assert _descriptor_count() == before


@pytest.mark.parametrize("stage", ["before hello", "after attach"])
def test_a_message_out_of_place_is_refused(
    producer: Producer, issuer: TokenIssuer, stage: str
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        if stage == "before hello":
            consumer.released(0, generation=1)
        else:
            consumer.attach(issuer.token(SLAB))
            consumer.hello(issuer.token(SLAB))
        with pytest.raises(RefusedError, match="not allowed while"):
            consumer.receive()
    # What it held is safe: nobody gets it.
    if stage == "after attach":
        until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")


def test_too_many_connections_are_refused_and_the_others_live(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_PEERS", 3)
    consumers = [RawConsumer(producer.endpoint) for _ in range(3)]
    assert [consumer.ping(1) for consumer in consumers] == [1, 1, 1]
    with RawConsumer(producer.endpoint) as excess, pytest.raises(RefusedError, match="are open"):
        excess.receive()
    assert consumers[0].ping(2) == 2
    for consumer in consumers:
        consumer.close()
    until(lambda: not producer._server._peers, "every connection is gone")


def test_a_connection_that_says_nothing_is_closed(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.01)
    with RawConsumer(producer.endpoint) as silent, pytest.raises(RefusedError, match="no Hello"):
        silent.receive()


def test_a_peer_that_reads_nothing_is_dropped_and_the_others_live(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_WAITING_PACKETS", 16)
    with RawConsumer(producer.endpoint) as deaf, RawConsumer(producer.endpoint) as other:
        with pytest.raises(ChannelClosedError):
            _ping_for_ever(deaf)
        assert other.ping(1) == 1


def test_a_peer_that_is_slow_to_read_a_reclaim_gets_it_whole(issuer: TokenIssuer) -> None:
    # Far more packets than the kernel queues for one reader.
    count = 40 * MAX_SLABS_PER_PACKET
    with lending(issuer, count) as producer, RawConsumer(producer.endpoint) as slow:
        slow.attach(issuer.token(count * SLAB))
        for _ in range(count // MAX_SLABS_PER_PACKET):
            producer.reclaim(MAX_SLABS_PER_PACKET * SLAB)
        asked = {slab for _ in range(40) for slab in slow.await_reclaim()}
        assert len(asked) == count


def test_pings_are_answered_while_slabs_come_and_go(issuer: TokenIssuer) -> None:
    with lending(issuer, 64) as producer, RawConsumer(producer.endpoint) as steady:
        steady.attach(issuer.token(SLAB))
        for number in range(20):
            with RawConsumer(producer.endpoint) as busy:
                slabs = busy.attach(issuer.token(63 * SLAB))
                for slab in slabs:
                    busy.give_back(slab)
                assert steady.ping(number) == number
                busy.await_end()


def _ping_for_ever(consumer: RawConsumer) -> None:
    for number in range(1_000_000):
        consumer.channel.send(Ping(number=number))


def _descriptor_count() -> int:
    return len(_descriptors())


def _memfd_count() -> int:
    return sum("aqua-slab" in target for target in _descriptors())


def _descriptors() -> list[str]:
    """What this process has open, without the listing's own descriptor."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(str(link.readlink()))
    return targets
