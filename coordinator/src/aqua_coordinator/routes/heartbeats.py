"""Heartbeats: reports of many members in one call, for a node agent that speaks for its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import APIRouter

from aqua_coordinator.hot_routes import hot
from aqua_coordinator.routes.consumers import book_consumer
from aqua_coordinator.routes.producers import book_producer
from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_protocol import AquaError, ErrorBody, UnavailableError
from aqua_protocol.members import Heartbeat, HeartbeatAck

router = APIRouter(prefix="/v1/heartbeats", tags=["heartbeats"])

AckT = TypeVar("AckT")


@router.post("")
@hot
async def heartbeat(body: Heartbeat, caller: CallerDep, services: ServicesDep) -> HeartbeatAck:
    """Take many reports; one that is refused does not spoil the others."""
    producers = [_one(book_producer(report, caller, services)) for report in body.producers]
    consumers = [_one(book_consumer(report, caller, services)) for report in body.consumers]
    return HeartbeatAck(
        producers=await asyncio.gather(*producers), consumers=await asyncio.gather(*consumers)
    )


async def _one(booking: Awaitable[AckT]) -> AckT | ErrorBody:
    try:
        return await booking
    except UnavailableError:
        # The store's absence is no fault of one report: the call fails as a whole.
        raise
    except AquaError as error:
        return error.to_body()
