"""An engine, its informer and a consumer on one emulated device: memory moves and never doubles."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aqua_protocol.members import LoadReport, ReclaimOrder
from aqualib.producer.device import EmulatedMemory
from aqualib.producer.informer import Informer
from aqualib.producer.offer_rule import OfferBytes, ReclaimBytes
from aqualib.producer.profile import Profile
from harness.bounds import HANG_S, until
from harness.consumers import consuming
from harness.loans import lend
from harness.producers import SLAB, lending
from harness.raw_consumer import ConsumerProcess, RawConsumer, TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.producer.producer import Producer

TOTAL = 16
CALM_S = 5.0
PROFILE = Profile(
    slab_bytes=SLAB,
    spare_bytes=8 * SLAB,
    steady_requests_per_s=10.0,
    least_offer_bytes=SLAB,
    calm_s=CALM_S,
)


class Engine:
    """Reserves its whole device, as LLM engines do, and gives memory up when asked.

    Args:
        device: Shared with the slabs; fails like a driver when the two exceed it.
    """

    def __init__(self, device: EmulatedMemory) -> None:
        self.device = device
        self.own_bytes = TOTAL * SLAB
        self.requests_per_s = 10.0
        self.queue_length = 0
        self.at_once_bytes = TOTAL * SLAB
        device.take(self.own_bytes)

    def load(self) -> LoadReport:
        return LoadReport(
            queue_length=self.queue_length,
            memory_used_bytes=self.device.used_bytes,
            memory_total_bytes=self.device.total_bytes,
            requests_per_s=self.requests_per_s,
        )

    def shrink(self, nbytes: int) -> int:
        given = min(nbytes, self.at_once_bytes, self.own_bytes)
        self.device.give_back(given)
        self.own_bytes -= given
        return given

    def grow(self, nbytes: int) -> None:
        self.device.take(nbytes)
        self.own_bytes += nbytes


@pytest.fixture
def device() -> EmulatedMemory:
    return EmulatedMemory(TOTAL * SLAB)


@pytest.fixture
def engine(device: EmulatedMemory) -> Engine:
    return Engine(device)


@pytest.fixture
def producer(issuer: TokenIssuer, device: EmulatedMemory) -> Iterator[Producer]:
    with lending(issuer, 0, device=device) as producer:
        yield producer


def test_a_steady_load_offers_and_a_rising_one_takes_back_and_a_falling_one_offers_again(
    producer: Producer, engine: Engine, issuer: TokenIssuer
) -> None:
    informer = Informer(producer, engine, PROFILE)
    assert informer.look(0.0) is None
    assert informer.look(CALM_S) == OfferBytes(8 * SLAB)
    assert producer.offered_bytes == engine.device.total_bytes - engine.own_bytes == 8 * SLAB
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(8 * SLAB))

        engine.requests_per_s = 20.0
        assert informer.look(10.0) == ReclaimBytes(8 * SLAB)
        asked = consumer.await_reclaim()
        # The engine gets memory slab by slab, not at the end.
        for done, slab in enumerate(asked, start=1):
            consumer.give_back(slab)
            until(lambda: producer.committed_bytes == (8 - done) * SLAB, "the slab is closed")  # noqa: B023 - called within the iteration
            informer.look(11.0)
            assert engine.own_bytes == (8 + done) * SLAB

    engine.requests_per_s = 10.0
    assert informer.look(20.0) is None
    assert informer.look(20.0 + CALM_S) == OfferBytes(8 * SLAB)
    assert producer.offered_bytes == 8 * SLAB


def test_an_engine_that_borrows_lends_when_it_has_given_all_back_and_borrows_when_it_has_all(
    producer: Producer, engine: Engine, issuer: TokenIssuer
) -> None:
    elsewhere = TokenIssuer()
    with lending(elsewhere, 2) as other, consuming() as aqua:
        lend(aqua, elsewhere, other, 2)
        stored = aqua.empty(SLAB)
        informer = Informer(producer, engine, PROFILE, borrower=aqua)
        may_borrow: list[bool] = []
        informer.look(0.0)
        may_borrow.append(aqua.may_borrow)
        with stored.pinned():
            informer.look(CALM_S)
            assert aqua.is_borrowing, "what is pinned cannot leave"
            assert producer.offered_bytes == 0
        until(lambda: not aqua.is_borrowing, "it has given everything back")
        informer.look(CALM_S)
        assert producer.offered_bytes == 8 * SLAB
        may_borrow.append(aqua.may_borrow)

        with RawConsumer(producer.endpoint) as consumer:
            consumer.attach(issuer.token(8 * SLAB))
            engine.requests_per_s = 20.0
            informer.look(10.0)
            for slab in consumer.await_reclaim():
                informer.look(11.0)
                may_borrow.append(aqua.may_borrow)
                consumer.give_back(slab)
        until(lambda: producer.committed_bytes == 0, "all slabs are closed")
        informer.look(12.0)
        may_borrow.append(aqua.may_borrow)
        assert may_borrow == [True, *[False] * 9, True], "some of its own memory was still lent"


def test_while_lending_is_off_everything_comes_back_and_calm_counts_anew_after_it(
    producer: Producer, engine: Engine
) -> None:
    informer = Informer(producer, engine, PROFILE)
    informer.look(0.0)
    assert informer.look(CALM_S) == OfferBytes(8 * SLAB)
    informer.is_lending = False
    assert informer.look(CALM_S + 1) == ReclaimBytes(8 * SLAB)
    until(lambda: not producer.committed_bytes, "the slabs are closed")
    assert informer.look(3 * CALM_S) is None
    assert (producer.offered_bytes, engine.own_bytes) == (0, TOTAL * SLAB)
    informer.is_lending = True
    assert informer.look(4 * CALM_S) is None
    assert informer.look(5 * CALM_S) == OfferBytes(8 * SLAB)


def test_an_engine_that_shrinks_slowly_offers_slowly(producer: Producer, engine: Engine) -> None:
    engine.at_once_bytes = SLAB + SLAB // 2
    informer = Informer(producer, engine, PROFILE)
    informer.look(0.0)
    informer.look(10.0)
    assert producer.offered_bytes == SLAB
    informer.look(11.0)
    # The two halves left over make a slab.
    assert producer.offered_bytes == 3 * SLAB
    assert producer.offered_bytes + engine.own_bytes == engine.device.used_bytes


def test_an_offer_that_does_not_fit_gives_the_rest_back_to_the_engine(
    producer: Producer, engine: Engine, device: EmulatedMemory
) -> None:
    informer = Informer(producer, engine, PROFILE)
    shrink = engine.shrink
    returned: list[int] = []

    def shrink_beside_a_thief(nbytes: int) -> int:
        given = shrink(nbytes)
        device.take(3 * SLAB)
        return given

    engine.shrink = shrink_beside_a_thief  # type: ignore[method-assign] # somebody is quicker
    engine.grow = returned.append  # type: ignore[method-assign,assignment] # it gets less than it gave
    informer.look(0.0)
    informer.look(10.0)
    assert producer.offered_bytes == informer.surrendered_bytes == 5 * SLAB
    assert returned == [3 * SLAB]


def test_an_operators_order_gives_memory_to_the_engine_as_well(
    producer: Producer, engine: Engine, issuer: TokenIssuer
) -> None:
    informer = Informer(producer, engine, PROFILE)
    informer.look(0.0)
    informer.look(CALM_S)
    order = ReclaimOrder(reclaim_id="order-1", bytes=2 * SLAB, deadline_s=5)
    producer.acknowledge(issuer.ack(reclaims=[order]))
    until(lambda: producer.committed_bytes == 6 * SLAB, "two slabs are closed")
    informer.look(CALM_S + 0.1)
    assert engine.own_bytes + producer.offered_bytes == TOTAL * SLAB


def test_a_lost_slab_is_replaced_within_the_budget(
    producer: Producer, engine: Engine, issuer: TokenIssuer
) -> None:
    informer = Informer(producer, engine, PROFILE)
    informer.look(0.0)
    informer.look(CALM_S)
    with ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(8 * SLAB))
        consumer.kill()
        until(lambda: producer.free_bytes == 8 * SLAB, "every slab is replaced")
    informer.look(CALM_S + 0.1)
    assert engine.own_bytes == 8 * SLAB


@pytest.mark.parametrize("method", ["load", "shrink", "grow"])
def test_an_engine_that_raises_is_logged_and_watched_again_when_it_recovers(
    producer: Producer,
    engine: Engine,
    issuer: TokenIssuer,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    whole = getattr(engine, method)
    calls: list[int] = []

    def fail(*_: int) -> None:
        calls.append(1)
        raise RuntimeError("the engine is reloading")

    setattr(engine, method, fail)
    caplog.set_level("INFO", "aqualib")
    with Informer(producer, engine, replace(PROFILE, calm_s=0.0), poll_s=0.001) as informer:
        if method == "grow":
            until(lambda: producer.offered_bytes == 8 * SLAB, "the memory is offered")
            engine.queue_length = 100
        until(lambda: len(calls) >= 10, "several looks have failed")
        told = [r.message for r in caplog.records if r.levelname == "ERROR"]
        # The first, and the one with which it has become a state.
        assert [line.partition(", at")[0] for line in told] == [
            "aqua-informer crashed, 1 in a row",
            "aqua-informer crashed, 3 in a row",
        ]
        assert producer.failing_loops == ("aqua-informer",)
        setattr(engine, method, whole)
        engine.queue_length = 0
        until(lambda: producer.free_bytes == 8 * SLAB, "the memory is offered")
        with RawConsumer(producer.endpoint) as consumer:
            consumer.attach(issuer.token(8 * SLAB))
            engine.queue_length = 100
            for slab in consumer.await_reclaim():
                consumer.give_back(slab)
            until(lambda: engine.own_bytes == TOTAL * SLAB, "the engine has all of it back")
        assert informer.surrendered_bytes == 0


def test_calm_has_to_be_seen_anew_after_an_outage(producer: Producer, engine: Engine) -> None:
    informer = Informer(producer, engine, PROFILE)
    informer.look(0.0)
    whole = engine.load
    looked = threading.Event()

    def fail() -> LoadReport:
        looked.set()
        raise RuntimeError("the engine is reloading")

    engine.load = fail  # type: ignore[method-assign] # no look of the thread succeeds
    with informer:
        assert looked.wait(HANG_S)
    engine.load = whole  # type: ignore[method-assign]
    assert informer.look(CALM_S) is None
    assert informer.look(2 * CALM_S) == OfferBytes(8 * SLAB)


def test_the_thread_follows_the_load_by_itself(
    producer: Producer, engine: Engine, issuer: TokenIssuer
) -> None:
    with Informer(producer, engine, replace(PROFILE, calm_s=0.0), poll_s=0.001) as informer:
        until(lambda: producer.offered_bytes == 8 * SLAB, "the memory is offered")
        with RawConsumer(producer.endpoint) as consumer:
            consumer.attach(issuer.token(8 * SLAB))
            engine.queue_length = 100
            for slab in consumer.await_reclaim():
                consumer.give_back(slab)
            until(lambda: engine.own_bytes == TOTAL * SLAB, "the engine has its memory back")
        assert informer.surrendered_bytes == 0
        engine.queue_length = 0
        until(lambda: producer.free_bytes == 8 * SLAB, "the memory is offered again")
    assert producer.load is not None
    assert "aqua-informer" not in {thread.name for thread in threading.enumerate()}
