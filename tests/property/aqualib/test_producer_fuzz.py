"""Whatever a peer sends, the producer goes on serving the others and keeps its slabs."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqualib.channel import ChannelClosedError
from harness.bounds import until
from harness.producers import SLAB, lending
from harness.raw_consumer import (
    RawConsumer,
    RefusedError,
    TokenIssuer,
    connection_of_another_process,
    send_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.producer.producer import Producer

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
)
nearly_messages = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "released", "ping", "pong", "goodbye", "welcome", ""])},
    optional={
        "slab_id": values,
        "generation": values,
        "number": values,
        "token": values,
        "consumer_id": values,
        "protocol_version": values,
        "aqualib_version": values,
    },
).map(lambda message: json.dumps(message).encode())
packets = st.lists(st.one_of(st.binary(max_size=300), nearly_messages), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def issuer() -> TokenIssuer:
    return TokenIssuer()


@pytest.fixture(scope="module")
def producer(issuer: TokenIssuer) -> Iterator[Producer]:
    with lending(issuer, 4) as producer:
        yield producer


@given(packets=packets)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_from_a_stranger_harms_nobody(producer: Producer, packets: list[bytes]) -> None:
    with RawConsumer(producer.endpoint) as steady, RawConsumer(producer.endpoint) as stranger:
        send(stranger, packets)
        assert steady.ping(1) == 1
    assert producer.free_bytes == 4 * SLAB


@pytest.mark.slow
@given(packets=packets)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_from_a_holder_costs_only_its_own_slabs(
    producer: Producer, issuer: TokenIssuer, packets: list[bytes]
) -> None:
    """What the holder had is lent to nobody, unless it said truthfully that it is back."""
    with (
        connection_of_another_process(producer.endpoint) as (connection, process),
        RawConsumer(connection) as holder,
    ):
        (slab,) = holder.attach(issuer.token(SLAB))
        generation = holder.generations[slab]
        send(holder, packets)
        with contextlib.suppress(RefusedError, ChannelClosedError):
            while holder.readable(0.0):
                holder.receive()
        truthful = any(names(packet, slab, generation) for packet in packets)
        assert producer.free_bytes == 3 * SLAB or truthful
        process.kill()
    until(lambda: producer.free_bytes == 4 * SLAB, "a new slab is in its place")


def send(consumer: RawConsumer, packets: list[bytes]) -> None:
    for packet in packets:
        try:
            send_bytes(consumer.channel, packet)
        except OSError:
            return  # Hung up on, rightly.


def names(packet: bytes, slab_id: int, generation: int) -> bool:
    try:
        message: Any = json.loads(packet)
    except ValueError:
        return False
    expected = {"type": "released", "slab_id": slab_id, "generation": generation}
    return isinstance(message, dict) and all(message.get(k) == v for k, v in expected.items())
