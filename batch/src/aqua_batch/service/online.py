"""Passes online requests through to an engine, streams and all, and tells of the engines' models.

The body goes on as it came and the answer comes back as it is; an engine's errors are OpenAI's.
What this service adds is the caller's key, its tenant's rate, and who of the engines gets it: of
those that have the model the one with the fewest online requests. One that cannot be reached is
passed over, since the request has not run there. `service_tier` is OpenAI's: `flex` gets a place
for offline requests, beside those of batches, and 429 where none is free; `priority` tells an
engine that co-serves that it is online whatever else is said; `auto` and `default` say nothing.

A caller that leaves closes the connection to the engine, which then aborts the request.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, Final

import aiohttp
import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aqua_batch.service.dispatch.engines import (
    CLASS_HEADER,
    OVERLOADED,
    EngineAbsentError,
    EngineEndpoint,
    EngineFailedError,
    EnginePool,
    header_of,
)
from aqua_batch.service.refusals import (
    BatchApiError,
    NoSuchObjectError,
    RateLimitError,
    UploadTooLargeError,
)
from aqua_batch.service.routes import BatchServices, ServicesDep, Tenant
from aqua_batch.service.rows.quotas import quota_of
from aqua_batch.service.wire import ENDPOINTS, ObjectPage
from aqua_protocol.errors import UnavailableError
from aqua_protocol.supervision import start_job

log = structlog.get_logger(__name__)

LONGEST_PROMPT_BYTES: Final = 64 << 20
"""Bytes of a body, as long as a line of a batch may be. Doubled, a body of garbage takes twice the
memory."""
FLEX_RETRY_S: Final = 1.0
"""Seconds after which a refused `flex` request may try again. Doubled, a free place stays so
longer, by a second."""
CLASSES: Final = {"auto": None, "default": None, "priority": "online", "flex": "offline"}
"""Values of `service_tier`, and what engines that co-serve are told."""
KEPT_HEADERS: Final = ("content-type", "x-request-id", "retry-after")

online = APIRouter(tags=["online"])


async def pass_through(request: Request, services: ServicesDep, tenant: Tenant) -> Response:
    """Have an engine answer now; streams where `stream` is true."""
    services.rates.count(await services.database.read(partial(quota_of, tenant=tenant)))
    body = await _body(request)
    model, tier = _asked(body)
    offer = _Offer(services.engines, request.url.path, body, model, tier)
    # Errors of `open` are raised below; the other has none.
    leaves = start_job(_wait_for_leave(request), lambda _: None)
    opens = start_job(offer.open(), lambda _: None)
    try:
        try:
            await asyncio.wait({leaves, opens}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaves.cancel()
            if not opens.done():
                opens.cancel()
            await asyncio.gather(leaves, opens, return_exceptions=True)
        if opens.cancelled():
            return Response(status_code=499)  # The caller has left, and reads no answer.
        opens.result()
        return _Relay(offer, offer.response)
    except BaseException:
        offer.close()
        raise


for _path in ENDPOINTS:
    online.post(_path, response_class=StreamingResponse)(pass_through)


@online.get("/v1/models")
async def list_models(services: ServicesDep, _: Tenant) -> ObjectPage:
    """List the models of all engines that answer."""
    models = await _models(services)
    ids = sorted(models)
    return ObjectPage(
        data=[models[name] for name in ids],
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
    )


@online.get("/v1/models/{model:path}")
async def retrieve_model(model: str, services: ServicesDep, _: Tenant) -> dict[str, Any]:
    """Tell of a model."""
    models = await _models(services)
    if model not in models:
        raise NoSuchObjectError(f"The model '{model[:256]}' does not exist", param="model")
    return models[model]


class _Offer:
    """One request on its way to an engine; takes a place and gives it back."""

    def __init__(
        self, engines: EnginePool, path: str, body: bytes, model: str | None, tier: str
    ) -> None:
        self._engines = engines
        self._model = model
        self._path = path
        self._body = body
        self._is_flex = tier == "flex"
        told = CLASSES[tier]
        self._headers = {} if told is None else {CLASS_HEADER: told}
        self._engine: EngineEndpoint | None = None
        self._response: aiohttp.ClientResponse | None = None

    @property
    def response(self) -> aiohttp.ClientResponse:
        """The engine's answer, once it is open."""
        assert self._response is not None, "not open"
        return self._response

    async def open(self) -> None:
        """Wait for the head of an engine's answer.

        Raises:
            RateLimitError: It is a `flex` request, and no place is free.
            UnavailableError: No engine can be reached.
            EngineFailedError: The engine broke off.
        """
        passed: list[EngineEndpoint] = []
        while True:
            engine = self._take(passed)
            try:
                response = await self._engines.open(engine, self._path, self._body, self._headers)
            except EngineAbsentError:
                self._give_back()
                passed.append(engine)
            except BaseException:
                self._give_back()
                raise
            else:
                if self._is_flex and response.status in OVERLOADED:
                    self._engines.refused(engine, response)
                self._response = response
                return

    def _take(self, passed: list[EngineEndpoint]) -> EngineEndpoint:
        if self._is_flex:
            self._engine = self._engines.take(self._model)
            if self._engine is None:
                raise RateLimitError(
                    "no engine has room for flex requests now",
                    remedy="Try again later, or without service_tier.",
                    retry_after_s=FLEX_RETRY_S,
                )
            return self._engine
        engine = self._engines.choose_online(self._model, passed)
        if engine is None:
            raise UnavailableError(
                "no engine can be reached", remedy="Try again later.", retry_after_s=1.0
            )
        engine.online += 1
        self._engine = engine
        return engine

    def _give_back(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self._is_flex:
            engine.running -= 1
        else:
            engine.online -= 1

    def close(self) -> None:
        """End the request at the engine, if it has not ended, and give its place back."""
        if self._response is not None:
            self._response.close()
        self._give_back()


class _Relay(StreamingResponse):
    """An engine's answer, as it comes; broken off at the engine where the caller leaves."""

    def __init__(self, offer: _Offer, answer: aiohttp.ClientResponse) -> None:
        told = {name: header_of(answer, name) for name in KEPT_HEADERS}
        kept = {name: value for name, value in told.items() if value is not None}
        # An answer that ends early is all that can be told once its head is sent.
        super().__init__(answer.content.iter_any(), answer.status, kept)
        self._offer = offer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; what it holds is given back even where nothing could be sent."""
        try:
            await super().__call__(scope, receive, send)
        except (TimeoutError, aiohttp.ClientError) as error:
            log.warning("an engine broke off amid an answer", error=type(error).__name__)
            raise EngineFailedError("the engine broke off amid its answer") from None
        finally:
            self._offer.close()


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_PROMPT_BYTES:
            raise UploadTooLargeError(f"the body is larger than {LONGEST_PROMPT_BYTES} bytes")
    return bytes(body)


def _asked(body: bytes) -> tuple[str | None, str]:
    """The model and the tier that a body names; a model that is none is the engine's to refuse."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BatchApiError("the body is not JSON") from error
    if not isinstance(asked, dict):
        raise BatchApiError("the body must be an object")
    tier = asked.get("service_tier") or "auto"
    if not isinstance(tier, str) or tier not in CLASSES:
        raise BatchApiError(
            f"service_tier must be one of {', '.join(CLASSES)}", param="service_tier"
        )
    model = asked.get("model")
    return model if isinstance(model, str) else None, tier


async def _wait_for_leave(request: Request) -> None:
    """Return when the caller has closed its connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _models(services: BatchServices) -> dict[str, dict[str, Any]]:
    """Models by name, as the first engine that has one tells of it."""
    engines = services.engines

    async def of(engine: EngineEndpoint) -> list[dict[str, Any]]:
        try:
            return await engines.models_of(engine)
        except (aiohttp.ClientError, TimeoutError, EngineFailedError):
            return []

    lists = await asyncio.gather(*(of(each) for each in engines.engines))
    if not any(lists):
        raise UnavailableError(
            "no engine tells its models", remedy="Try again later.", retry_after_s=1.0
        )
    return {each["id"]: each for found in reversed(lists) for each in found}
