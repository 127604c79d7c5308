"""Reclaims: memory on its way back to its producer."""

from __future__ import annotations

from fastapi import APIRouter

from aqua_coordinator.services import CallerDep, IdempotencyKey, Limit, PositionCursor, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol.ids import Name
from aqua_protocol.leases import ReclaimPage, ReclaimRequest, ReclaimView

router = APIRouter(prefix="/v1/reclaims", tags=["reclaims"])


@router.post("", status_code=201)
async def open_reclaim(
    body: ReclaimRequest, caller: CallerDep, services: ServicesDep, idempotency_key: IdempotencyKey
) -> ReclaimView:
    """Ask a producer to take memory back; it learns of it in the answer to its next report."""
    caller.require(Role.OPERATOR)
    return await services.ledger.open_reclaim(body, idempotency_key=idempotency_key)


@router.get("")
async def list_reclaims(
    _: CallerDep, services: ServicesDep, cursor: PositionCursor = None, limit: Limit = 100
) -> ReclaimPage:
    """Reclaims in the order they were opened, also for a while after their end."""
    views, position = await services.ledger.reclaims(cursor=cursor, limit=limit)
    return ReclaimPage(reclaims=views, next_cursor=position)


@router.get("/{reclaim_id}")
async def get_reclaim(reclaim_id: Name, _: CallerDep, services: ServicesDep) -> ReclaimView:
    """Read one reclaim."""
    return await services.ledger.reclaim(reclaim_id)
