"""TLS between members and coordinator: who gets in, and certificates renewed while requests run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import ge, gt
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

from aqua_client import AsyncCoordinatorClient, CoordinatorClient, RetryRule
from aqua_client.tls import TlsFiles
from aqua_coordinator.http.connections import MAX_STRANGERS
from aqua_protocol import ConfigError, UnavailableError
from aqua_protocol.errors import UnauthenticatedError
from aqualib.settings import load_settings
from harness.bounds import HANG_S, until
from harness.certificates import Authority, files_in, replace
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.members_on_paper import PaperProducer

ONCE: Final = RetryRule(max_attempts=1)
RENEWALS: Final = 10
CLIENTS: Final = 4


@dataclass(frozen=True)
class Secured:
    """A coordinator that wants client certificates, and what it was given."""

    process: CoordinatorProcess
    authority: Authority
    server: Path
    """Its files, with the names of cert-manager's secrets."""

    @property
    def url(self) -> str:
        """Where it is."""
        return self.process.url

    def client(self, tls: TlsFiles) -> CoordinatorClient:
        """A client that repeats nothing, so that every failure shows."""
        return CoordinatorClient(self.url, tls=tls, retry=ONCE, timeout_s=HANG_S)

    def serial(self, tls: TlsFiles) -> object:
        """The certificate that a new connection is shown."""
        raw = socket.create_connection(("127.0.0.1", self.process.port), HANG_S)
        with tls.context().wrap_socket(raw, server_hostname="localhost") as secured:
            certificate = secured.getpeercert()
        assert certificate
        return certificate["serialNumber"]


@contextlib.contextmanager
def secured(directory: Path, server: Path, *, timeout_s: float = 10) -> Iterator[Secured]:
    """A coordinator with files in `server`, which may be a link."""
    authority = Authority(directory)
    authority.issue(server)
    with (
        data_dir() as books,
        CoordinatorProcess(
            books,
            AQUA_TLS_CERT=str(server / "tls.crt"),
            AQUA_TLS_KEY=str(server / "tls.key"),
            AQUA_TLS_CLIENT_CA=str(server / "ca.crt"),
            AQUA_TRANSFER_TIMEOUT_S=str(timeout_s),
        ) as process,
    ):
        yield Secured(process, authority, server)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """One for all tests that leave its files alone."""
    directory = tmp_path_factory.mktemp("tls")
    with secured(directory, directory / "server") as running:
        yield running


@pytest.fixture
def member(coordinator: Secured, tmp_path: Path) -> TlsFiles:
    """The files of a member."""
    return coordinator.authority.issue(tmp_path / "member")


async def test_both_clients_show_their_certificate_and_are_served(
    coordinator: Secured, member: TlsFiles
) -> None:
    assert coordinator.url.startswith("https://")
    with coordinator.client(member) as client:
        assert list(client.list_producers()) == []
    async with AsyncCoordinatorClient(coordinator.url, tls=member) as waiting:
        assert [entry async for entry in waiting.list_producers()] == []


def test_members_commands_and_doctor_find_their_files_in_the_environment(
    coordinator: Secured, member: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "member"
    variables = {
        "AQUA_COORDINATOR_URL": coordinator.url,
        "AQUA_TLS_CA": str(files / "ca.crt"),
        "AQUA_TLS_CLIENT_CERT": str(files / "tls.crt"),
        "AQUA_TLS_CLIENT_KEY": str(files / "tls.key"),
    }
    assert str(member) == ", ".join(list(variables.values())[1:])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with load_settings().coordinator_client() as client:
        assert list(client.list_consumers()) == []
    status = [sys.executable, "-m", "aqua_coordinator", "status", "--json"]
    shown = subprocess.run(status, env=os.environ | variables, check=True, capture_output=True)
    assert json.loads(shown.stdout)["producers"] == []


def test_without_a_certificate_only_probes_are_answered(coordinator: Secured) -> None:
    trusting = TlsFiles(coordinator.authority.file)
    with coordinator.client(trusting) as client:
        assert client.healthz().status == "ok"
        assert client.readyz().status == "ready"
        with pytest.raises(UnauthenticatedError, match="client certificate") as caught:
            list(client.list_producers())
        assert "AQUA_TLS_CLIENT_CERT" in caught.value.remedy
    with httpx.Client(verify=trusting.context(), trust_env=False, timeout=HANG_S) as http:
        for path in ("/metrics", "/docs", "/openapi.json", "/v1/events", "/nowhere"):
            assert http.get(coordinator.url + path).status_code == 401


def test_a_certificate_of_another_authority_or_of_yesterday_is_refused_with_the_next_step(
    coordinator: Secured, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other").issue(tmp_path / "other")
    replace(tmp_path / "other" / "ca.crt", coordinator.authority.pem)
    expired = coordinator.authority.issue(tmp_path / "expired", good_for_s=-60)
    for files in (other, expired):
        with coordinator.client(files) as client:
            with pytest.raises(UnavailableError) as caught:
                client.healthz()
            assert "AQUA_TLS_CLIENT_CERT" in caught.value.remedy, caught.value


def test_a_coordinator_that_is_not_trusted_is_not_spoken_to(
    coordinator: Secured, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    with coordinator.client(TlsFiles(stranger.file)) as client:
        with pytest.raises(UnavailableError) as caught:
            client.healthz()
        assert "AQUA_TLS_CA" in caught.value.remedy, caught.value


def test_http_and_https_are_told_apart(coordinator: Secured, member: TlsFiles) -> None:
    plain = CoordinatorClient(coordinator.url.replace("https", "http"), retry=ONCE)
    with plain, pytest.raises(UnavailableError) as caught:
        plain.healthz()
    assert "https" in caught.value.remedy
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=_answer_in_plain_text, args=(listener,))
        answering.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with (
            CoordinatorClient(url, tls=member, retry=ONCE) as client,
            pytest.raises(UnavailableError) as caught,
        ):
            client.healthz()
        answering.join(HANG_S)
    assert "http://" in caught.value.remedy


def _answer_in_plain_text(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("broken", ["missing", "junk", "mismatch"])
def test_files_that_are_no_good_are_told_at_the_start(tmp_path: Path, broken: str) -> None:
    authority = Authority(tmp_path)
    authority.issue(tmp_path / "server")
    key = tmp_path / "server" / "tls.key"
    if broken == "missing":
        key.unlink()
    elif broken == "junk":
        key.write_text("junk")
    else:
        authority.issue(tmp_path / "other")
        key = tmp_path / "other" / "tls.key"
    certificate = str(tmp_path / "server" / "tls.crt")
    with data_dir() as books, pytest.raises(TimeoutError, match="AQUA_TLS_") as caught:
        CoordinatorProcess(books, AQUA_TLS_CERT=certificate, AQUA_TLS_KEY=str(key))
    assert "Traceback" not in str(caught.value)
    with pytest.raises(ConfigError, match="TLS files"):
        CoordinatorClient("https://localhost", tls=TlsFiles(cert=key))


class Counted(TlsFiles):
    """A client's files, and how many handshakes have begun with them, one at a time."""

    handshakes = 0
    is_under_way = False

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:  # noqa: ANN401 - ssl's
        self.is_under_way = True
        self.handshakes += 1
        try:
            return super().wrap_socket(*arguments, **options)
        finally:
            self.is_under_way = False


class Load:
    """Clients that ask without a break; each failure is kept."""

    def __init__(self, coordinator: Secured, directories: list[Path]) -> None:
        self._stop = threading.Event()
        self._files = [
            Counted(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")
            for directory in directories
        ]
        self.answered = [0] * len(directories)
        self.failed: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(coordinator, number))
            for number in range(len(directories))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_S)

    @contextlib.contextmanager
    def reconnecting(self) -> Iterator[None]:
        """Change the server's files within; after it each client has taken files as they were then.

        A connection from before ends within a second or so, so answers alone do not tell.
        """
        handshakes = until(self._handshakes_ended, "a handshake takes for ever")
        yield
        until(
            lambda: (
                all(map(gt, [files.handshakes for files in self._files], handshakes))
                or bool(self.failed)
            ),
            "a connection from before goes on",
        )
        enough = [count + 10 for count in self.answered]
        until(
            lambda: all(map(ge, self.answered, enough)) or bool(self.failed), "requests stand still"
        )

    def _handshakes_ended(self) -> list[int]:
        """How many each client has begun; nothing while one of them may meet the files from before.

        The counts come first: none of these is under way then.
        """
        counts = [files.handshakes for files in self._files]
        return [] if any(files.is_under_way for files in self._files) else counts

    def _ask(self, coordinator: Secured, number: int) -> None:
        with coordinator.client(self._files[number]) as client:
            while not self._stop.is_set():
                try:
                    list(client.list_producers())
                except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                    self.failed.append(error)
                    return
                self.answered[number] += 1


def _differs(coordinator: Secured, files: TlsFiles, serial: object) -> bool:
    return coordinator.serial(files) != serial


def test_certificates_are_renewed_while_requests_run_and_none_fails(tmp_path: Path) -> None:
    with secured(tmp_path, tmp_path / "server") as coordinator:
        members = [tmp_path / f"member-{number}" for number in range(CLIENTS)]
        watcher = coordinator.authority.issue(tmp_path / "watcher")
        for directory in members:
            coordinator.authority.issue(directory)
        with Load(coordinator, members) as load:
            for _ in range(RENEWALS):
                before = coordinator.serial(watcher)
                for directory in members:
                    coordinator.authority.issue(directory)
                with load.reconnecting():
                    coordinator.authority.issue(coordinator.server)
                until(partial(_differs, coordinator, watcher, before), "the old one is shown")
        assert load.failed == []
        assert min(load.answered) >= 10 * RENEWALS


def test_an_authority_is_replaced_in_three_steps_and_the_old_one_is_out(tmp_path: Path) -> None:
    with secured(tmp_path, tmp_path / "server") as coordinator:
        old, fresh = coordinator.authority, Authority(tmp_path, "fresh")
        members = [tmp_path / f"member-{number}" for number in range(CLIENTS)]
        left_behind = old.issue(tmp_path / "left-behind")
        for directory in members:
            old.issue(directory)
        with Load(coordinator, members) as load, coordinator.client(left_behind) as late:
            late.healthz()
            # Both are trusted everywhere, then everybody shows the new one, then the old one goes.
            both = old.pem + fresh.pem
            for directory in members:
                replace(directory / "ca.crt", both)
            with load.reconnecting():
                replace(coordinator.server / "ca.crt", both)
            for directory in members:
                fresh.issue(directory, trusted=both)
            with load.reconnecting():
                fresh.issue(coordinator.server, trusted=both)
            trusting = TlsFiles(fresh.file)
            with load.reconnecting():
                replace(coordinator.server / "ca.crt", fresh.pem)
            assert coordinator.serial(trusting)
            replace(tmp_path / "left-behind" / "ca.crt", fresh.pem)
            # The connection that it has ends with an answer, and there is no other.
            with pytest.raises(UnavailableError, match=r"(?i)unknown.ca"):
                until(lambda: late.healthz().status != "ok", "an old authority is still trusted")
        assert load.failed == []


def test_files_that_do_not_fit_together_leave_the_old_ones_in_use(tmp_path: Path) -> None:
    with secured(tmp_path, tmp_path / "server") as coordinator:
        member = coordinator.authority.issue(tmp_path / "member")
        before = coordinator.serial(member)
        (coordinator.server / "tls.key").write_text("junk")
        assert coordinator.serial(member) == before
        (coordinator.server / "tls.crt").unlink()
        assert coordinator.serial(member) == before
        coordinator.authority.issue(coordinator.server)
        assert coordinator.serial(member) != before


def test_a_secret_of_kubernetes_is_followed_through_its_links(tmp_path: Path) -> None:
    """The directory holds links through `..data`, which is switched from one to the next."""
    mount = tmp_path / "mount"
    for generation in ("..one", "..two"):
        (mount / generation).mkdir(parents=True)
    data = mount / "..data"
    data.symlink_to("..one")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    authority = Authority(tmp_path)
    authority.issue(mount / "..one")
    authority.issue(mount / "..two")
    follower = files_in(mount)
    before = follower.context()
    assert follower.context() is before
    fresh = mount / "..data_tmp"
    fresh.symlink_to("..two")
    fresh.replace(data)
    assert follower.context() is not before


def connected_for_seconds(coordinator: Secured, directory: Path) -> httpx.Client:
    """A client that is connected by a certificate of which seconds are left."""
    for good_for_s in (3, 9, 27, 81):  # It may end before the machine comes to its first use.
        brief = coordinator.authority.issue(directory / f"{good_for_s}", good_for_s=good_for_s)
        http = httpx.Client(verify=brief.context(), trust_env=False, timeout=HANG_S)
        try:
            http.get(f"{coordinator.url}/v1/producers").raise_for_status()
        except httpx.HTTPError:
            http.close()
        else:
            return http
    raise AssertionError("no certificate lasts until it is used")


def test_a_connection_does_not_outlive_its_certificate(
    coordinator: Secured, tmp_path: Path
) -> None:
    with contextlib.closing(connected_for_seconds(coordinator, tmp_path)) as http:

        def closes() -> bool:
            answer = http.get(f"{coordinator.url}/v1/producers").raise_for_status()
            return bool(answer.headers.get("connection") == "close")

        def is_refused() -> bool:
            """Not at once: OpenSSL reads a clock that may be some milliseconds behind."""
            try:
                assert closes(), "a connection has outlived its certificate"
            except httpx.HTTPError as error:
                return "expired" in str(error).lower()
            return False

        until(closes, "an expired certificate is still good")
        until(is_refused, "an expired certificate is let in")


def test_an_event_stream_does_not_outlive_its_certificate(
    coordinator: Secured, member: TlsFiles, tmp_path: Path
) -> None:
    with (
        contextlib.closing(connected_for_seconds(coordinator, tmp_path)) as http,
        http.stream("GET", f"{coordinator.url}/v1/events") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("retry:")

        def is_refused() -> bool:
            try:
                return bool(http.get(f"{coordinator.url}/healthz").is_error)
            except httpx.HTTPError:
                return True

        until(is_refused, "an expired certificate is still good")
        with coordinator.client(member) as operator:
            operator.report_producer(PaperProducer().report())
        for line in lines:
            assert not line.startswith("event:")


def test_an_event_stream_does_not_outlive_its_authority(tmp_path: Path) -> None:
    with secured(tmp_path, tmp_path / "server") as coordinator:
        old, fresh = coordinator.authority, Authority(tmp_path, "fresh")
        late, member = old.issue(tmp_path / "late"), fresh.issue(tmp_path / "member")
        with (
            httpx.Client(verify=late.context(), trust_env=False, timeout=HANG_S) as http,
            http.stream("GET", f"{coordinator.url}/v1/events") as stream,
        ):
            lines = stream.iter_lines()
            assert next(lines).startswith("retry:")
            fresh.issue(coordinator.server)
            until(partial(_is_served, coordinator, member), "the new authority is not taken")
            with coordinator.client(member) as operator:
                operator.report_producer(PaperProducer().report())
            for line in lines:
                assert not line.startswith("event:")


def _is_served(coordinator: Secured, member: TlsFiles) -> bool:
    with contextlib.suppress(UnavailableError), coordinator.client(member) as client:
        return client.healthz().status == "ok"
    return False


def test_handshakes_that_stall_are_ended_and_do_not_keep_members_out(tmp_path: Path) -> None:
    with (
        secured(tmp_path, tmp_path / "server", timeout_s=4) as coordinator,
        contextlib.ExitStack() as stack,
    ):
        member = coordinator.authority.issue(tmp_path / "member")
        hello = _client_hello(member)
        stalled = []
        for number in range(MAX_STRANGERS + 8):
            one = socket.create_connection(("127.0.0.1", coordinator.process.port), HANG_S)
            stack.enter_context(one)
            one.sendall((b"", hello[:100], hello)[number % 3])
            stalled.append(one)
        with coordinator.client(member) as client:
            assert list(client.list_producers()) == []
        for one in stalled:
            with contextlib.suppress(ConnectionError):
                while one.recv(65_536):  # What was answered to the hello, and then the end.
                    pass


def _client_hello(files: TlsFiles) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        files.context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def test_large_answers_and_requests_in_pieces_get_through(
    coordinator: Secured, member: TlsFiles
) -> None:
    with httpx.Client(verify=member.context(), trust_env=False, timeout=HANG_S) as http:
        document = http.get(f"{coordinator.url}/openapi.json").raise_for_status()
        assert len(document.content) > 2 << 14
    raw = socket.create_connection(("127.0.0.1", coordinator.process.port), HANG_S)
    with member.context().wrap_socket(raw, server_hostname="localhost") as secured_socket:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n":
            secured_socket.sendall(bytes([byte]))
        said = b""
        while part := secured_socket.recv(65_536):
            said += part
    assert said.startswith(b"HTTP/1.1 200")
