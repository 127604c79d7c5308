"""Health and metrics: for probes and scrapers, outside of `/v1`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aqua_coordinator import __version__
from aqua_coordinator.metrics import BooksSnapshot
from aqua_coordinator.services import Services, ServicesDep
from aqua_protocol import UnavailableError
from aqua_protocol.leases import Health

router = APIRouter(tags=["health"])

RowT = TypeVar("RowT")

SNAPSHOT_PAGE: Final = 500
"""Members read in one script, chosen by hand; doubled, Redis keeps other callers waiting for twice
as long at each scrape."""
MAX_SNAPSHOT_MEMBERS: Final = 10_000
"""Members with gauges of their own, chosen by hand. Doubled, a scrape may take longer than the
interval between scrapes."""


@router.get("/healthz")
async def healthz(services: ServicesDep) -> Health:
    """Whether the process lives. A probe that fails should restart it."""
    return Health(status="ok", version=__version__, uptime_s=time.monotonic() - services.started_s)


@router.get("/readyz")
async def readyz(services: ServicesDep) -> Health:
    """Whether Redis answers and takes writes. A probe that fails should send traffic elsewhere.

    A coordinator that has been told to stop is not ready from that moment on.
    """
    if services.stopping.is_set():
        raise UnavailableError("this coordinator is stopping", retry_after_s=1.0)
    opened = await services.ledger.probe()
    return Health(
        status="ready",
        version=__version__,
        books_id=opened.books_id,
        uptime_s=time.monotonic() - services.started_s,
    )


@router.get("/metrics", response_class=Response)
async def metrics(services: ServicesDep, request: Request) -> Response:
    """Show metrics to Prometheus."""
    if not services.settings.metrics_are_open:
        services.authenticator.authenticate(request.headers.get("authorization"))
    # One after the other: each keeps the loop and Redis busy, and anybody may ask.
    async with services.scraping:
        try:
            snapshot = await _snapshot(services)
        except UnavailableError:
            snapshot = None
        return Response(services.metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)


async def _snapshot(services: Services) -> BooksSnapshot:
    ledger = services.ledger
    return BooksSnapshot(
        await ledger.summary(),
        await _all_pages(ledger.producers, lambda row: row.producer_id),
        await _all_pages(ledger.consumers, lambda view: view.consumer_id),
    )


async def _all_pages(
    read: Callable[..., Awaitable[list[RowT]]], name_of: Callable[[RowT], str]
) -> list[RowT]:
    rows: list[RowT] = []
    while len(rows) < MAX_SNAPSHOT_MEMBERS:
        page = await read(cursor=name_of(rows[-1]) if rows else "", limit=SNAPSHOT_PAGE)
        rows += page
        if len(page) < SNAPSHOT_PAGE:
            break
    return rows
