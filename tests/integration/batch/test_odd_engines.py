"""Engines that answer what no engine should: batches end, and their outputs are JSON.

Online, the service answers nothing by a mistake of its own.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from harness.batch_service import BatchServiceProcess, chat_line, records, submit, wait_until

FAILED: Final = {
    "nan": b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a":NaN',
    "nan-whole": b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a":NaN}',
    "no-utf8": b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"\xff"',
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    "cut-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "no-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    "no-http": b"hello\r\n\r\n",
    "nothing": b"",
    "empty": b"HTTP/1.1 204 No Content\r\n\r\n",
    "deep": b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000,
    "redirect": b"HTTP/1.1 307 X\r\nLocation: /v1/models\r\nContent-Length: 2\r\n\r\n{}",
    "to-get": b"HTTP/1.1 302 X\r\nLocation: /v1/models\r\nContent-Length: 2\r\n\r\n{}",
    "599": b"HTTP/1.1 599 X\r\nContent-Length: 2\r\n\r\n{}",
    "529": b"HTTP/1.1 529 X\r\nContent-Length: 2\r\n\r\n{}",
}
"""What is no answer: such a request is to run again."""
ANSWERED: Final = {
    "early": b"HTTP/1.1 103 X\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "header": b"HTTP/1.1 200 OK\r\nX-Request-Id: \xff\xe9\r\nContent-Length: 2\r\n\r\n{}",
    "overflow": b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"a":1e999}',
    "error": b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"error": "x"}',
    "no-length": b"HTTP/1.1 200 OK\r\n\r\n{}",
}
MODELS: Final = b'HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{"data": [{"id": "m"}]}    '
DEEP: Final = FAILED["deep"]


class _Odd(socketserver.StreamRequestHandler):
    """One connection: an answer by the last word of the prompt, and the end."""

    server: _OddEngine

    def handle(self) -> None:
        length, first = 0, self.rfile.readline()
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = self.rfile.read(length)
        if first.startswith(b"POST"):
            word = json.loads(body)["messages"][0]["content"]
            self.wfile.write((FAILED | ANSWERED)[word])
        elif b"/v1/models" in first:
            self.wfile.write(self.server.models)


class _OddEngine(socketserver.ThreadingTCPServer):
    daemon_threads = False
    models = MODELS

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Odd)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def engine() -> Iterator[_OddEngine]:
    with _OddEngine() as engine:
        yield engine
        engine.shutdown()


def strict(line: str) -> dict[str, Any]:
    """JSON as it is written down, not as Python takes it."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return dict(json.loads(line, parse_constant=refuse))


def test_what_is_no_answer_runs_again_and_the_rest_is_in_the_output(
    tmp_path: Path, engine: _OddEngine
) -> None:
    names = [*FAILED, *ANSWERED]
    with BatchServiceProcess(tmp_path, [engine.url], max_attempts="2") as service:
        client = service.client()
        ended = wait_until(client, submit(client, [chat_line(each, each) for each in names]).id)
        assert ended.status == "completed"
        assert ended.output_file_id
        output = client.files.content(ended.output_file_id).text.split("\n")[:-1]
        assert [strict(line)["custom_id"] for line in output] == list(ANSWERED)
        errors = records(client, ended.error_file_id)
        assert [each["custom_id"] for each in errors] == list(FAILED)
        assert {each["error"]["code"] for each in errors} == {"engine_error"}
        assert all("(2 attempts)" in each["error"]["message"] for each in errors)


@pytest.mark.parametrize("models", [MODELS, DEEP, MODELS.replace(b'"m"', b"1e9")])
def test_no_engine_makes_the_service_answer_by_a_mistake(
    tmp_path: Path, engine: _OddEngine, models: bytes
) -> None:
    engine.models = models
    with (
        BatchServiceProcess(tmp_path, [engine.url]) as service,
        httpx.Client(base_url=service.url) as http,
    ):
        assert http.get("/v1/models").status_code in {200, 503}
        for name in FAILED | ANSWERED:
            body = {"model": "m", "messages": [{"role": "user", "content": name}]}
            try:
                answer = http.post("/v1/chat/completions", json=body)
            except httpx.RemoteProtocolError:  # An answer that is cut off is so here, too.
                continue
            assert "made a mistake" not in answer.text, name
        assert http.get("/readyz").status_code == 200
