"""The operations of `/v1/files` and `/v1/batches`, and what is not served, by name.

Each sees the files and batches of its caller's tenant alone: another tenant's do not exist for it.
`/aqua/batches` tells how batches are going, and to an operator's token of all tenants.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from aqua_batch.bodies import problem_of
from aqua_batch.service.dispatch.dispatcher import Dispatcher
from aqua_batch.service.dispatch.engines import EnginePool
from aqua_batch.service.dispatch.metrics import BatchMetrics
from aqua_batch.service.files.objects import PIECE_BYTES, ObjectStore
from aqua_batch.service.files.uploads import UploadForm, clean_filename
from aqua_batch.service.progress import BatchRates, overview
from aqua_batch.service.refusals import BatchApiError, NotServedError, UploadTooLargeError
from aqua_batch.service.rows import batch_rows, file_rows, request_rows
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.keys import ANONYMOUS_TENANT, has_keys, tenant_of
from aqua_batch.service.rows.quotas import RequestRates, require_open_room, require_room
from aqua_batch.service.settings import BatchSettings
from aqua_batch.service.upkeep import Upkeep
from aqua_batch.service.wire import (
    BatchObject,
    BatchParams,
    ExpiresAfter,
    FileDeletion,
    FileObject,
    ObjectPage,
    batch_params,
    window_s,
)
from aqua_protocol.batches import BatchSummary
from aqua_protocol.errors import UnavailableError
from aqua_protocol.supervision import failing_loops

LONGEST_BODY_BYTES: Final = 64 << 10
"""Bytes of a JSON body: a batch with all its metadata takes 10 KiB. Doubled, a body of garbage
takes 64 KiB more."""
MOST_LISTED_FILES: Final = 10_000
"""Fixed by OpenAI."""
MOST_LISTED_BATCHES: Final = 100
"""Fixed by OpenAI."""
NOT_SERVED: Final = frozenset(
    {"assistants", "audio", "chat", "completions", "conversations", "embeddings", "evals"}
    | {"fine_tuning", "images", "models", "moderations", "realtime", "responses", "threads"}
    | {"uploads", "vector_stores", "videos"}
)
"""Parts of OpenAI's API that this service does not have."""


@dataclass(frozen=True, slots=True)
class BatchServices:
    """Everything behind the operations; lives as long as the process."""

    settings: BatchSettings
    database: Database
    objects: ObjectStore
    engines: EnginePool
    dispatcher: Dispatcher
    upkeep: Upkeep
    metrics: BatchMetrics
    rates: RequestRates
    batch_rates: BatchRates
    stopping: asyncio.Event


_bearer = HTTPBearer(auto_error=False, description="An API key made by `aqua batch key add`.")

# Coroutines although they wait for nothing: FastAPI runs plain functions in a thread pool.


async def _services(request: Request) -> BatchServices:
    services = request.app.state.services
    assert isinstance(services, BatchServices), "the application has no services"
    return services


ServicesDep = Annotated[BatchServices, Depends(_services)]


async def require_plain_url(request: Request) -> None:
    """Refuse what PostgreSQL takes for no text, and second names of routes.

    Raises:
        BatchApiError: There is a NUL, or a line feed that the `$` of a route's pattern passes over.
    """
    path = request.scope["path"]
    if path.endswith("\n") or any("\0" in each for each in (path, *request.query_params.values())):
        raise BatchApiError("the URL has a NUL, or a line feed at its end")


async def _tenant(
    request: Request,
    services: ServicesDep,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> str:
    """The tenant of the caller; one for all where there are no keys."""

    def find(connection: Any) -> str:  # noqa: ANN401 - a connection
        if not has_keys(connection):
            return ANONYMOUS_TENANT
        return tenant_of(connection, request.headers.get("authorization"))

    return await services.database.read(find)


Tenant = Annotated[str, Depends(_tenant)]


async def _scope(
    request: Request,
    services: ServicesDep,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> str | None:
    """The tenant whose batches the caller may be told of; None for all, to an operator."""
    token = services.settings.operator_token
    if token is not None and bearer is not None:
        expected = token.get_secret_value().encode()
        if hmac.compare_digest(bearer.credentials.encode(), expected):
            return None
    return await _tenant(request, services, bearer)


Scope = Annotated[str | None, Depends(_scope)]
After = Annotated[str | None, Query(max_length=64, description="Id of the last one seen.")]

health = APIRouter(tags=["health"])
files = APIRouter(prefix="/v1/files", tags=["files"])
batches = APIRouter(prefix="/v1/batches", tags=["batches"])
operators = APIRouter(prefix="/aqua", tags=["operators"])
rest = APIRouter(include_in_schema=False)


@health.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the process lives. A probe that fails should restart it."""
    return {"status": "ok"}


@health.get("/readyz")
async def readyz(services: ServicesDep) -> dict[str, str]:
    """Whether the database answers and every loop runs. If not, traffic should go elsewhere."""
    if services.stopping.is_set():
        raise UnavailableError("this service is stopping", remedy="", retry_after_s=1.0)
    if failing := failing_loops():
        raise UnavailableError(f"loops crash or hang: {', '.join(failing)}", remedy="Read its log.")
    await services.database.read(has_keys)
    return {"status": "ready"}


@health.get("/metrics", response_class=Response)
async def metrics(services: ServicesDep) -> Response:
    """Show metrics to Prometheus; they name no tenant."""
    counts = await services.database.read(batch_rows.count_batches)
    work = await services.database.read(partial(request_rows.open_work, now_s=time.time()))
    text = services.metrics.render(counts, work, services.engines.engines)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@files.post("")
async def upload_file(request: Request, services: ServicesDep, tenant: Tenant) -> FileObject:
    """Upload a file: a form with `file`, `purpose` and, if it may, `expires_after`."""
    settings, database = services.settings, services.database
    now_s = time.time()
    await database.read(partial(require_room, tenant=tenant, more_bytes=0))
    file_id, key = await database.write(partial(file_rows.begin_upload, tenant=tenant, now_s=now_s))
    try:
        with ExitStack() as stack:
            create = services.objects.create(key)
            target = await asyncio.to_thread(stack.enter_context, create)
            header = request.headers.get("content-type")
            form = UploadForm(header, target, settings.max_file_bytes)
            await form.read(request.stream())
            purpose, ttl_s = _upload_params(form.fields)
            await asyncio.to_thread(stack.close)

        def end(connection: Any) -> file_rows.StoredFile:  # noqa: ANN401 - a connection
            require_room(connection, tenant, form.size_bytes)
            return file_rows.end_upload(
                connection,
                file_id=file_id,
                filename=clean_filename(form.filename or ""),
                purpose=purpose,
                size_bytes=form.size_bytes,
                expires_s=int(now_s) + (ttl_s or settings.file_ttl_s),
            )

        stored = await database.write(end)
    except BaseException:
        await database.write(partial(file_rows.give_up, file_ids=[file_id]))
        raise
    return stored.view()


def _upload_params(fields: dict[str, str]) -> tuple[str, int | None]:
    """Purpose, and how long the file is kept if the form says it."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise BatchApiError("'purpose' is a required property", param="purpose")
    if purpose != "batch":
        raise BatchApiError(
            f"'{clean_filename(purpose)}' is not one of ['batch'] - 'purpose'", param="purpose"
        )
    given = {
        name: fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in fields
    }
    if not given:
        return purpose, None
    try:
        return purpose, ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        message, param = problem_of(error)
        raise BatchApiError(message, param=f"expires_after.{param}") from error


@files.get("")
async def list_files(
    services: ServicesDep,
    tenant: Tenant,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED_FILES)] = MOST_LISTED_FILES,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=32)] = None,
) -> ObjectPage:
    """List files, newest first."""
    found = await services.database.read(
        partial(
            file_rows.list_files,
            tenant=tenant,
            now_s=time.time(),
            limit=limit + 1,
            after=after,
            purpose=purpose,
            is_ascending=order == "asc",
        )
    )
    return _page([each.view() for each in found], limit)


@files.get("/{file_id}")
async def retrieve_file(file_id: str, services: ServicesDep, tenant: Tenant) -> FileObject:
    """Tell of a file."""
    return (await _find_file(services, tenant, file_id)).view()


@files.get("/{file_id}/content", response_class=StreamingResponse)
async def file_content(file_id: str, services: ServicesDep, tenant: Tenant) -> StreamingResponse:
    """Give the bytes of a file."""
    file = await _find_file(services, tenant, file_id)
    headers = {
        "Content-Length": str(file.size_bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    pieces = _pieces(services.objects, file.object_key)
    first = await anext(pieces, b"")  # A store that fails is told before an answer has begun.

    async def content() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(content(), media_type="application/octet-stream", headers=headers)


async def _pieces(objects: ObjectStore, key: str) -> AsyncIterator[bytes]:
    with ExitStack() as stack:
        file = await asyncio.to_thread(stack.enter_context, objects.open(key))
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


@files.delete("/{file_id}")
async def delete_file(file_id: str, services: ServicesDep, tenant: Tenant) -> FileDeletion:
    """Delete a file; refused while a batch reads it."""
    doom = partial(file_rows.doom_file, tenant=tenant, file_id=file_id, now_s=time.time())
    doomed = await services.database.write(doom)
    await asyncio.to_thread(services.objects.delete, doomed.object_key)
    await services.database.write(partial(file_rows.drop_files, files=[doomed]))
    return FileDeletion(id=file_id)


@batches.post("", openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create_batch(request: Request, services: ServicesDep, tenant: Tenant) -> BatchObject:
    """Create a batch of a file's requests; it runs by itself from here on."""
    params = await _batch_params(request)
    now_s = int(time.time())

    def create(connection: Any) -> batch_rows.BatchJob:  # noqa: ANN401 - a connection
        file = file_rows.find_file(connection, tenant, params.input_file_id, now_s, holds=True)
        if file.purpose != "batch":
            raise BatchApiError(
                f"{file.file_id} has purpose '{file.purpose}', not 'batch'", param="input_file_id"
            )
        require_open_room(connection, tenant)
        kept = params.output_expires_after
        return batch_rows.create_batch(
            connection,
            tenant=tenant,
            endpoint=params.endpoint,
            completion_window=params.completion_window,
            input_file_id=file.file_id,
            input_key=file.object_key,
            created_s=now_s,
            expires_s=now_s + window_s(params.completion_window),
            output_ttl_s=None if kept is None else kept.seconds,
            labels=params.metadata or {},
        )

    batch = await services.database.write(create)
    services.upkeep.look()
    return batch.view()


async def _batch_params(request: Request) -> BatchParams:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY_BYTES:
            raise UploadTooLargeError(f"the body is larger than {LONGEST_BODY_BYTES} bytes")
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BatchApiError("the body is not JSON") from error
    return batch_params(sent)


@batches.get("")
async def list_batches(
    services: ServicesDep,
    tenant: Tenant,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED_BATCHES)] = 20,
) -> ObjectPage:
    """List batches, newest first."""
    found = await services.database.read(
        partial(batch_rows.list_batches, tenant=tenant, limit=limit + 1, after=after)
    )
    return _page([each.view() for each in found], limit)


@batches.get("/{batch_id}")
async def retrieve_batch(batch_id: str, services: ServicesDep, tenant: Tenant) -> BatchObject:
    """Tell how far a batch is."""
    find = partial(batch_rows.find_batch, tenant=tenant, batch_id=batch_id)
    return (await services.database.read(find)).view()


@batches.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, services: ServicesDep, tenant: Tenant) -> BatchObject:
    """Cancel a batch: what runs is broken off at its engine, what has been answered is kept."""
    cancel = partial(batch_rows.cancel_batch, tenant=tenant, batch_id=batch_id, now_s=time.time())
    batch = await services.database.write(cancel)
    services.dispatcher.look()
    services.upkeep.look()
    return batch.view()


@operators.get("/batches")
async def progress(services: ServicesDep, scope: Scope) -> BatchSummary:
    """Tell how batches are going: progress, rates, deadlines, errors.

    The operator's token (`AQUA_BATCH_OPERATOR_TOKEN`) shows those of all tenants, an API key those
    of its own. Of requests and answers it tells nothing.
    """
    engines = services.engines.engines
    absent = sum(engine.absences > 0 for engine in engines)
    tell = partial(
        overview,
        tenant=scope,
        batch_rates=services.batch_rates,
        now_s=time.time(),
        engines=(len(engines), absent),
    )
    return await services.database.read(tell)


@rest.api_route(
    "/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]
)
async def refuse(path: str, request: Request) -> None:
    """Refuse what is not served."""
    parts = path.split("/")
    if parts[0] == "v1" and len(parts) > 1 and parts[1] in NOT_SERVED:
        raise NotServedError(
            f"/v1/{parts[1]} is not served by Aqua's batch service",
            remedy="It serves /v1/files, /v1/batches, /v1/models, chats, completions and "
            "embeddings.",
        )
    raise NotServedError(
        f"Unknown request URL: {request.method} /{clean_filename(path)}",
        remedy="/docs lists every path.",
    )


async def _find_file(services: BatchServices, tenant: str, file_id: str) -> file_rows.StoredFile:
    find = partial(file_rows.find_file, tenant=tenant, file_id=file_id, now_s=time.time())
    return await services.database.read(find)


def _page(found: list[Any], limit: int) -> ObjectPage:
    shown = found[:limit]
    return ObjectPage(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > limit,
    )
