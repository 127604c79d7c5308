"""Health and metrics: for probes and scrapers, outside of `/v1`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aqua_coordinator import __version__
from aqua_coordinator.metrics import MAX_LABELLED_MEMBERS, BooksSnapshot
from aqua_coordinator.services import Services, ServicesDep
from aqua_protocol import UnavailableError
from aqua_protocol.leases import Health
from aqua_protocol.supervision import failing_loops

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz(services: ServicesDep) -> Health:
    """Whether the process lives. A probe that fails should restart it."""
    return Health(status="ok", version=__version__, uptime_s=time.monotonic() - services.started_s)


@router.get("/readyz", response_model_exclude_defaults=True)
async def readyz(services: ServicesDep) -> Health:
    """Whether Redis takes writes and every loop runs. If not, traffic should go elsewhere.

    A coordinator that has been told to stop is not ready from that moment on.
    """
    if services.stopping.is_set():
        raise UnavailableError("this coordinator is stopping", retry_after_s=1.0)
    if failing := failing_loops():
        raise UnavailableError(
            f"not all of the work is done: {', '.join(failing)} crash again and again, or hang",
            remedy="Read its log; start it anew if that goes on.",
            retry_after_s=1.0,
            loops=list(failing),
        )
    opened = await services.ledger.probe()
    return Health(
        status="ready",
        version=__version__,
        books_id=opened.books_id,
        uptime_s=time.monotonic() - services.started_s,
        heartbeat_s=services.heartbeats.longest_s,
    )


@router.get("/metrics", response_class=Response)
async def metrics(services: ServicesDep, request: Request) -> Response:
    """Show metrics to Prometheus."""
    if not services.settings.metrics_are_open:
        header = request.headers.get("authorization")
        services.authenticator.authenticate(header).require_no_tenant()
    # One after the other: each keeps the loop and Redis busy, and anybody may ask.
    async with services.scraping:
        try:
            snapshot = await _snapshot(services)
        except UnavailableError:
            snapshot = None
        return Response(services.metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)


async def _snapshot(services: Services) -> BooksSnapshot:
    ledger, sums = services.ledger, services.member_totals
    summary = await sums.read()
    tenants = await ledger.quotas(limit=MAX_LABELLED_MEMBERS + 1)
    few = {role: n <= MAX_LABELLED_MEMBERS for role, n in summary.member_counts.items()}
    return BooksSnapshot(
        summary,
        sums.sums,
        sums.at_s,
        await ledger.producers(limit=MAX_LABELLED_MEMBERS) if few["producer"] else [],
        await ledger.consumers(limit=MAX_LABELLED_MEMBERS) if few["consumer"] else [],
        tenants if len(tenants) <= MAX_LABELLED_MEMBERS else [],
    )
