"""A real HTTP server that answers as told, for tests of those who call."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:  # noqa: ANN401 - whatever was sent
        """What it says as JSON, None where it says nothing."""
        return json.loads(self.content) if self.content else None


@dataclass(frozen=True)
class Answer:
    """What to answer: a status, and a body of JSON, or of bytes of the type that is named."""

    status: int = 200
    body: Any = field(default_factory=dict)
    content_type: str = "application/json"


class ScriptedServer:
    """Serves on loopback until closed.

    Args:
        answer: Decides about each request; called on a server thread.

    Attributes:
        requests: What has arrived so far.
    """

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self.requests: list[Request] = []
        self._answer = answer
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more; harmless when repeated. What it has not answered is not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers), content)
                script.requests.append(request)
                answer = script._answer(request)
                body = answer.body
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Content-Length", str(len(content)))
                with contextlib.suppress(ConnectionError):  # Clients may hang up.
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class's names

            def log_message(self, *_: object) -> None:
                """Quiet: the test reads `requests`."""

        return Handler
