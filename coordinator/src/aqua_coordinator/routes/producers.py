"""Producers: members that offer memory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_coordinator.auth import Caller
from aqua_coordinator.hot_routes import hot
from aqua_coordinator.routes.pagination import Limit, NameCursor, next_name
from aqua_coordinator.services import CallerDep, Services, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol import RequestInvalidError, require_protocol_version
from aqua_protocol.ids import Name
from aqua_protocol.members import ProducerAck, ProducerReport, ProducerView
from aqua_protocol.pages import ProducerPage

router = APIRouter(prefix="/v1/producers", tags=["producers"])


async def book_producer(report: ProducerReport, caller: Caller, services: Services) -> ProducerAck:
    """Take one producer's report; shared with `heartbeats`."""
    caller.require(Role.PRODUCER, member=report.producer_id)
    require_protocol_version(report.protocol_version, who=f"producer {report.producer_id}")
    booked = await services.ledger.report_producer(report)
    services.metrics.attached(booked.attached_s)
    services.metrics.reclaimed(booked.reclaimed)
    key = await services.signer.checking_key(
        booked.books_id, report.producer_id, report.incarnation
    )
    return ProducerAck(
        books_id=booked.books_id,
        heartbeat_s=services.settings.heartbeat_s,
        ended=booked.ended,
        min_epoch=booked.min_epoch,
        capability_key=key,
        grantable=booked.grantable,
        reclaims=booked.orders,
    )


@router.put("/{producer_id}")
@hot
async def report_producer(
    producer_id: Name, body: ProducerReport, caller: CallerDep, services: ServicesDep
) -> ProducerAck:
    """Report a producer's full state: registration, heartbeat and every change."""
    if body.producer_id != producer_id:
        raise RequestInvalidError("producer_id: body and path name different producers")
    return await book_producer(body, caller, services)


@router.get("")
async def list_producers(
    _: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> ProducerPage:
    """Producers by name."""
    rows = await services.ledger.producers(cursor=cursor or "", limit=limit)
    views = [row.view for row in rows]
    return ProducerPage(
        producers=views, next_cursor=next_name([view.producer_id for view in views], limit)
    )


@router.get("/{producer_id}")
async def get_producer(producer_id: Name, _: CallerDep, services: ServicesDep) -> ProducerView:
    """One producer."""
    row = await services.ledger.producer(producer_id)
    return row.view


@router.delete("/{producer_id}", status_code=204)
async def remove_producer(
    producer_id: Name,
    incarnation: Annotated[Name, Query(description="Life of the process that takes its leave.")],
    caller: CallerDep,
    services: ServicesDep,
) -> None:
    """Leave the books; refused while consumers hold slabs."""
    caller.require(Role.PRODUCER, member=producer_id)
    await services.ledger.remove_producer(producer_id, incarnation)
