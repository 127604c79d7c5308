"""A consumer, producers and a real coordinator: leases come, go and survive the coordinator."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import aqualib
from aqua_client import CoordinatorClient
from aqua_protocol import (
    ConfigError,
    LeaseState,
    RequestInvalidError,
    TransportKind,
    UnavailableError,
)
from aqua_protocol.errors import UnauthenticatedError
from aqua_protocol.leases import AttachFailure, LeaseGrant, LeaseRequest
from aqualib.consumer import Aqua
from aqualib.leasing import demand
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.tensor import AquaTensor, Location
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.consumers import await_rest, consuming
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.lender_process import LenderProcess
from harness.loans import fill, require_intact
from harness.patience import patient_client
from harness.producers import SLAB, socket_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT: Final = 8
HEARTBEAT_S: Final = 0.1


@pytest.fixture(autouse=True)
def _no_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits after a reclaim or a refusal are for clusters; here they would only be slow."""
    for name in ("CALM_S", "MAX_CALM_S", "FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(demand, name, 0.05)


@pytest.fixture
def producer(coordinator: CoordinatorProcess) -> Iterator[Producer]:
    with lending(coordinator) as producer:
        yield producer


@contextlib.contextmanager
def lending(
    coordinator: CoordinatorProcess,
    name: str = "producer",
    *,
    slab_bytes: int = SLAB,
    slab_count: int = COUNT,
) -> Iterator[Producer]:
    with patient_client(coordinator.url) as link, socket_dir() as directory:
        producer = Producer(
            name,
            transport=select(TransportKind.MEMFD),
            link=link,
            endpoint=directory / "p.sock",
            identity=Identity(node="node", domain="domain", gpu_uuid=f"GPU-{name}"),
            slab_bytes=slab_bytes,
            heartbeat_s=HEARTBEAT_S,
        )
        producer.offer(slab_count * slab_bytes)
        try:
            yield producer
        finally:
            producer.close(deadline_s=0.01)


@contextlib.contextmanager
def borrowing(coordinator: CoordinatorProcess, **options: Any) -> Iterator[Aqua]:  # noqa: ANN401 - an Aqua's
    options.setdefault("link", patient_client(coordinator.url))
    with consuming(heartbeat_s=HEARTBEAT_S, **options) as aqua:
        yield aqua


def await_location(pairs: list[tuple[AquaTensor, torch.Tensor]], location: Location) -> None:
    def all_are_there() -> bool:
        return all(tensor.location is location for tensor, _ in pairs)

    until(all_are_there, f"everything is in {location}")


def books(coordinator: CoordinatorProcess, name: str = "producer") -> dict[str, Any]:
    view: dict[str, Any] = coordinator.get(f"producers/{name}")
    assert view["free_bytes"] + view["leased_bytes"] == view["offered_bytes"]
    return view


def leased_slabs(coordinator: CoordinatorProcess) -> int:
    return int(books(coordinator)["leased_bytes"]) // SLAB


def test_what_is_spilled_finds_a_lender_by_itself_and_the_books_know(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        require_intact(pairs)
        until(lambda: leased_slabs(coordinator) == COUNT, "the books have the lease")
        attachment, *_ = aqua.attachments  # One, or more where the tensors came slowly.
        lease = coordinator.get(f"leases/{attachment.lease_id}")
        until(
            lambda: coordinator.get(f"leases/{attachment.lease_id}")["state"] == LeaseState.ACTIVE,
            "the lease is active",
        )
        assert lease["consumer_id"] == "consumer"
        until(lambda: view_of(coordinator)["spilled_bytes"] == 0, "the spill is over in the books")
    until(lambda: leased_slabs(coordinator) == 0, "the books have everything back")
    assert producer.quarantined_bytes == 0
    assert not coordinator.get("consumers")["consumers"]


def view_of(coordinator: CoordinatorProcess) -> dict[str, Any]:
    view: dict[str, Any] = coordinator.get("consumers/consumer")
    return view


def test_who_may_not_borrow_asks_for_nothing_and_who_may_again_does(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator, wanted_bytes=2 * SLAB) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        aqua.may_borrow = False
        await_location(pairs, Location.HOST)
        until(lambda: leased_slabs(coordinator) == 0, "the books have everything back")
        until(lambda: view_of(coordinator)["spilled_bytes"] == COUNT * SLAB, "it has reported")
        assert view_of(coordinator)["wanted_bytes"] == 0
        assert not aqua.is_borrowing
        aqua.may_borrow = True
        await_location(pairs, Location.PEER)
        require_intact(pairs)
        assert producer.leased_bytes == COUNT * SLAB


def test_peer_memory_wished_for_is_held_ahead_of_need(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator, wanted_bytes=3 * SLAB) as aqua:
        until(lambda: aqua.stats().leased_bytes == 3 * SLAB, "three slabs are held")
        (value,) = [torch.arange(100)]
        assert aqua.offload(value).location is Location.PEER


def test_memory_taken_back_returns_when_it_is_offered_again(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        await_location(pairs, Location.HOST)
        require_intact(pairs)
        assert aqua.stats().spilled_bytes == COUNT * SLAB
        producer.offer(COUNT * SLAB)
        await_location(pairs, Location.PEER)
        require_intact(pairs)
        assert aqua.stats().promoted_bytes >= COUNT * SLAB


def test_data_moves_from_one_lender_to_another_without_touching_host_memory(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator, wanted_bytes=2 * COUNT * SLAB) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        with lending(coordinator, "other") as other:
            spare = f" {2 * COUNT} peer slabs"
            until(lambda: spare in repr(aqua), "the other's slabs are spare")
            assert other.leased_bytes == COUNT * SLAB
            peak = aqua.stats().spilled_bytes_peak
            assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
            await_rest(aqua)
            assert {tensor.location for tensor, _ in pairs} == {Location.PEER}
            assert aqua.stats().spilled_bytes_peak == peak
            require_intact(pairs)


def test_what_is_not_used_any_more_goes_back_after_a_while(
    coordinator: CoordinatorProcess, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "SURPLUS_GRACE_S", 0.2)
    with borrowing(coordinator) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        for tensor, _ in pairs[3:]:
            tensor.release()
        until(lambda: aqua.stats().leased_bytes == 3 * SLAB, "five slabs went back")
        require_intact(pairs[:3])
        until(lambda: leased_slabs(coordinator) == 3, "the books know")


def test_a_lease_revoked_by_an_operator_is_drained_and_given_back(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        attachment, *_ = aqua.attachments  # One, or more where the tensors came slowly.
        coordinator.post(f"leases/{attachment.lease_id}/revoke", {"epoch": attachment.epoch})
        until(lambda: attachment not in aqua.attachments, "the attachment has ended")
        require_intact(pairs)
        ended = coordinator.get(f"leases/{attachment.lease_id}")["state"]
        until(
            lambda: (
                coordinator.get(f"leases/{attachment.lease_id}")["state"] == LeaseState.RELEASED
            ),
            f"the lease, {ended} before, is released",
        )


def test_a_coordinator_killed_during_a_reclaim_stops_neither_it_nor_paging(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    with borrowing(coordinator) as aqua:
        pairs = fill(aqua)
        await_location(pairs, Location.PEER)
        with pairs[0][0].pinned(writes=False):
            reclaim = producer.reclaim(COUNT * SLAB)
            until(lambda: reclaim.returned_bytes > 0, "the first slab is back")
            coordinator.kill()
        assert reclaim.wait(HANG_S)
        require_intact(pairs)
        more = fill(aqua, 4)
        require_intact(more)
        until(lambda: aqua.coordinator_error is not None, "the absence is noticed")
        assert isinstance(aqua.coordinator_error, UnavailableError)

        with CoordinatorProcess(coordinator.data_dir, port=coordinator.port) as again:
            producer.offer(COUNT * SLAB)
            until(lambda: aqua.stats().leased_bytes == COUNT * SLAB, "memory is lent again")
            await_rest(aqua)
            require_intact(pairs + more)
            until(lambda: leased_slabs(again) == COUNT, "the books agree")


class Recording(CoordinatorClient):
    """A client that remembers whose memory it was granted.

    Args:
        knows_terms: Whether its coordinator is of a version that knows terms and failures.

    Attributes:
        doomed: A producer that dies when it is granted from, which the books cannot know yet.
    """

    def __init__(self, url: str, *, knows_terms: bool = True) -> None:
        super().__init__(url)
        self.granted: list[str] = []
        self.doomed: LenderProcess | None = None
        self._knows_terms = knows_terms
        self._grant, self._release = self.grant_lease, self.release_lease
        self.grant_lease = self._recorded  # type: ignore[assignment] # see above
        self.release_lease = self._passed_on  # type: ignore[assignment] # as above

    def _recorded(self, request: LeaseRequest, **options: str) -> LeaseGrant:
        if request.transport and not self._knows_terms:
            raise RequestInvalidError("transport: Extra inputs are not permitted")
        grant = self._grant(request, **options)
        self.granted.append(grant.lease.producer_id)
        if grant.lease.producer_id == "doomed" and self.doomed is not None:
            self.doomed.kill()
        return grant

    def _passed_on(self, lease_id: str, epoch: int, failure: AttachFailure | None = None) -> object:
        if failure and not self._knows_terms:
            raise RequestInvalidError("failure: Extra inputs are not permitted")
        return self._release(lease_id, epoch, failure)


@contextlib.contextmanager
def doomed_lender(coordinator: CoordinatorProcess, slab_count: int) -> Iterator[LenderProcess]:
    """A producer that is about to be killed."""
    with (
        socket_dir() as directory,
        LenderProcess(
            directory / "p.sock",
            slab_bytes=SLAB,
            slab_count=slab_count,
            url=coordinator.url,
            producer_id="doomed",
        ) as lender,
    ):
        offered = slab_count * SLAB
        until(
            lambda: (
                (view := coordinator.get("producers/doomed"))["grantable"]
                and view["free_bytes"] == offered
            ),
            "the books have its offer",
        )
        yield lender


def test_a_dead_smallest_producer_is_tried_once_and_not_again(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    link = Recording(coordinator.url)
    until(lambda: bool(books(coordinator)["grantable"]), "the other may be granted from")
    with (
        doomed_lender(coordinator, 3) as link.doomed,
        borrowing(coordinator, link=link, wanted_bytes=3 * SLAB) as aqua,
    ):
        pairs = fill(aqua, 3)
        await_location(pairs, Location.PEER)
        require_intact(pairs)
    # More than once only if this took 10 s, and then 20: so long it is avoided.
    assert 1 <= link.granted.count("doomed") < 4
    assert producer.quarantined_bytes == 0


def test_a_coordinator_of_the_version_before_is_asked_without_terms(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    link = Recording(coordinator.url, knows_terms=False)
    with borrowing(coordinator, link=link) as aqua:
        pairs = fill(aqua, 3)
        await_location(pairs, Location.PEER)
        require_intact(pairs)
        with doomed_lender(coordinator, 1) as link.doomed:
            pairs += fill(aqua, 1)
            until(lambda: "doomed" in link.granted, "the doomed one was tried")
            until(
                lambda: (
                    not any(
                        lease["state"] == LeaseState.GRANTED
                        for lease in coordinator.get("leases?producer_id=doomed")["leases"]
                    )
                ),
                "its lease was released",
            )
            require_intact(pairs)


def test_a_producer_of_another_slab_size_is_not_asked(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    link = Recording(coordinator.url)
    with (
        lending(coordinator, "coarse", slab_bytes=2 * SLAB, slab_count=1),
        borrowing(coordinator, link=link) as aqua,
    ):
        until(lambda: bool(books(coordinator, "coarse")["grantable"]), "both may be granted from")
        pairs = fill(aqua, 2)
        await_location(pairs, Location.PEER)
        assert set(link.granted) == {"producer"}


def test_two_consumers_share_a_producer_and_neither_sees_the_others_bytes(
    coordinator: CoordinatorProcess, producer: Producer
) -> None:
    link = patient_client(coordinator.url)
    identity = Identity(node="node", domain="domain", gpu_uuid="GPU-2")
    with (
        borrowing(coordinator, wanted_bytes=4 * SLAB) as one,
        Aqua(
            "another",
            transport=select(TransportKind.MEMFD),
            link=link,
            identity=identity,
            host_bytes=16 * SLAB,
            wanted_bytes=4 * SLAB,
            slab_bytes=SLAB,
            heartbeat_s=HEARTBEAT_S,
        ) as other,
    ):
        until(
            lambda: one.stats().leased_bytes == other.stats().leased_bytes == 4 * SLAB,
            "both have half",
        )
        pairs, others = fill(one, 4), fill(other, 4)
        require_intact(pairs)
        require_intact(others)
        assert leased_slabs(coordinator) == COUNT


def test_without_any_coordinator_everything_lives_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AQUA_COORDINATOR_URL", "http://127.0.0.1:9")
    with (
        caplog.at_level(logging.WARNING, "aqualib"),
        aqualib.connect("lonely", slab_bytes=SLAB, host_bytes=COUNT * SLAB) as aqua,
    ):
        until(lambda: aqua.coordinator_error is not None, "the absence is noticed")
        pairs = fill(aqua, 4)
        require_intact(pairs)
        assert {tensor.location for tensor, _ in pairs} == {Location.HOST}
        assert aqualib.step() is None
        with pytest.raises(aqualib.CapacityError, match="used up"):
            fill(aqua, COUNT)
    assert caplog.text.count("cannot report") == 1


def test_a_wrong_token_is_said_once_and_costs_only_peer_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with data_dir() as path:
        tokens = path / "tokens.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "aqua_coordinator", "token"),
                *("--file", tokens, "--role", "consumer"),
            ],
            check=True,
            capture_output=True,
        )
        with (
            CoordinatorProcess(path, AQUA_TOKENS_FILE=str(tokens)) as coordinator,
            consuming(
                link=patient_client(coordinator.url, "aqua_0_wrong"), heartbeat_s=HEARTBEAT_S
            ) as aqua,
        ):
            until(lambda: aqua.coordinator_error is not None, "the refusal is noticed")
            assert isinstance(aqua.coordinator_error, UnauthenticatedError)
            require_intact(fill(aqua, 2))
    assert caplog.text.count("cannot report") == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AQUA_SLAB_BYTES", "64 parsecs", "AQUA_SLAB_BYTES"),
        ("AQUA_HOST_BYTES", "-1", "AQUA_HOST_BYTES"),
        ("AQUA_TRANSPORT", "carrier-pigeon", "AQUA_TRANSPORT"),
        ("AQUA_COORDINATOR_URL", "nowhere", "not a coordinator's address"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        aqualib.connect("misconfigured")
