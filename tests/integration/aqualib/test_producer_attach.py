"""A producer and its consumers over real sockets: who attaches, and what each is handed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from aqua_protocol import TransportError, UnavailableError
from aqua_protocol.channel import MAX_SLABS_PER_PACKET
from aqualib.transports.memfd import MemfdTransport
from harness.bounds import HANG_S
from harness.producers import SLAB, lending
from harness.raw_consumer import RawConsumer, RefusedError, TokenIssuer

if TYPE_CHECKING:
    from aqualib.producer.producer import Producer
    from aqualib.transports.base import Handle, OwnedSlab


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
        assert consumer.refusal_code() == "capacity_exhausted"


def test_a_token_cannot_be_replayed_while_its_lease_lives(
    producer: Producer, issuer: TokenIssuer
) -> None:
    token = issuer.token(SLAB)
    with RawConsumer(producer.endpoint) as first, RawConsumer(producer.endpoint) as second:
        first.attach(token)
        second.hello(token)
        assert second.refusal_code() == "capability_rejected"


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
        assert second.refusal_code() == "capability_rejected"


def test_a_token_of_lost_books_is_refused(producer: Producer, issuer: TokenIssuer) -> None:
    producer.acknowledge(issuer.ack(min_epoch=1000))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB, epoch=999))
        assert consumer.refusal_code() == "capability_rejected"


def test_a_late_answer_of_the_coordinator_does_not_reopen_lost_books(
    producer: Producer, issuer: TokenIssuer
) -> None:
    producer.acknowledge(issuer.ack(min_epoch=1000))
    producer.acknowledge(issuer.ack(min_epoch=1))
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB, epoch=999))
        assert consumer.refusal_code() == "capability_rejected"


@pytest.mark.parametrize(
    "token",
    ["", "x", "a.b", "é.é", "." * 4096],
    ids=["empty", "no signature", "not ours", "not ascii", "long"],
)
def test_a_token_that_is_none_is_refused(producer: Producer, token: str) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(token)
        assert consumer.refusal_code() == "capability_rejected"


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
            assert consumer.refusal_code() == "capability_rejected"
    assert producer.free_bytes == 8 * SLAB


def test_only_this_user_can_connect_unless_others_are_allowed(
    producer: Producer, issuer: TokenIssuer
) -> None:
    assert producer.endpoint.stat().st_mode & 0o777 == 0o600
    with lending(issuer, 1, allowed_uids={os.getuid() + 1}) as open_to_others:
        assert open_to_others.endpoint.stat().st_mode & 0o777 == 0o666


def test_without_a_coordinator_ever_seen_nobody_attaches(issuer: TokenIssuer) -> None:
    with lending(None, 1) as producer, RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB))
        assert consumer.refusal_code() == "service_unavailable"


def test_another_protocol_version_is_refused_by_name(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.hello(issuer.token(SLAB), version=999)
        assert consumer.refusal_code() == "version_mismatch"


def test_an_attach_to_a_producer_that_is_leaving_is_refused(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as holder:
        holder.attach(issuer.token(SLAB))
        leaving = threading.Thread(target=producer.close, args=(HANG_S,), daemon=True)
        leaving.start()
        (slab,) = holder.await_reclaim()
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(issuer.token(SLAB))
            assert consumer.refusal_code() == "service_unavailable"
        holder.give_back(slab)
        leaving.join(HANG_S)
        assert not leaving.is_alive()


class FailingTransport(MemfdTransport):
    """All but the first slabs fail to export while there is an error, as with a driver.

    Attributes:
        error: What exporting raises; None when the driver has recovered.
    """

    def __init__(self, error: Exception, *, good_count: int = 0) -> None:
        self.error: Exception | None = error
        self._good_count = good_count

    def create(self, nbytes: int) -> OwnedSlab:
        slab = super().create(nbytes)
        if self._good_count:
            self._good_count -= 1
            return slab
        export = slab.export

        def attempt() -> Handle:
            if self.error is not None:
                raise self.error
            return export()

        slab.export = attempt  # type: ignore[method-assign] # a driver that may fail
        return slab


def test_a_handout_that_fails_at_once_costs_no_slab(issuer: TokenIssuer) -> None:
    transport = FailingTransport(TransportError("no handles left"))
    with lending(issuer, 8, transport=transport) as producer:
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
    transport = FailingTransport(TransportError("no handles left"), good_count=count - 1)
    with (
        lending(issuer, count, transport=transport) as producer,
        RawConsumer(producer.endpoint) as consumer,
    ):
        consumer.hello(issuer.token(count * SLAB))
        with pytest.raises(RefusedError, match="no handles left"):
            consumer.take()
        assert producer.quarantined_bytes == MAX_SLABS_PER_PACKET * SLAB
        assert producer.free_bytes == 2 * SLAB


def test_an_error_that_nobody_foresaw_is_answered_and_logged_and_costs_no_slab(
    issuer: TokenIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    transport = FailingTransport(RuntimeError("device-side assert"))
    with lending(issuer, 8, transport=transport) as producer:
        with RawConsumer(producer.endpoint) as consumer:
            consumer.hello(issuer.token(3 * SLAB))
            with pytest.raises(RefusedError, match="could not hand out") as refusal:
                consumer.take()
        assert refusal.value.body.code == "transport_failed"
        assert "RuntimeError" in caplog.text
        assert "device-side assert" not in caplog.text
        assert producer.free_bytes == 8 * SLAB
        transport.error = None
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
        assert consumer.refusal_code() == "capacity_exhausted"
    monkeypatch.undo()
    assert producer.free_bytes == 8 * SLAB
    with RawConsumer(producer.endpoint) as consumer:
        assert len(consumer.attach(issuer.token(8 * SLAB))) == 8


@pytest.mark.parametrize("key", ["not base64!", "k\u00e9y="])
def test_a_key_that_is_none_changes_nothing(
    producer: Producer, issuer: TokenIssuer, key: str
) -> None:
    with pytest.raises(UnavailableError, match="not base64"):
        producer.acknowledge(issuer.ack().model_copy(update={"capability_key": key}))
    with RawConsumer(producer.endpoint) as consumer:
        assert list(consumer.attach(issuer.token(SLAB)))
