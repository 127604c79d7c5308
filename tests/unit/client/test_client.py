"""Calls to the coordinator over real HTTP: typed errors, bounded retries, one key."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from aqua_client import CoordinatorClient, RetryRule
from aqua_client.tls import TlsFiles
from aqua_protocol import CapacityError, ConfigError, LeaseLostError, UnavailableError
from aqua_protocol.errors import BooksRebuildingError, UnauthenticatedError, VersionMismatchError
from aqua_protocol.leases import LeaseRenewal, LeaseRequest
from aqua_protocol.members import ConsumerReport, ProducerReport
from aqua_protocol.wire import TransportKind
from aqualib.reporter import Identity
from harness.scripted_server import Answer, Request, ScriptedServer

IDENTITY = Identity(node="node", domain="domain", gpu_uuid="GPU-0", incarnation="life")  # type: ignore[arg-type] # a NewType over str
LEASE = {
    "lease_id": "lease-1",
    "epoch": 7,
    "state": "granted",
    "producer_id": "producer",
    "consumer_id": "consumer",
    "bytes": 64,
    "expires_in_s": 30.0,
}
GRANT = {
    "lease": LEASE,
    "token": "secret",
    "endpoint": "/run/aqua/p.sock",
    "transport": "memfd",
    "slab_bytes": 65536,
}
WANTED = LeaseRequest(consumer_id="consumer", bytes=64)


class Pauses:
    """Stands in for `time.sleep`: notes the pauses and does not make them."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


def error(status: int, code: str, **more: object) -> Answer:
    return Answer(status, {"code": code, "message": "told so", "remedy": "do so", **more})


def producer_report() -> ProducerReport:
    return ProducerReport(
        **IDENTITY.stamp(3, None),  # type: ignore[arg-type] # a NewType over int
        producer_id="producer",
        endpoint="/run/aqua/p.sock",
        transport=TransportKind.MEMFD,
        slab_bytes=65536,
        offered_bytes=65536,
    )


def test_a_report_is_put_under_the_members_name_with_the_token() -> None:
    ack = {
        "books_id": "books",
        "heartbeat_s": 1.0,
        "min_epoch": 5,
        "capability_key": "a2V5",
        "grantable": True,
    }
    with ScriptedServer(lambda _: Answer(body=ack)) as server:
        with CoordinatorClient(server.url, "hush") as client:
            assert client.report_producer(producer_report()).min_epoch == 5
        (request,) = server.requests
    assert (request.method, request.path) == ("PUT", "/v1/producers/producer")
    assert request.headers["Authorization"] == "Bearer hush"
    assert ProducerReport.model_validate(request.body) == producer_report()


def test_a_consumers_report_brings_what_is_available() -> None:
    ack = {"books_id": "books", "heartbeat_s": 1.0, "available_bytes": 640}
    report = ConsumerReport(**IDENTITY.stamp(0, None), consumer_id="consumer")  # type: ignore[arg-type] # as above
    with (
        ScriptedServer(lambda _: Answer(body=ack)) as server,
        CoordinatorClient(server.url) as client,
    ):
        assert client.report_consumer(report).available_bytes == 640
        assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(409, "capacity_exhausted"), CapacityError),
        (error(401, "unauthenticated"), UnauthenticatedError),
        (error(426, "version_mismatch"), VersionMismatchError),
        (error(410, "lease_lost"), LeaseLostError),
    ],
    ids=["capacity", "token", "version", "lost"],
)
def test_errors_arrive_as_their_type_and_are_not_repeated(
    answer: Answer, expected: type[Exception]
) -> None:
    pauses = Pauses()
    with ScriptedServer(lambda _: answer) as server:
        with (
            CoordinatorClient(server.url, sleep=pauses) as client,
            pytest.raises(expected, match="told so") as raised,
        ):
            client.grant_lease(WANTED)
        assert len(server.requests) == 1
    assert raised.type is expected
    assert pauses.taken == []


def test_a_lease_is_asked_for_under_one_key_until_it_is_answered() -> None:
    answers = [
        error(503, "store_unavailable"),
        error(503, "service_unavailable"),
        Answer(201, GRANT),
    ]
    pauses = Pauses()
    with ScriptedServer(lambda _: answers.pop(0)) as server:
        with CoordinatorClient(server.url, sleep=pauses) as client:
            assert client.grant_lease(WANTED).lease.epoch == 7
        keys = {request.headers["Idempotency-Key"] for request in server.requests}
        assert len(server.requests) == 3
    assert len(keys) == 1
    assert len(pauses.taken) == 2
    assert all(0 < pause <= RetryRule().max_pause_s for pause in pauses.taken)


def test_two_requests_for_leases_have_two_keys_and_a_given_key_is_used() -> None:
    with ScriptedServer(lambda _: Answer(201, GRANT)) as server:
        with CoordinatorClient(server.url) as client:
            client.grant_lease(WANTED)
            client.grant_lease(WANTED)
            client.grant_lease(WANTED, idempotency_key="mine")
        keys = [request.headers["Idempotency-Key"] for request in server.requests]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


def test_retries_end_and_the_last_error_is_raised() -> None:
    pauses = Pauses()
    with ScriptedServer(lambda _: error(503, "books_rebuilding", retry_after_s=0.7)) as server:
        with (
            CoordinatorClient(server.url, sleep=pauses) as client,
            pytest.raises(BooksRebuildingError),
        ):
            client.release_lease("lease-1", 7)
        assert len(server.requests) == RetryRule().max_attempts
    assert pauses.taken == [0.7, 0.7]


def test_a_report_is_never_repeated_by_the_client() -> None:
    with ScriptedServer(lambda _: error(503, "store_unavailable")) as server:
        with CoordinatorClient(server.url) as client, pytest.raises(UnavailableError):
            client.report_producer(producer_report())
        assert len(server.requests) == 1


def test_renew_and_release_name_the_epoch() -> None:
    with ScriptedServer(lambda _: Answer(body=LEASE)) as server:
        with CoordinatorClient(server.url) as client:
            client.renew_lease("lease-1", LeaseRenewal(epoch=7, ttl_s=12.0))
            client.release_lease("lease-1", 7)
        renewal, release = server.requests
    assert (renewal.path, renewal.body) == ("/v1/leases/lease-1/renew", {"epoch": 7, "ttl_s": 12.0})
    assert (release.path, release.body) == ("/v1/leases/lease-1/release", {"epoch": 7})


def test_leaving_twice_is_harmless() -> None:
    def answer(request: Request) -> Answer:
        assert request.path.endswith("?incarnation=life")
        return error(404, "unknown_resource")

    with ScriptedServer(answer) as server, CoordinatorClient(server.url) as client:
        client.remove_producer("producer", "life")
        client.remove_consumer("consumer", "life")
        assert [r.path.split("?")[0] for r in server.requests] == [
            "/v1/producers/producer",
            "/v1/consumers/consumer",
        ]


def test_nobody_listening_is_unavailable_and_says_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    client = CoordinatorClient(f"http://127.0.0.1:{port}", sleep=Pauses())
    with pytest.raises(UnavailableError, match="no answer") as raised:
        client.grant_lease(WANTED)
    assert "AQUA_COORDINATOR_URL" in raised.value.remedy


def test_a_coordinator_that_hangs_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = CoordinatorClient(
            f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.05, sleep=Pauses()
        )
        with pytest.raises(UnavailableError, match="timed out"):
            client.grant_lease(WANTED)


@pytest.mark.parametrize(
    "answer",
    [Answer(502, b"<html>bad gateway</html>"), Answer(200, b"hello"), Answer(200, {"a": 1})],
    ids=["a proxy", "not JSON", "another schema"],
)
def test_something_that_is_not_a_coordinator_is_told_apart(answer: Answer) -> None:
    with (
        ScriptedServer(lambda _: answer) as server,
        CoordinatorClient(server.url, sleep=Pauses()) as client,
        pytest.raises(UnavailableError, match="not Aqua's"),
    ):
        client.grant_lease(WANTED)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7700",
        "ftp://host",
        "http://",
        "http://host/path",
        "http://host?x=1",
        "http://\x00",
    ],
)
def test_an_address_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError):
        CoordinatorClient(url)


def test_certificates_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.pem") as raised:
        CoordinatorClient("https://host", tls=TlsFiles(tmp_path / "missing.pem"))
    assert "AQUA_TLS_" in raised.value.remedy


def test_proxy_variables_do_not_divert_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with (
        ScriptedServer(lambda _: Answer(body=LEASE)) as server,
        CoordinatorClient(server.url) as client,
    ):
        assert client.release_lease("lease-1", 7).epoch == 7


def test_the_token_is_in_no_representation() -> None:
    assert "hush" not in repr(CoordinatorClient("http://127.0.0.1:1", "hush"))
