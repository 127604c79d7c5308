"""A producer and its consumers over real sockets: how consumers end, and how they misbehave."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from aqua_protocol.channel import MAX_PACKET_BYTES, MAX_SLABS_PER_PACKET, Ping
from aqualib.channel import ChannelClosedError, LingeringSelector
from aqualib.peers import trusted_uids
from aqualib.producer import server
from harness.bounds import HANG_S, until
from harness.memory import CountedMemory
from harness.producers import SLAB, lending
from harness.raw_consumer import ConsumerProcess, RawConsumer, RefusedError, TokenIssuer, send_bytes
from harness.transport_peer import descriptor_targets, open_descriptors

if TYPE_CHECKING:
    import selectors

    from aqualib.producer.producer import Producer


@pytest.fixture
def hearing(monkeypatch: pytest.MonkeyPatch) -> threading.Lock:
    """While it is held, a server made from now on hears nothing; then everything in one go."""
    lock = threading.Lock()

    class DeafSelector(LingeringSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            ready = super().select(timeout)
            if not lock.locked():
                return ready
            with lock:
                return super().select(0)

    monkeypatch.setattr(server, "LingeringSelector", DeafSelector)
    return lock


# --- The end of a consumer ---------------------------------------------------------------------


def test_a_consumer_killed_before_hello_leaves_no_trace(producer: Producer) -> None:
    with ConsumerProcess(producer.endpoint) as consumer:
        until(lambda: watched_count() == 1, "the consumer is connected")
        consumer.kill()
        until(lambda: not watched_count(), "the connection is gone")
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
    until(lambda: not watched_count(), "the connection is gone")
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


def test_answers_sent_before_a_kill_still_count(
    hearing: threading.Lock, issuer: TokenIssuer
) -> None:
    memory = CountedMemory()
    with (
        lending(issuer, 4, transport=memory) as producer,
        ConsumerProcess(producer.endpoint) as consumer,
    ):
        slabs = consumer.call("attach", issuer.token(4 * SLAB))
        with hearing:  # The server sees answers and death in one go.
            for slab in slabs:
                consumer.call("give_back", slab)
            consumer.kill()
        until(lambda: producer.free_bytes == 4 * SLAB, "every slab is free again")
        assert memory.made_count == 4, "returned, not retired and replaced"


def test_answers_sent_before_a_close_with_unread_packets_still_count(
    hearing: threading.Lock, issuer: TokenIssuer
) -> None:
    """Such a close resets the connection, and Linux tells that ahead of what was sent before."""
    with lending(issuer, 2) as producer, RawConsumer(producer.endpoint) as consumer:
        slabs = consumer.attach(issuer.token(2 * SLAB))
        reclaim = producer.reclaim(SLAB)
        with hearing:
            for slab in slabs:
                consumer.give_back(slab)
            consumer.hang_up()
        assert reclaim.wait(HANG_S)
        until(lambda: producer.free_bytes == SLAB, "the other slab is free")
        assert producer.quarantined_bytes == 0


def test_a_closed_channel_quarantines_until_the_process_is_dead(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer, ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(2 * SLAB))
        consumer.call("hang_up")
        until(lambda: producer.quarantined_bytes == 2 * SLAB, "both slabs are quarantined")
        with RawConsumer(producer.endpoint) as other:
            other.hello(issuer.token(SLAB))
            assert other.refusal_code() == "capacity_exhausted"
        assert producer.quarantined_bytes == 2 * SLAB
        consumer.kill()
        until(lambda: producer.free_bytes == 2 * SLAB, "two new slabs are free")


def test_a_process_that_has_lost_its_channel_gives_slabs_back_over_another(
    issuer: TokenIssuer,
) -> None:
    with lending(issuer, 2) as producer:
        with RawConsumer(producer.endpoint) as lost:
            slabs = lost.attach(issuer.token(2 * SLAB))
            lost.channel.close()
            until(lambda: producer.quarantined_bytes == 2 * SLAB, "both slabs are quarantined")
            with RawConsumer(producer.endpoint) as another:
                for slab in slabs:
                    lost.unmap(slab)
                    another.released(slab, generation=lost.generations[slab])
                until(lambda: producer.free_bytes == 2 * SLAB, "two slabs are free")
        assert producer.quarantined_bytes == 0
    until(lambda: not watched_count(), "every connection is gone")


def test_another_process_cannot_give_back_the_slabs_of_one_that_is_silent(
    issuer: TokenIssuer,
) -> None:
    with lending(issuer, 2) as producer, ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(2 * SLAB))
        consumer.call("hang_up")
        until(lambda: producer.quarantined_bytes == 2 * SLAB, "both slabs are quarantined")
        with RawConsumer(producer.endpoint) as other:
            other.released(0, generation=1)
            with pytest.raises(RefusedError, match="not allowed while"):
                other.receive()
        assert producer.quarantined_bytes == 2 * SLAB


def test_a_goodbye_with_slabs_in_hand_is_silence_and_no_return(
    producer: Producer, issuer: TokenIssuer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(SLAB))
        consumer.goodbye()
        until(lambda: producer.quarantined_bytes == SLAB, "the slab is quarantined")


def test_descriptors_do_not_leak_over_two_hundred_attachments(issuer: TokenIssuer) -> None:
    with lending(issuer, 2) as producer:
        before = open_descriptors()
        for _ in range(200):
            with RawConsumer(producer.endpoint) as consumer:
                for slab in consumer.attach(issuer.token(2 * SLAB)):
                    consumer.give_back(slab)
                consumer.await_end()
        until(lambda: not watched_count(), "every connection is gone")
        assert open_descriptors() == before
        until(
            lambda: not any(t.name.startswith("aqua-handout") for t in threading.enumerate()),
            "every handout is over",
        )


# --- Misbehaviour ------------------------------------------------------------------------------


def test_a_packet_larger_than_the_protocol_allows_is_refused(producer: Producer) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        send_bytes(consumer.channel, b"x" * (MAX_PACKET_BYTES + 1))
        with pytest.raises(RefusedError, match="larger than"):
            consumer.receive()


def test_descriptors_from_a_consumer_are_closed_and_refused(producer: Producer) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.ping(1)  # The producer has opened what it needs for this peer.
        before = open_descriptors()
        send_bytes(consumer.channel, b'{"type": "ping", "number": 1}', [0, 1, 2])
        with pytest.raises(RefusedError, match="no descriptors"):
            consumer.receive()
        assert open_descriptors() == before


@pytest.mark.parametrize(
    "packet",
    [
        b'{"type": "hello", "token": "the-secret", "more": 1}',
        b'{"type": "hello", "token": ["the-secret"]}',
        b'{"type": "hallo", "token": "the-secret"}',
        b'{"type": "hello", "token": "the-secret',
        b"the-secret",
    ],
)
def test_what_a_packet_said_is_neither_told_nor_logged(
    producer: Producer, packet: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hold a token."""
    with RawConsumer(producer.endpoint) as consumer:
        send_bytes(consumer.channel, packet)
        with pytest.raises(RefusedError, match="is not a message") as refused:
            consumer.receive()
    assert "secret" not in str(refused.value)
    assert "is not a message" in caplog.text
    assert "secret" not in caplog.text


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
    monkeypatch.setattr(server, "MAX_PEERS", 3 * len(trusted_uids()))
    consumers = [RawConsumer(producer.endpoint) for _ in range(3)]
    assert [consumer.ping(1) for consumer in consumers] == [1, 1, 1]
    with RawConsumer(producer.endpoint) as excess, pytest.raises(RefusedError, match="are open"):
        excess.receive()
    assert consumers[0].ping(2) == 2
    for consumer in consumers:
        consumer.close()
    until(lambda: not watched_count(), "every connection is gone")


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


def watched_count() -> int:
    """Consumers that a producer in this process watches: it keeps a pidfd of each to the last."""
    return sum("pidfd" in target for target in descriptor_targets())
