"""Floods on real sockets: whom they hurt, and for how long."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest
from pydantic import BaseModel

from aqua_cli.http_limits import MAX_CHUNKS, MAX_FIELDS, MAX_PIPELINED
from aqua_coordinator.access.tokens import Role, create_token, revoke_token
from aqua_coordinator.http.token_queue import IN_WORK_BYTES
from aqua_protocol import LeaseState
from aqua_protocol.leases import LeaseGrant, LeaseView
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.members_on_paper import PaperConsumer, PaperProducer

FLOOD: Final = 256
PLACES: Final = 64
"""Requests served at once; the flood is four times as large."""
JSON_HEAD: Final = "Content-Type: application/json\r\nContent-Length: 4000\r\n"
STALLED_WITHOUT_TOKEN: Final = (
    f"POST /healthz HTTP/1.1\r\nHost: x\r\n{JSON_HEAD}\r\n{{",
    f"PUT /nowhere HTTP/1.1\r\nHost: x\r\n{JSON_HEAD}\r\n",
    f"POST /v1/leases HTTP/1.1\r\nHost: x\r\n{JSON_HEAD}\r\n{{",
    f"POST /v1/heartbeats HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n{JSON_HEAD}\r\n",
    "PUT /v1/producers/p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n",
    f"POST /v1/leases HTTP/1.1\r\nAuthorization: Bearer aqua_000000000000_x\r\n{JSON_HEAD}\r\n{{",
    "POST /v1/lea",
    "",
)


class Cluster:
    """A coordinator that wants tokens, and a member of both kinds."""

    def __init__(self, process: CoordinatorProcess, tokens: Path) -> None:
        self.process = process
        self.tokens = tokens
        self.member = self.token(Role.PRODUCER, Role.CONSUMER, member=None)
        self.producer, self.consumer = PaperProducer(), PaperConsumer()

    def token(
        self, *roles: Role, member: str | None = None, expires_in_s: float | None = None
    ) -> str:
        """A fresh token that the coordinator knows already."""
        token, _ = create_token(
            self.tokens, roles=list(roles), member=member, expires_in_s=expires_in_s
        )
        self.until_status(token, 200)
        return token

    def until_status(self, token: str, status: int) -> None:
        """Wait until a token is answered so."""
        until(
            lambda: self.call("GET", "leases", token=token).status_code == status, f"it is {status}"
        )

    def call(
        self, method: str, path: str, body: BaseModel | None = None, *, token: str | None = None
    ) -> httpx.Response:
        """One request over a connection of its own, by the member unless told otherwise."""
        headers = {
            "Authorization": f"Bearer {token or self.member}",
            "Content-Type": "application/json",
            "Idempotency-Key": f"key-{next(_keys)}",
        }
        content = None if body is None else body.model_dump_json()
        url = f"{self.process.url}/v1/{path}"
        return httpx.request(
            method, url, content=content, headers=headers, trust_env=False, timeout=HANG_S
        )

    def report(self) -> None:
        """Both members report, and are heard."""
        for kind, name, report in (
            ("producers", self.producer.name, self.producer.report()),
            ("consumers", self.consumer.name, self.consumer.report()),
        ):
            answer = self.call("PUT", f"{kind}/{name}", report).raise_for_status()
            if kind == "producers":
                self.producer.books_id = answer.json()["books_id"]

    def lease(self) -> LeaseView:
        """A fresh lease that its consumer does not use yet."""
        answer = self.call("POST", "leases", self.consumer.request()).raise_for_status()
        return LeaseGrant.model_validate_json(answer.content).lease

    def attached(self) -> LeaseView:
        """A lease that its producer has reported handed out, before its window was over."""
        give_up_s = time.monotonic() + HANG_S
        while True:
            lease = self.lease()
            self.producer.hand_out(lease)
            self.report()
            if self.view(lease).state is LeaseState.ACTIVE:
                return lease
            del self.producer.held[lease.lease_id]
            assert time.monotonic() < give_up_s, f"nobody comes to attach {lease}"

    def view(self, lease: LeaseView) -> LeaseView:
        """A lease as the books have it now."""
        answer = self.call("GET", f"leases/{lease.lease_id}").raise_for_status()
        return LeaseView.model_validate_json(answer.content)

    def samples(self, name: str) -> dict[str, float]:
        """A metric by its one label; waits until it may be read."""
        give_up_s = time.monotonic() + HANG_S
        url = f"{self.process.url}/metrics"
        while (answer := httpx.get(url, trust_env=False, timeout=HANG_S)).is_error:
            assert time.monotonic() < give_up_s, answer.text
        found = re.findall(rf'^{name}{{\w+="(\w+)"}} (.+)$', answer.text, re.MULTILINE)
        return {label: float(value) for label, value in found}

    def stopped_s(self) -> dict[str, float]:
        """How long the clock of the books has stood, by reason."""
        return self.samples("aqua_books_clock_stopped_seconds_total")

    def sweeps(self) -> float:
        """How often the clock has been advanced."""
        return self.samples("aqua_redis_command_duration_seconds_count")["advance_clock"]


_keys = itertools.count()


class Flood:
    """Sockets that have sent something, and send no more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def send(self, head: str) -> socket.socket:
        """One socket more; beyond twice the flood the oldest goes."""
        if len(self.sockets) == 2 * FLOOD:  # Descriptors are few on some machines.
            self.sockets.pop(0).close()
        one = socket.create_connection(("127.0.0.1", self._port), HANG_S)
        self.sockets.append(one)
        one.sendall(head.encode())
        return one

    def begin(self, request: str, count: int) -> None:
        """Send so many, each as far as it is taken."""
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", self._port), HANG_S)
            self.sockets.append(one)
            one.setblocking(False)
            one.send(request.encode())

    def end(self) -> None:
        """Close them all."""
        while self.sockets:
            self.sockets.pop().close()

    def first_answer(self) -> bytes:
        """Wait until one of them is told something."""
        (one, *_), _, _ = select.select(self.sockets, [], [], HANG_S)
        answer: bytes = one.recv(65_536)
        return answer


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def ends(one: socket.socket) -> bytes:
    """Wait until the other side closes; gives what it said before."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := one.recv(65_536):
            said += part
    return said


@contextlib.contextmanager
def running_cluster(tmp_path: Path, **extra: str) -> Iterator[Cluster]:
    """A cluster that has few places, so that a small flood takes them all."""
    tokens = tmp_path / "tokens.json"
    create_token(tokens, roles=[Role.READER])
    environment: dict[str, Any] = {
        "AQUA_TOKENS_FILE": str(tokens),
        "AQUA_MAX_CONCURRENT_REQUESTS": str(PLACES),
        "AQUA_SILENT_MEMBER_S": "3600",
    } | extra
    with data_dir() as directory, CoordinatorProcess(directory, **environment) as process:
        yield Cluster(process, tokens)


def test_a_flood_without_tokens_neither_ends_the_lease_of_a_member_nor_stops_the_clock(
    tmp_path: Path,
) -> None:
    with (
        running_cluster(tmp_path, AQUA_ATTACH_WINDOW_S="2") as cluster,
        Flood(cluster.process.port) as flood,
    ):
        for _ in range(2):
            cluster.report()
        renewed, left = cluster.attached(), cluster.attached()
        cluster.consumer.use(renewed)
        dropped = cluster.lease()
        give_up_s = time.monotonic() + HANG_S
        heads = itertools.cycle(STALLED_WITHOUT_TOKEN)
        # A grant without an attachment expires: the clock goes on although the flood does.
        while (last := cluster.view(dropped)).state is LeaseState.GRANTED:
            for _ in range(FLOOD):
                flood.send(next(heads))
            cluster.report()
            assert time.monotonic() < give_up_s, f"the clock stands still at {last}"
        assert cluster.lease().bytes
        assert cluster.view(renewed).state is LeaseState.ACTIVE
        assert cluster.view(renewed).expires_in_s > cluster.view(left).expires_in_s
        assert len(flood.sockets) >= FLOOD > PLACES
        flood.end()
        stopped_s = cluster.stopped_s()
        assert (stopped_s["refusal"], stopped_s["silence"]) == (0, 0)


@pytest.mark.parametrize("path", ["consumers/{}", "leases"])
def test_stalled_requests_of_one_token_stand_in_the_way_of_no_other(
    tmp_path: Path, path: str
) -> None:
    with (
        running_cluster(tmp_path, AQUA_MAX_REQUESTS_PER_TOKEN="32") as cluster,
        Flood(cluster.process.port) as flood,
    ):
        for _ in range(2):
            cluster.report()
        token = cluster.token(Role.CONSUMER, member="greedy")
        method = "POST" if path == "leases" else "PUT"
        for number in range(FLOOD):
            flood.send(
                f"{method} /v1/{path.format(number)} HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {token}\r\n{JSON_HEAD}\r\n{{"
            )
        assert b" 503 " in flood.first_answer(), "the token has more than its share"
        cluster.report()
        assert cluster.lease().bytes


def test_large_bodies_of_one_token_wait_for_each_other_unread_and_for_no_other(
    tmp_path: Path,
) -> None:
    with (
        running_cluster(tmp_path, AQUA_MAX_REQUESTS_PER_TOKEN=str(2 * FLOOD)) as cluster,
        Flood(cluster.process.port) as flood,
    ):
        for _ in range(2):
            cluster.report()
        token = cluster.token(Role.PRODUCER, Role.CONSUMER, member="greedy")
        before = resident_bytes(cluster.process.process.pid)
        large = (
            "PUT /v1/producers/greedy HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {IN_WORK_BYTES}\r\n\r\n" + "{" + " " * (IN_WORK_BYTES // 2)
        )
        flood.begin(large, FLOOD)
        cluster.report()
        assert cluster.lease().bytes
        # A small one of the same token does not wait, nor does a large one of another.
        name = PaperConsumer(name="greedy")
        cluster.call("PUT", "consumers/greedy", name.report(), token=token).raise_for_status()
        padded = cluster.consumer.report().model_dump_json() + " " * (IN_WORK_BYTES // 2)
        other = flood.send(
            "PUT /v1/consumers/consumer HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {cluster.member}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(padded)}\r\n\r\n{padded}"
        )
        assert b" 200 " in other.recv(65_536)
        grown = resident_bytes(cluster.process.process.pid) - before
        assert grown < FLOOD * IN_WORK_BYTES // 4, "all of them have been read"


def test_one_token_leaves_event_streams_to_others(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, AQUA_MAX_EVENT_STREAMS="8") as cluster,
        Flood(cluster.process.port) as flood,
    ):
        greedy, other = cluster.token(Role.CONSUMER, member="greedy"), cluster.token(Role.READER)

        def begin(token: str) -> bytes:
            stream = flood.send(
                f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
            )
            return stream.recv(65_536).split(b"\r\n")[0]

        statuses = [begin(greedy).split()[1] for _ in range(8)]
        assert statuses == [b"200"] * 2 + [b"503"] * 6
        assert b" 200 " in begin(other)
        flood.end()
        until(lambda: b" 200 " in begin(greedy), "its streams have ended")


def test_a_report_finds_room_beside_whatever_else_is_being_served(tmp_path: Path) -> None:
    with (
        running_cluster(
            tmp_path, AQUA_MAX_CONCURRENT_REQUESTS="8", AQUA_STORE_TIMEOUT_S="60"
        ) as cluster,
        Flood(cluster.process.port) as flood,
    ):
        cluster.report()
        (store,) = cluster.process.children()
        head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {cluster.member}\r\n"
        os.kill(store, signal.SIGSTOP)
        try:
            for _ in range(9):
                flood.send(f"GET /v1/leases {head}\r\n")
            assert b" 503 " in flood.first_answer()
            body = cluster.consumer.report().model_dump_json()
            report = flood.send(
                f"PUT /v1/consumers/consumer {head}Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}"
            )
            # What came later is answered: the report has been refused by now, or has its place.
            for _ in range(2):
                httpx.get(f"{cluster.process.url}/healthz", trust_env=False, timeout=HANG_S)
        finally:
            os.kill(store, signal.SIGCONT)
        assert b" 200 " in report.recv(65_536)


@pytest.mark.parametrize(("own", "stops"), [("100", True), ("4", False)])
def test_the_clock_stops_for_refused_reports_unless_their_token_has_had_its_share(
    tmp_path: Path, own: str, *, stops: bool
) -> None:
    with (
        running_cluster(
            tmp_path,
            AQUA_MAX_CONCURRENT_REQUESTS="8",
            AQUA_MAX_REQUESTS_PER_TOKEN=own,
            AQUA_STORE_TIMEOUT_S="60",
        ) as cluster,
        Flood(cluster.process.port) as flood,
    ):
        cluster.report()
        (store,) = cluster.process.children()
        body = cluster.consumer.report().model_dump_json()
        os.kill(store, signal.SIGSTOP)
        try:
            for _ in range(9):
                flood.send(
                    "PUT /v1/consumers/consumer HTTP/1.1\r\nHost: x\r\n"
                    f"Authorization: Bearer {cluster.member}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                )
            assert b" 503 " in flood.first_answer()
        finally:
            os.kill(store, signal.SIGCONT)
        before = cluster.sweeps()
        while cluster.sweeps() < before + 3:
            pass
        assert (cluster.stopped_s()["refusal"] > 0) is stops


def test_what_stalls_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, AQUA_TRANSFER_TIMEOUT_S="0.5") as cluster,
        Flood(cluster.process.port) as flood,
    ):
        good = f"Authorization: Bearer {cluster.member}\r\n{JSON_HEAD}"
        for head in STALLED_WITHOUT_TOKEN:
            flood.send(head)
        second = flood.send("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in second.recv(65_536)
        second.sendall(b"POST /v1/lea")
        for method, path in (("PUT", "producers/p"), ("POST", "leases"), ("POST", "reclaims")):
            flood.send(f"{method} /v1/{path} HTTP/1.1\r\nHost: x\r\n{good}\r\n{{")
        said = [ends(one) for one in flood.sockets]
        assert said[0].startswith(b"HTTP/1.1 4")
        assert b" 401 " in said[2]
        assert set(said[-3:]) == {b""}
        cluster.report()


@pytest.mark.parametrize("of", ["fields", "trailers", "chunks", "requests"])
def test_much_work_of_few_bytes_ends_its_connection(tmp_path: Path, of: str) -> None:
    """Parsed in one turn of the loop, it would keep all others waiting."""
    with running_cluster(tmp_path) as cluster, Flood(cluster.process.port) as flood:
        head = (
            f"PUT /v1/producers/p HTTP/1.1\r\nAuthorization: Bearer {cluster.member}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        )

        def request(count: int) -> str:
            if of == "requests":
                return "GET /healthz HTTP/1.1\r\n\r\n" * count
            many = count * {"fields": "a:\r\n", "trailers": "b:\r\n", "chunks": "1\r\n \r\n"}[of]
            parts = {"fields": "", "trailers": "", "chunks": "2\r\n{}\r\n"} | {of: many}
            return f"{head}{parts['fields']}\r\n{parts['chunks']}0\r\n{parts['trailers']}\r\n"

        most = {"chunks": MAX_CHUNKS, "requests": MAX_PIPELINED}.get(of, MAX_FIELDS)
        assert b" 400 " not in flood.send(request(most // 2)).recv(65_536)
        said = b""
        with contextlib.suppress(ConnectionError):
            flood.send(request(100 * most))
        with contextlib.suppress(ConnectionError):
            while part := flood.sockets[-1].recv(65_536):
                said += part
                assert b" 422 " not in said
                assert said.count(b" 200 ") <= most


def test_an_answer_that_its_reader_does_not_take_is_given_up(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, AQUA_TRANSFER_TIMEOUT_S="0.5") as cluster,
        Flood(cluster.process.port) as flood,
    ):
        with contextlib.suppress(ConnectionError):
            flood.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * MAX_PIPELINED)
        closed = 'aqua_coordinator_connections_closed_total{reason="unread"}'
        url = f"{cluster.process.url}/metrics"
        until(lambda: closed in httpx.get(url, trust_env=False, timeout=HANG_S).text, closed)


def test_an_event_stream_ends_with_its_token(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        revoked = cluster.token(Role.READER)
        other = cluster.token(Role.READER)
        with contextlib.ExitStack() as stack:

            def begin(token: str) -> Iterator[str] | None:
                answer = stack.enter_context(
                    httpx.stream(
                        "GET",
                        f"{cluster.process.url}/v1/events",
                        headers={"Authorization": f"Bearer {token}"},
                        trust_env=False,
                        timeout=HANG_S,
                    )
                )
                return answer.iter_lines() if answer.is_success else None

            # A token may end before the machine comes to its first use.
            for expires_in_s in (2, 6, 18, 54):
                expiring = cluster.token(Role.READER, expires_in_s=expires_in_s)
                if (until_expired := begin(expiring)) is not None:
                    break
            streams = (begin(revoked), until_expired, begin(other))
            lines = [stream for stream in streams if stream is not None]
            assert len(lines) == len(streams)
            for stream in lines:
                assert next(stream).startswith("retry:")
            revoke_token(cluster.tokens, revoked.split("_")[1])
            for stream in lines[:2]:
                # Comments that keep the connection alive, and no event: nothing has happened.
                assert not [line for line in stream if line and not line.startswith(":")]
            cluster.report()
            assert any(line.startswith("event:") for line in lines[2])
        cluster.until_status(revoked, 401)
        cluster.until_status(expiring, 401)
