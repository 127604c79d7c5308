"""Runs a coordinator: address, store, service, in this order, and in reverse at the end.

Everything that can be wrong with the configuration is noticed before the first request, as a
typed error: an address that must not be listened on, a port in use, a store that does not start,
a Redis that is too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import structlog
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aqua_cli.http_limits import HttpLimits
from aqua_cli.service import address_of, listen
from aqua_coordinator import __version__
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.http.connections import ConnectionLimits
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store.adoption import AdoptionKeys
from aqua_protocol import ConfigError
from aqua_protocol.supervision import SupervisedTask

log = structlog.get_logger(__name__)

BACKLOG: Final = 2048
"""Connections that the kernel keeps until they are accepted, uvicorn's default: a cluster that
comes back at once. Doubled, more of them wait instead of being refused."""
GRACE_S: Final = 5
"""Seconds that requests under way get at a shutdown. Their time is bounded by the store's timeout;
doubled, a supervisor waits longer for one that hangs."""
KEEP_ALIVE_S: Final = 75
"""Seconds; longer than the longest heartbeat (60 s), so that members keep their connections.
Doubled, idle connections are held for longer."""
YOUNG_OBJECTS: Final = 10_000
"""More objects than have gone, when Python looks for cycles among the young ones, some ms. Doubled,
a look that a request waits for takes twice as long."""
TICKS_PER_SETTLEMENT: Final = 10
"""Of uvicorn's tenths of a second, between moves of all that lives out of the collector's sight.
Doubled, a look finds up to twice as many objects that live on."""
TICKS_PER_COLLECTION: Final = 36_000
"""An hour, until the collector sees everything once. It stops the loop for 0.1 s where there are
10,000 connections; doubled, cycles that have been alive for a second take memory for two hours."""

SERVER_OPTIONS: Final[dict[str, Any]] = {
    "loop": "uvloop",
    "http": "httptools",
    "ws": "none",
    "lifespan": "off",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "date_header": False,
    "proxy_headers": False,
    "backlog": BACKLOG,
    "timeout_keep_alive": KEEP_ALIVE_S,
    "timeout_graceful_shutdown": GRACE_S,
}
"""For uvicorn; benchmarks give the same to what they compare with."""


class _HttpProtocol(HttpLimits, HttpToolsProtocol):
    """Speak HTTP as uvicorn does, within limits."""


class Server(uvicorn.Server):
    """uvicorn as a part of a larger life.

    Signals are ours, since uvicorn raises them again when it is done, which would end the process
    before the store has been stopped. The first makes `/readyz` fail, and `drain_s` later nothing
    more is accepted and what is under way is finished; a second Ctrl-C does not wait. Event streams
    end first, instead of holding a shutdown up for the whole grace.
    """

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(service.asgi, **SERVER_OPTIONS)
        config.load()
        services = service.services
        settings, tls = services.settings, services.settings.tls_files()
        limits = ConnectionLimits(settings.transfer_timeout_s, services.metrics, tls)
        make = partial(limits.protocol, _HttpProtocol)
        config.http_protocol_class = make  # type: ignore[assignment] # called, never subclassed
        super().__init__(config)
        self._reaper = SupervisedTask(limits.close_late_ones, "connection-reaper")
        self._services = services
        self._drained_s = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the serving, and nothing else."""
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
        self._reaper.start()
        assert sockets is not None, "the server is given its socket"
        scheme = "http" if self._services.settings.tls_cert is None else "https"
        log.info("listening", url=f"{scheme}://{address_of(sockets[0])}", version=__version__)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        _collect(counter)
        if not await super().on_tick(counter):
            return False
        if not self._services.stopping.is_set():
            self._services.stopping.set()
            self._drained_s = time.monotonic() + self._services.settings.drain_s
            log.info("stopping", drain_s=self._services.settings.drain_s)
        return self.force_exit or time.monotonic() >= self._drained_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End event streams, then everything."""
        self._services.event_watcher.close()
        await super().shutdown(sockets)
        await self._reaper.stop()


def _collect(tick: int) -> None:
    """Look for cycles in what is a second old at most, and leave alone what lives.

    Python's own way is to look at everything whenever it has grown by a quarter: at all objects of
    all connections, 0.1 s and more while thousands of members join.
    """
    if tick % TICKS_PER_COLLECTION == 0:
        gc.set_threshold(YOUNG_OBJECTS, 10, TICKS_PER_COLLECTION)  # The last: never by itself.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    elif tick % TICKS_PER_SETTLEMENT == 0:
        gc.collect(1)
        gc.freeze()


def serve(settings: CoordinatorSettings) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        ConfigError: See the module.
        UnavailableError: Redis does not answer at the start.
    """
    settings.require_safe_address()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            contextlib.closing(
                listen(settings.listen_host, settings.listen_port, backlog=BACKLOG, prefix="AQUA_")
            )
        )
        embedded: EmbeddedValkey | None = None
        if settings.redis_url is None:
            embedded = EmbeddedValkey(
                settings.data_dir, fsync=settings.required_fsync, binary=settings.store_binary
            )
            embedded.start()
            stack.callback(embedded.stop)
            redis_url = embedded.url
        else:
            redis_url = settings.redis_url.get_secret_value()
        if settings.tokens_file is None:
            log.warning("no tokens file: every process on this machine is an operator")
        service = Service(settings, redis_url, _own_keys(settings))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(service, listener, embedded))
    log.info("stopped")


def _own_keys(settings: CoordinatorSettings) -> AdoptionKeys | None:
    """Adoption keys of this coordinator alone, unless some are configured for all."""
    if settings.adoption_key is not None:
        return None
    if settings.redis_url is not None:
        log.warning(
            "no AQUA_ADOPTION_KEY: if the books are lost, leases that others granted will end"
        )
    try:
        return AdoptionKeys.in_directory(settings.data_dir)
    except ConfigError as error:
        if settings.redis_url is None:
            raise
        log.warning("leases from before a restart will end, too", reason=error.message)
        return None


async def _run(service: Service, listener: socket.socket, embedded: EmbeddedValkey | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if embedded is not None:
            embedded.supervise()
            stack.push_async_callback(embedded.stop_supervising)
        await stack.enter_async_context(service.running())
        await Server(service).serve(sockets=[listener])
