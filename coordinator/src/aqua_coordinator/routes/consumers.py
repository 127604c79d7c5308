"""Consumers: members that page into memory on lease."""

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
from aqua_protocol.members import ConsumerAck, ConsumerReport, ConsumerView
from aqua_protocol.pages import ConsumerPage

router = APIRouter(prefix="/v1/consumers", tags=["consumers"])


async def book_consumer(report: ConsumerReport, caller: Caller, services: Services) -> ConsumerAck:
    """Take one consumer's report; shared with `heartbeats`."""
    caller.require(Role.CONSUMER, member=report.consumer_id)
    require_protocol_version(report.protocol_version, who=f"consumer {report.consumer_id}")
    booked = await services.ledger.report_consumer(report)
    return ConsumerAck(
        books_id=booked.books_id,
        heartbeat_s=services.settings.heartbeat_s,
        ended=booked.ended,
        available_bytes=booked.available_bytes,
    )


@router.put("/{consumer_id}")
@hot
async def report_consumer(
    consumer_id: Name, body: ConsumerReport, caller: CallerDep, services: ServicesDep
) -> ConsumerAck:
    """Report a consumer's full state; every lease it names is renewed."""
    if body.consumer_id != consumer_id:
        raise RequestInvalidError("consumer_id: body and path name different consumers")
    return await book_consumer(body, caller, services)


@router.get("")
async def list_consumers(
    _: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> ConsumerPage:
    """Consumers by name."""
    views = await services.ledger.consumers(cursor=cursor or "", limit=limit)
    return ConsumerPage(
        consumers=views, next_cursor=next_name([view.consumer_id for view in views], limit)
    )


@router.get("/{consumer_id}")
async def get_consumer(consumer_id: Name, _: CallerDep, services: ServicesDep) -> ConsumerView:
    """One consumer."""
    return await services.ledger.consumer(consumer_id)


@router.delete("/{consumer_id}", status_code=204)
async def remove_consumer(
    consumer_id: Name,
    incarnation: Annotated[Name, Query(description="Life of the process that takes its leave.")],
    caller: CallerDep,
    services: ServicesDep,
) -> None:
    """Leave the books, and give up every right that is left."""
    caller.require(Role.CONSUMER, member=consumer_id)
    await services.ledger.remove_consumer(consumer_id, incarnation)
