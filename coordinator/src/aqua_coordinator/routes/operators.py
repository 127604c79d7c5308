"""What operators put in the books: the placer's plan, profiles of models, and reclaims.

And what they find there: records that were set aside, because they could not be right. A reclaim
is memory on its way back to its producer; producers open most of them themselves.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_coordinator.audit import note
from aqua_coordinator.services import CallerDep, IdempotencyKey, Limit, PositionCursor, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol.ids import Name
from aqua_protocol.leases import (
    PlacementPlan,
    QuarantinePage,
    ReclaimPage,
    ReclaimRequest,
    ReclaimView,
)
from aqua_protocol.profile import ModelProfile, Profiles

placements = APIRouter(prefix="/v1/placements", tags=["placements"])
profiles = APIRouter(prefix="/v1/profiles", tags=["profiles"])
reclaims = APIRouter(prefix="/v1/reclaims", tags=["reclaims"])
quarantine = APIRouter(prefix="/v1/quarantine", tags=["quarantine"])


@placements.put("")
async def put_placements(
    body: PlacementPlan, caller: CallerDep, services: ServicesDep
) -> PlacementPlan:
    """Replace the plan. Leases that exist stay; new ones follow it."""
    caller.require(Role.OPERATOR)
    await services.ledger.put_placements(body)
    return body


@placements.get("")
async def get_placements(_: CallerDep, services: ServicesDep) -> PlacementPlan:
    """The plan in force."""
    return await services.ledger.placements()


@profiles.put("")
async def put_profile(body: ModelProfile, caller: CallerDep, services: ServicesDep) -> ModelProfile:
    """Keep a model's profile; it replaces the one before."""
    note(model=body.model)
    caller.require(Role.OPERATOR)
    # With nulls, which tell what was not measured.
    await services.ledger.put_profile(body.model, body.model_dump_json())
    return body


@profiles.get("")
async def get_profiles(
    _: CallerDep,
    services: ServicesDep,
    model: Annotated[str, Query(max_length=256, description="One model; all if left out.")] = "",
) -> Profiles:
    """The profiles of all models, or of one."""
    found = await services.ledger.profiles(model)
    return Profiles(profiles=sorted(found, key=lambda profile: profile.model))


@reclaims.post("", status_code=201)
async def open_reclaim(
    body: ReclaimRequest, caller: CallerDep, services: ServicesDep, idempotency_key: IdempotencyKey
) -> ReclaimView:
    """Ask a producer to take memory back; it learns of it in the answer to its next report."""
    note(producer_id=body.producer_id, bytes=body.bytes)
    caller.require(Role.OPERATOR)
    view = await services.ledger.open_reclaim(body, idempotency_key=idempotency_key)
    note(reclaim_id=view.reclaim_id)
    return view


@reclaims.get("")
async def list_reclaims(
    _: CallerDep, services: ServicesDep, cursor: PositionCursor = None, limit: Limit = 100
) -> ReclaimPage:
    """Reclaims in the order they were opened, also for a while after their end."""
    views, position = await services.ledger.reclaims(cursor=cursor, limit=limit)
    return ReclaimPage(reclaims=views, next_cursor=position)


@reclaims.get("/{reclaim_id}")
async def get_reclaim(reclaim_id: Name, _: CallerDep, services: ServicesDep) -> ReclaimView:
    """Read one reclaim."""
    return await services.ledger.reclaim(reclaim_id)


@quarantine.get("")
async def list_quarantine(
    caller: CallerDep,
    services: ServicesDep,
    cursor: Annotated[
        str | None, Query(pattern=r"^\d{1,16}-\d{1,16}$", description="`next_cursor` before.")
    ] = None,
    limit: Limit = 100,
) -> QuarantinePage:
    """Records that were set aside, with the reason; oldest first, a bounded number."""
    caller.require(Role.OPERATOR)
    records, position = await services.ledger.quarantined(cursor=cursor, limit=limit)
    return QuarantinePage(records=records, next_cursor=position)
