"""Much work of few bytes: it ends its connection, and takes neither the loop nor memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from aqua_cli.http_limits import MAX_CHUNKS, MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED
from harness.batch_service import BatchServiceProcess, chat_line
from harness.bounds import HANG_S
from harness.counting_server import CountingServer

BOUNDARY = "multipart/form-data; boundary=X"
FIELD = 'Content-Disposition: form-data; name="{}"\r\n\r\n'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchServiceProcess]:
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path_factory.mktemp("batch"), [engine.url]) as service,
    ):
        yield service


def said_to(service: BatchServiceProcess, sent: str) -> bytes:
    """What the service answers until it is done, or ends the connection."""
    address = urlsplit(service.url)
    said = b""
    with (
        socket.create_connection((address.hostname, address.port), timeout=HANG_S) as peer,
        contextlib.suppress(ConnectionError),
    ):
        peer.sendall(sent.encode())
        while part := peer.recv(65_536):
            said += part
    return said


@pytest.mark.parametrize(
    ("of", "most"),
    [
        ("fields", MAX_FIELDS),
        ("trailers", MAX_FIELDS),
        ("chunks", MAX_CHUNKS),
        ("value", MAX_HEAD_BYTES),
        ("query", MAX_HEAD_BYTES),
        ("extension", MAX_HEAD_BYTES),
    ],
)
def test_a_request_that_is_much_work_does_not_get_through(
    service: BatchServiceProcess, of: str, most: int
) -> None:
    def request(count: int) -> str:
        one = {"fields": "a:\r\n", "trailers": "b:\r\n", "chunks": "1\r\n \r\n"}.get(of, "c")
        parts = dict.fromkeys(("fields", "trailers", "chunks", "value", "query", "extension"), "")
        parts[of] = one * count
        return (
            f"POST /v1/batches?{parts['query']} HTTP/1.1\r\nHost: localhost\r\nX: {parts['value']}"
            f"\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n{parts['fields']}\r\n"
            f"{parts['chunks']}2;x{parts['extension']}\r\n{{}}\r\n0\r\n{parts['trailers']}\r\n"
        )

    assert b"input_file_id" in said_to(service, request(most // 2))
    assert b"input_file_id" not in said_to(service, request(most * 10))


def test_no_more_requests_wait_for_the_answer_to_one_than_there_may_be(
    service: BatchServiceProcess,
) -> None:
    request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = request.replace("Host", "Connection: close\r\nHost")
    said = said_to(service, request * 100 * MAX_PIPELINED + last)
    assert said.count(b" 200 OK") <= MAX_PIPELINED


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["", "GET /healthz HT", "GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(
    service: BatchServiceProcess, sent: str
) -> None:
    assert said_to(service, sent) == b""


def test_a_form_of_many_fields_is_refused_whatever_their_names(
    service: BatchServiceProcess,
) -> None:
    for name in ("", "same"):
        form = f"--X\r\n{FIELD.format(name)}\r\n" * 20 + "--X--\r\n"
        answer = httpx.post(
            f"{service.url}/v1/files", content=form, headers={"Content-Type": BOUNDARY}
        )
        assert answer.status_code == 400
        assert "more than 16 fields" in answer.json()["error"]["message"]


def test_a_file_that_comes_line_by_line_gets_through(service: BatchServiceProcess) -> None:
    lines = [chat_line(f"{i}", "x") for i in range(5 * MAX_CHUNKS)]

    def form() -> Iterator[bytes]:
        yield f"--X\r\n{FIELD.format('purpose')}batch\r\n--X\r\n".encode()
        yield FIELD.format('file"; filename="in.jsonl').encode()
        yield from lines
        yield b"\r\n--X--\r\n"

    answer = httpx.post(
        f"{service.url}/v1/files", content=form(), headers={"Content-Type": BOUNDARY}
    )
    assert answer.json()["bytes"] == sum(map(len, lines))
