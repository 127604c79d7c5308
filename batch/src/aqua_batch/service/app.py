"""The service put together: database, files, engines, and HTTP in front.

Its life is not tied to the server's (ASGI lifespan), so that its errors reach the command line as
what they are. `running` ends in reverse: HTTP has ended before, then requests under way are broken
off and go back to wait, and the database closes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any, Final, Self

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from aqua_batch.service import routes
from aqua_batch.service.dispatch.dispatcher import Dispatcher
from aqua_batch.service.dispatch.engines import EnginePool
from aqua_batch.service.dispatch.metrics import BatchMetrics
from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.online import online
from aqua_batch.service.order.order_task import OrderTask
from aqua_batch.service.order.rank_writer import RankWriter
from aqua_batch.service.progress import BatchRates
from aqua_batch.service.refusals import BatchApiError, error_body
from aqua_batch.service.routes import BatchServices
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.keys import has_keys
from aqua_batch.service.rows.quotas import RequestRates
from aqua_batch.service.settings import BatchSettings
from aqua_batch.service.upkeep import Upkeep
from aqua_cli.hosts import AllowedHosts
from aqua_cli.service import is_loopback
from aqua_protocol.errors import AquaError, ConfigError, MisdirectedRequestError

log = structlog.get_logger(__name__)

_DESCRIPTION: Final = """\
OpenAI's Batch API on engines that serve others, too. Upload a file of requests, create a batch of
it, and fetch the output file when the batch has ended; OpenAI's client does all three, with this
service as its `base_url`. Every error is OpenAI's.
"""


class BatchService:
    """A batch service's inside.

    Args:
        settings: Checked already.

    Attributes:
        asgi: The ASGI application to serve.
        services: What operations work with.

    Raises:
        ConfigError: A URL is no good, or the address is not safe without API keys.
        StoreUnavailableError: The database does not answer.
    """

    def __init__(self, settings: BatchSettings) -> None:
        metrics = BatchMetrics()
        objects = ObjectStore(settings.files)
        key = settings.engine_api_key
        engines = EnginePool(
            settings.engines,
            places=settings.engine_concurrency,
            api_key=None if key is None else key.get_secret_value(),
            timeout_s=settings.request_timeout_s,
            ttft_s=settings.engine_ttft_s,
            tells_deadlines=settings.engine_deadlines,
        )
        database = Database(settings.database)
        dispatcher = Dispatcher(
            database,
            objects,
            engines,
            metrics,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
        )
        task = OrderTask(
            files=settings.files,
            input_key="",
            endpoint="",
            policy=settings.order,
            tokenizer=settings.tokenizer,
            gpu=settings.gpu,
            model=settings.model,
        )
        batch_rates = BatchRates()
        upkeep = Upkeep(
            database,
            objects,
            dispatcher,
            RankWriter(database, task, engines.most_places),
            batch_rates,
            max_requests=settings.max_batch_requests,
            output_ttl_s=settings.file_ttl_s,
        )
        self.services = BatchServices(
            settings,
            database,
            objects,
            engines,
            dispatcher,
            upkeep,
            metrics,
            RequestRates(),
            batch_rates,
            asyncio.Event(),
        )
        self.asgi: ASGIApp = _api(self.services)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Be open for business within the block.

        Raises:
            ConfigError: There is no API key, and others than this machine can get here.
        """
        services = self.services
        try:
            if not await services.database.read(has_keys):
                self._require_loopback()
                # Without keys a web page could have a browser of this machine ask in its name.
                names = services.settings.allowed_hosts | {services.settings.listen_host}
                hosts = AllowedHosts(names, variable="AQUA_BATCH_ALLOWED_HOSTS")
                self.asgi = _answering_to(hosts, self.asgi)
            async with services.engines, services.dispatcher.running(), services.upkeep.running():
                yield self
        finally:
            services.database.close()

    def _require_loopback(self) -> None:
        host = self.services.settings.listen_host
        if not is_loopback(host):
            raise ConfigError(
                f"refusing to listen on {host} without API keys",
                remedy="Make one with `aqua batch key add --tenant NAME`, or listen on 127.0.0.1.",
            )
        log.warning("no API keys: every process on this machine is one tenant")


def _api(services: BatchServices) -> FastAPI:
    api = FastAPI(
        title="Aqua batch service",
        description=_DESCRIPTION,
        version=version("aqua-batch"),
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(routes.require_plain_url)],
    )
    api.state.services = services
    for router in (
        routes.health,
        routes.files,
        routes.batches,
        routes.operators,
        online,
        routes.rest,
    ):
        api.include_router(router)
    for kind in (AquaError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, _answer_error)
    return api


def _answering_to(hosts: AllowedHosts, application: ASGIApp) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                hosts.require(dict(scope["headers"]).get(b"host"))
        except MisdirectedRequestError as error:
            answer = await _answer_error(Request(scope), error)
            await answer(scope, receive, send)
        else:
            await application(scope, receive, send)

    return checked


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    typed = _typed(error)
    headers = {}
    if typed.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(typed.retry_after_s))
    return JSONResponse(error_body(typed), typed.http_status, headers)


def _typed(error: Exception) -> AquaError:
    if isinstance(error, AquaError):
        return error
    if isinstance(error, RequestValidationError):
        fault: dict[str, Any] = error.errors()[0]
        name = str(fault["loc"][-1])
        return BatchApiError(f"{name}: {fault['msg']}", param=name)
    if isinstance(error, HTTPException):
        return BatchApiError(str(error.detail))
    log.error("unexpected error", exc_info=error)
    return AquaError(
        "the batch service made a mistake", remedy="Please report it, with its log of this moment."
    )
