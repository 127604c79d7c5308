"""A producer and a real coordinator: the books follow the slabs, and no reclaim needs the books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aqua_client import CoordinatorClient
from aqua_protocol import TransportError, TransportKind, UnavailableError
from aqua_protocol.errors import UnauthenticatedError, VersionMismatchError
from aqua_protocol.leases import LeaseGrant, LeaseRequest
from aqua_protocol.members import ConsumerReport
from aqualib import reporter as reporter_module
from aqualib.connection import open_producer
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.patience import patient_client
from harness.producers import SLAB
from harness.raw_consumer import ConsumerProcess, RawConsumer, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = 8


@pytest.fixture
def producer(link: CoordinatorClient, directory: Path) -> Iterator[Producer]:
    producer = make(link, directory)
    yield producer
    producer.close(deadline_s=0.01)


def make(link: CoordinatorClient, directory: Path, *, slab_count: int = COUNT) -> Producer:
    producer = Producer(
        "producer",
        transport=select(TransportKind.MEMFD),
        link=link,
        endpoint=directory / "p.sock",
        identity=Identity(node="node", domain="domain", gpu_uuid="GPU-0"),
        slab_bytes=SLAB,
        heartbeat_s=0.1,
    )
    producer.offer(slab_count * SLAB)
    return producer


class Borrower:
    """The control plane of a consumer: registers, and asks for leases."""

    def __init__(self, link: CoordinatorClient) -> None:
        self._link = link
        self._identity = Identity(node="node", domain="domain", gpu_uuid="GPU-1")
        self._revision = 0

    def report(self) -> None:
        stamp = self._identity.stamp(self._revision, None)  # type: ignore[arg-type] # a NewType over int
        self._revision += 1
        self._link.report_consumer(ConsumerReport(**stamp, consumer_id="consumer"))

    def borrow(self, slab_count: int) -> LeaseGrant:
        self.report()
        return self._link.grant_lease(LeaseRequest(consumer_id="consumer", bytes=slab_count * SLAB))


@pytest.fixture
def borrower(link: CoordinatorClient) -> Borrower:
    return Borrower(link)


def books(coordinator: CoordinatorProcess) -> dict[str, Any]:
    view: dict[str, Any] = coordinator.get("producers/producer")
    assert view["free_bytes"] + view["leased_bytes"] == view["offered_bytes"]
    return view


def await_books(coordinator: CoordinatorProcess, *, offered: int, leased: int) -> None:
    def agree() -> bool:
        view = books(coordinator)
        return (view["offered_bytes"], view["leased_bytes"]) == (offered * SLAB, leased * SLAB)

    until(agree, f"the books say {offered} slabs offered, {leased} leased")


def await_grantable(producer: Producer) -> None:
    until(lambda: producer.grantable, "the producer may be granted from")
    assert producer.flush_report(HANG_S)


def test_a_lease_goes_through_the_books_and_its_end_as_well(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    await_books(coordinator, offered=COUNT, leased=0)
    grant = borrower.borrow(3)
    assert grant.endpoint == str(producer.endpoint)
    with RawConsumer(grant.endpoint) as consumer:
        slabs = consumer.attach(grant.token)
        assert len(slabs) == 3
        await_books(coordinator, offered=COUNT, leased=3)
        lease = f"leases/{grant.lease.lease_id}"
        until(lambda: coordinator.get(lease)["state"] == "active", "the lease is active")
        for slab in slabs:
            consumer.give_back(slab)
        until(lambda: coordinator.get(lease)["state"] == "released", "the lease is released")
    await_books(coordinator, offered=COUNT, leased=0)


def test_a_partial_reclaim_shows_in_the_books(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    grant = borrower.borrow(COUNT)
    with RawConsumer(grant.endpoint) as consumer:
        consumer.attach(grant.token)
        reclaim = producer.reclaim(3 * SLAB)
        for slab in consumer.await_reclaim():
            consumer.give_back(slab)
        assert reclaim.wait(HANG_S)
        await_books(coordinator, offered=5, leased=5)
        view = f"reclaims/{reclaim.reclaim_id}"
        until(lambda: coordinator.get(view)["done"], "the reclaim is done in the books")
        told = coordinator.get(view)
        assert told["returned_bytes"] == told["requested_bytes"] == 3 * SLAB
        assert told["total_ms"] == pytest.approx(reclaim.total_ms)


def test_a_reclaim_needs_no_coordinator_and_the_books_catch_up(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    grant = borrower.borrow(COUNT)
    late = borrower.borrow  # A consumer that asks while nobody answers.
    with RawConsumer(grant.endpoint) as consumer:
        consumer.attach(grant.token)
        assert producer.flush_report(HANG_S)
        coordinator.kill()
        reclaim = producer.reclaim(2 * SLAB)
        for slab in consumer.await_reclaim():
            consumer.give_back(slab)
        assert reclaim.wait(HANG_S)
        with pytest.raises(UnavailableError):
            late(1)
        until(lambda: producer.coordinator_error is not None, "the absence is noticed")
        with CoordinatorProcess(coordinator.data_dir, port=coordinator.port) as restarted:
            await_books(restarted, offered=6, leased=6)
            until(lambda: producer.coordinator_error is None, "the producer reports again")


def test_a_granted_token_is_good_while_the_coordinator_is_away(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    grant = borrower.borrow(2)
    coordinator.kill()
    with RawConsumer(grant.endpoint) as consumer:
        assert len(consumer.attach(grant.token)) == 2


def test_lost_books_are_rebuilt_from_the_producer_and_refuse_their_old_tokens(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    held, unused = borrower.borrow(3), borrower.borrow(2)
    with RawConsumer(held.endpoint) as consumer, data_dir() as elsewhere:
        consumer.attach(held.token)
        coordinator.kill()
        with CoordinatorProcess(elsewhere, port=coordinator.port) as successor:
            until(lambda: _knows(successor), "the producer is in the new books")
            await_books(successor, offered=COUNT, leased=3)
            until(lambda: books(successor)["grantable"], "the new books grant again")
            with (
                RawConsumer(unused.endpoint) as stranger,
                pytest.raises(RefusedError, match="capability_rejected"),
            ):
                stranger.attach(unused.token)
            again = borrower.borrow(5)
            with RawConsumer(again.endpoint) as another:
                assert len(another.attach(again.token)) == 5


def test_a_lease_released_in_the_books_is_asked_back(
    coordinator: CoordinatorProcess,
    producer: Producer,
    borrower: Borrower,
    link: CoordinatorClient,
) -> None:
    await_grantable(producer)
    grant = borrower.borrow(2)
    with RawConsumer(grant.endpoint) as consumer:
        consumer.attach(grant.token)
        assert producer.flush_report(HANG_S)
        link.release_lease(grant.lease.lease_id, grant.lease.epoch)
        for slab in consumer.await_reclaim():
            consumer.give_back(slab)
        assert consumer.await_end() == "goodbye"
    await_books(coordinator, offered=COUNT, leased=0)


def test_an_operators_order_is_carried_out_and_accounted_for(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    await_grantable(producer)
    order = {"producer_id": "producer", "bytes": 3 * SLAB}
    made = coordinator.post("reclaims", order, **{"Idempotency-Key": "once"})
    await_books(coordinator, offered=5, leased=0)
    view = f"reclaims/{made['reclaim_id']}"
    until(lambda: coordinator.get(view)["done"], "the order is done in the books")
    assert coordinator.get(view)["returned_bytes"] == 3 * SLAB
    assert producer.offered_bytes == 5 * SLAB


def test_a_killed_consumer_leaves_the_books(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    grant = borrower.borrow(4)
    with ConsumerProcess(grant.endpoint) as consumer:
        consumer.call("attach", grant.token)
        await_books(coordinator, offered=COUNT, leased=4)
        consumer.kill()
        await_books(coordinator, offered=COUNT, leased=0)


def test_a_lease_that_came_and_went_between_two_reports_does_not_stay_granted(
    coordinator: CoordinatorProcess, producer: Producer, borrower: Borrower
) -> None:
    await_grantable(producer)
    grants = [borrower.borrow(1) for _ in range(COUNT)]
    # Many short leases, far more often than reports are sent.
    for grant in grants:
        with RawConsumer(grant.endpoint) as consumer:
            (slab,) = consumer.attach(grant.token)
            consumer.give_back(slab)
            assert consumer.await_end() == "goodbye"
    for _ in range(3):
        assert producer.flush_report(HANG_S)
    assert books(coordinator)["leased_bytes"] == 0


def test_a_closed_producer_leaves_the_books(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    await_grantable(producer)
    producer.close()
    assert coordinator.get("producers")["producers"] == []


def test_a_producer_opened_by_variables_is_in_the_books_until_it_is_closed(
    coordinator: CoordinatorProcess, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AQUA_COORDINATOR_URL": coordinator.url,
        "AQUA_TRANSPORT": "memfd",
        "AQUA_SLAB_BYTES": "64KiB",
        "AQUA_SOCKET_DIR": str(directory),
        "AQUA_EMULATED_HBM_BYTES": "256KiB",
        "AQUA_NODE": "node-7",
        "AQUA_MEMBER": "sdxl.3",
        "AQUA_HEARTBEAT_S": "0.1",
    }.items():
        monkeypatch.setenv(name, value)
    with open_producer(model="sdxl") as producer:
        producer.offer(3 * SLAB)
        await_grantable(producer)
        (view,) = coordinator.get("producers")["producers"]
        assert (view["node"], view["model"]) == ("node-7", "sdxl")
        assert view["producer_id"] == "sdxl.3"
        assert view["offered_bytes"] == 3 * SLAB
        with pytest.raises(TransportError, match="out of device memory"):
            producer.offer(5 * SLAB)
    assert coordinator.get("producers")["producers"] == []
    assert list(directory.iterdir()) == []


def test_a_wrong_token_is_said_and_stops_no_reclaim(directory: Path) -> None:
    with data_dir() as path:
        tokens = path / "tokens.json"
        tokens.write_text('{"tokens": []}')
        tokens.chmod(0o600)
        with (
            CoordinatorProcess(path, AQUA_TOKENS_FILE=str(tokens)) as coordinator,
            patient_client(coordinator.url, "wrong") as link,
        ):
            producer = make(link, directory)
            until(lambda: producer.coordinator_error is not None, "the refusal arrives")
            assert isinstance(producer.coordinator_error, UnauthenticatedError)
            assert producer.reclaim(SLAB).wait(HANG_S)
            producer.close(deadline_s=0.01)


def test_another_protocol_version_is_said(
    link: CoordinatorClient, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "PROTOCOL_VERSION", 999)
    producer = make(link, directory)
    until(lambda: producer.coordinator_error is not None, "the refusal arrives")
    assert isinstance(producer.coordinator_error, VersionMismatchError)
    producer.close(deadline_s=0.01)


def _knows(coordinator: CoordinatorProcess) -> bool:
    return bool(coordinator.get("producers")["producers"])
