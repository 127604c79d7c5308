"""Runs a batch service: address, database, service, in this order, and in reverse at the end.

Everything that can be wrong with the configuration is noticed before the first request, as a typed
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

import structlog
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aqua_batch.service.app import BatchService
from aqua_batch.service.settings import BatchSettings
from aqua_cli.http_limits import HttpLimits
from aqua_cli.service import address_of, listen

log = structlog.get_logger(__name__)

BACKLOG: Final = 2048
"""Connections that the kernel keeps until they are accepted, uvicorn's default. Doubled, more of
them wait instead of being refused."""
HEAD_S: Final = 5
"""Seconds for the head of a request. Without it a thousand connections of a stranger that send
nothing take all descriptors of a usual process. Doubled, they do for twice as long."""
GRACE_S: Final = 5
"""Seconds that HTTP requests under way get at a shutdown; an upload that is cut off is repeated.
Doubled, a supervisor waits longer for one that hangs."""
KEEP_ALIVE_S: Final = 10
"""Seconds that an idle connection is kept: longer than the 5 for which httpx, and with it OpenAI's
client, keeps one, for a request that is sent at the moment of closing is lost. Doubled, strangers'
connections take descriptors for twice as long."""


class _HttpProtocol(HttpLimits, HttpToolsProtocol):
    """Speak HTTP as uvicorn does, within limits; uvicorn would wait for a head for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._await_nothing()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._await_nothing()
        self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _await_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()


class BatchServer(uvicorn.Server):
    """uvicorn as a part of a larger life: signals end the serving, and nothing else."""

    def __init__(self, service: BatchService) -> None:
        super().__init__(
            uvicorn.Config(
                service.asgi,
                loop="uvloop",
                http=_HttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._stopping = service.services.stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the serving."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        await super().startup(sockets)
        assert sockets is not None, "the server is given its socket"
        log.info("listening", url=f"http://{address_of(sockets[0])}", version=version("aqua-batch"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say that it stops, and finish what is under way."""
        self._stopping.set()
        log.info("stopping")
        await super().shutdown(sockets)


def serve(settings: BatchSettings) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        ConfigError: See the module.
        StoreUnavailableError: The database does not answer at the start.
    """
    prefix = "AQUA_BATCH_"
    listener = listen(settings.listen_host, settings.listen_port, backlog=BACKLOG, prefix=prefix)
    with (
        contextlib.closing(listener),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_run(settings, listener))
    log.info("stopped")


async def _run(settings: BatchSettings, listener: socket.socket) -> None:
    async with BatchService(settings).running() as service:
        await BatchServer(service).serve(sockets=[listener])
