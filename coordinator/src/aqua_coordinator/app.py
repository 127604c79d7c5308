"""The service put together: the books, what works on them, and HTTP in front.

`Service.running()` connects to Redis, opens the books and begins to sweep; at the end event
streams close first, then the sweep, then the connections. The life of the service is not tied to
the server's (ASGI lifespan), so that its errors reach the command line as what they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any, Final, Self

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from aqua_client.tracing import open_tracer
from aqua_coordinator import __version__, routes
from aqua_coordinator.access.audit import AuditLog
from aqua_coordinator.access.auth import Authenticator
from aqua_coordinator.access.quotas import Quotas
from aqua_coordinator.access.rates import CallerRates
from aqua_coordinator.console.batch_watch import BatchWatch
from aqua_coordinator.console.views import ConsoleViews
from aqua_coordinator.event_watcher import EventWatcher
from aqua_coordinator.http.answers import error_answer, typed
from aqua_coordinator.http.hot_routes import find_hot_routes
from aqua_coordinator.http.request_limits import RequestLimits
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.services import CapabilitySigner, HeartbeatRate, Services
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_coordinator.store.adoption import AdoptionKeys
from aqua_coordinator.store.history import History
from aqua_coordinator.store.member_totals import MemberTotals
from aqua_coordinator.store.scripts import SWEEP_PERIOD_S
from aqua_protocol import AquaError, ErrorBody, UnavailableError
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.supervision import SupervisedTask, resting

log = structlog.get_logger(__name__)

MAX_REDIS_CONNECTIONS: Final = 8
"""The pipeline, the event watcher, and some to spare while lost ones are being replaced. Doubled,
nothing changes but what a leak may hold."""

OPENAPI_PATH: Final = "/openapi.json"
STORE_RETRY_S: Final = 0.1
"""Between attempts to open the books: an embedded store is back in about that time. Doubled, a
start takes 50 ms longer on average."""

_ROUTES: Final = [
    route for router in routes.ALL for route in router.routes if isinstance(route, APIRoute)
]
_DESCRIPTION: Final = """\
Aqua's books: who offers GPU memory, who holds a lease on it, and who is asked to give it back.

Members report their full state; everything else follows from that. Mutations are safe to repeat:
reports by their revision, grants and reclaims by their Idempotency-Key, the rest by nature. Every
error is an `ErrorBody` with a stable `code`.
"""

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    422: {"model": ErrorBody, "description": "The request does not fit its schema or bounds."},
    "4XX": {"model": ErrorBody, "description": "Refused; `code` says why."},
    "5XX": {"model": ErrorBody, "description": "Not possible now; `code` says why."},
}


class Service:
    """A coordinator's inside.

    Args:
        settings: Checked already.
        redis_url: Where the books are; nothing is connected before `running`.
        adoption: Keys of its own, where none are configured; by default made for this process.

    Attributes:
        asgi: The ASGI application to serve.
        api: FastAPI alone.
        hot_routes: Operations that go past it.
        services: What operations work with.

    Raises:
        ConfigError: The URL, the tokens file or the audit log is no good, or tracing cannot be had.
    """

    def __init__(
        self, settings: CoordinatorSettings, redis_url: str, adoption: AdoptionKeys | None = None
    ) -> None:
        metrics = Metrics()
        quotas = Quotas(settings.quotas_file)
        pool = open_pool(
            redis_url,
            connect_timeout_s=settings.store_timeout_s,
            max_connections=MAX_REDIS_CONNECTIONS,
        )
        self._pipeline = Pipeline(
            pool,
            timeout_s=settings.store_timeout_s,
            observe=metrics.redis_answered,
            min_replicas=settings.min_replicas or 0,
        )
        ledger = Ledger(self._pipeline, AdoptionKeys.configured(settings) or adoption)
        history = History(self._pipeline)
        self.services = Services(
            settings=settings,
            ledger=ledger,
            signer=CapabilitySigner(ledger, settings),
            authenticator=Authenticator(settings.tokens_file),
            event_watcher=EventWatcher(pool),
            metrics=metrics,
            audit=AuditLog(target, metrics.audit_failures)
            if (target := settings.audit_log)
            else None,
            member_totals=MemberTotals(ledger),
            heartbeats=HeartbeatRate(settings.heartbeat_s),
            quotas=quotas,
            rates=CallerRates(settings, quotas, metrics.rate_refusals),
            history=history,
            console=ConsoleViews(
                ledger,
                history,
                batch_watch=BatchWatch(url, settings.batch_operator_token)
                if (url := settings.batch_url)
                else None,
            ),
            tracer=open_tracer("aqua-coordinator") if settings.tracing else None,
        )
        metrics.event_streams.set_function(lambda: self.services.event_watcher.listeners)
        self.api = _api(self.services)
        self.hot_routes = find_hot_routes(_ROUTES, self.services)
        self.asgi = RequestLimits(self.api, self.hot_routes, self.services)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Be open for business within the block.

        Raises:
            ConfigError: Redis does not fit; see `server_checks`.
            UnavailableError: Redis does not answer, or takes no writes.
        """
        services = self.services
        self._pipeline.start()
        try:
            await self._open_books()
            async with (
                SupervisedTask(self._sweep_forever, "sweep"),
                SupervisedTask(self._refresh_forever, "token-refresh"),
                SupervisedTask(services.event_watcher.run, "event-watcher"),
            ):
                try:
                    yield self
                finally:
                    services.event_watcher.close()
        finally:
            if services.audit is not None:
                services.audit.close()
            await services.ledger.close()

    async def _sweep_forever(self) -> None:
        """Let happen in the books what happens because time passes.

        Every coordinator sweeps, and any number may at once: each step is one script that looks at
        the books as they are. A sweep is also what makes the books' clock go on
        (`lua/advance_clock.lua`), so while no coordinator or no Redis is there, nothing gets older.
        """
        services, settings = self.services, self.services.settings
        heartbeats = services.heartbeats
        absent, is_present = False, False
        while True:
            is_refusing, heartbeats.is_refusing = heartbeats.is_refusing, False
            try:
                heartbeats.spread_s, silent_s = await services.ledger.advance_clock(
                    silent_s=settings.silent_member_s,
                    max_stop_s=settings.max_clock_stop_s,
                    is_refusing=int(is_refusing),
                    is_present=int(is_present),
                )
                ended = await services.ledger.sweep(silent_s=silent_s)
                books = await services.member_totals.read_part()
                await services.quotas.keep(
                    services.ledger, books.books_id, has_quotas=books.has_quotas
                )
                await services.history.keep(services.ledger, services.member_totals)
            except UnavailableError as error:
                if not absent:
                    log.warning("store absent, nothing expires meanwhile", error=str(error))
                absent, is_present = True, False
            else:
                services.metrics.endings.inc(ended)
                if absent:
                    log.info("store is back")
                absent, is_present = False, True
            with resting():
                await asyncio.sleep(SWEEP_PERIOD_S)

    async def _refresh_forever(self) -> None:
        """Notice changed tokens, also while the store is absent, and let streams look at theirs."""
        while True:
            if self.services.authenticator.refresh():
                self.services.event_watcher.wake()
            with resting():
                await asyncio.sleep(SWEEP_PERIOD_S)

    async def _open_books(self) -> None:
        """Open the books; a store that is just being restarted gets the time it may take."""
        settings = self.services.settings
        give_up_s = time.monotonic() + settings.store_timeout_s
        while True:
            try:
                opened = await self.services.ledger.open(settings)
                await self.services.quotas.keep(self.services.ledger, opened.books_id)
            except StoreUnavailableError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(STORE_RETRY_S)
            else:
                return


class _Api(FastAPI):
    """FastAPI, with a document that asks for tokens only where they are asked for."""

    def build_middleware_stack(self) -> ASGIApp:
        """Without its outermost layer: our mistakes are answered and counted by `RequestLimits`."""
        outermost = super().build_middleware_stack()
        assert isinstance(outermost, ServerErrorMiddleware), outermost
        return outermost.app

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        document = super().openapi()
        services: Services = self.state.services
        if not services.authenticator.wants_tokens:
            document["components"].pop("securitySchemes", None)
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation.pop("security", None)
        return document

    @cached_property
    def rendered(self) -> bytes:
        """The document as it is sent; rendered once, since anybody may ask for it."""
        return bytes(JSONResponse(self.openapi()).body)


async def _send_document(request: Request) -> Response:
    return Response(request.app.rendered, media_type="application/json")


def _api(services: Services) -> FastAPI:
    api = _Api(
        title="Aqua coordinator",
        description=_DESCRIPTION,
        version=__version__,
        responses=_ERRORS,
        redoc_url=None,
        redirect_slashes=False,
        routes=[Route(OPENAPI_PATH, _send_document)],  # Before FastAPI's, which renders each time.
        openapi_url=OPENAPI_PATH,
    )
    api.state.services = services
    for router in routes.ALL:
        api.include_router(router)
    for kind in (AquaError, RequestValidationError, HTTPException):
        api.add_exception_handler(kind, _answer_error)
    return api


async def _answer_error(request: Request, error: Exception) -> Response:
    status, headers, body = error_answer(typed(error))
    answer = Response(body, status)
    answer.raw_headers = [*headers, (b"content-length", b"%d" % len(body))]
    if isinstance(error, HTTPException) and error.headers and "Allow" in error.headers:
        answer.headers["Allow"] = _methods_of(request.url.path) or error.headers["Allow"]
    return answer


def _methods_of(path: str) -> str:
    """All methods of a path; Starlette names those of the first operation that it finds there."""
    here = (route.methods or () for route in _ROUTES if route.path_regex.match(path))
    return ", ".join(sorted({method for methods in here for method in methods}))
