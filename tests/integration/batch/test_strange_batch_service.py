"""The batch commands against what is no batch service: told in a sentence, whatever answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aqua_batch.service.client import BatchClient
from aqua_protocol.errors import ConfigError


class _Handler(BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Nothing: tests say what failed."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"", b"<html>", b"[]", b"{}", b'{"data": {"result": []}}', b'{"data": [{}]}', b"[" * 100_000],
)
def test_an_answer_of_another_service_is_told(
    url: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Handler, "answer", answer)
    with BatchClient(url) as client:
        with pytest.raises(ConfigError, match="does not answer as a batch service"):
            client.list(1)
        with pytest.raises(ConfigError, match="does not answer as a batch service"):
            client.retrieve("batch_0")


def test_an_address_or_key_that_none_can_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        BatchClient("http://[::1")
    with pytest.raises(ConfigError, match="bearer token"):
        BatchClient(url, "kéy")
