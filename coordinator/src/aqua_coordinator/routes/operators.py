"""What operators put in the books: the placer's plan, profiles of models, and reclaims.

And what they find there: what tenants have of their quotas, and records that were set aside,
because they could not be right. A reclaim is memory on its way back to its producer; producers open
most of them themselves.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_coordinator.access.audit import note
from aqua_coordinator.access.tokens import Role
from aqua_coordinator.services import (
    MAX_PAGE,
    CallerDep,
    IdempotencyKey,
    Limit,
    NameCursor,
    PositionCursor,
    ServicesDep,
    next_name,
)
from aqua_protocol import RequestInvalidError
from aqua_protocol.ids import Name
from aqua_protocol.leases import (
    PlacementPage,
    PlacementPlan,
    QuarantinePage,
    QuotaPage,
    ReclaimPage,
    ReclaimRequest,
    ReclaimView,
)
from aqua_protocol.profile import ModelProfile, Profiles

placements = APIRouter(prefix="/v1/placements", tags=["placements"])
profiles = APIRouter(prefix="/v1/profiles", tags=["profiles"])
reclaims = APIRouter(prefix="/v1/reclaims", tags=["reclaims"])
quotas = APIRouter(prefix="/v1/quotas", tags=["quotas"])
quarantine = APIRouter(prefix="/v1/quarantine", tags=["quarantine"])


@placements.put("")
async def put_placements(
    body: PlacementPlan, caller: CallerDep, services: ServicesDep
) -> PlacementPlan:
    """Replace the plan. Leases that exist stay; new ones follow it."""
    caller.require(Role.OPERATOR)
    await services.ledger.put_placements(body)
    return body


@placements.get("", response_model_exclude_none=True)
async def get_placements(
    caller: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit | None = None
) -> PlacementPage:
    """The plan in force, by consumer; without a limit as a whole, if it fits on one page.

    To a token of a tenant the pairings of its consumers alone.

    Pages of one plan have the same `plan_hash`; read from the start again when it changes.
    """
    paged = limit is not None or cursor is not None
    plan, count, after = await services.ledger.placements(
        cursor=cursor or "", limit=limit or MAX_PAGE, as_tenant=caller.tenant
    )
    if count > MAX_PAGE and not paged:
        raise RequestInvalidError(
            f"the plan has {count} pairings, more than a page",
            remedy="Ask for pages: `limit`, then `cursor` as `next_cursor` says.",
        )
    return PlacementPage(
        plan_hash=plan.plan_hash, pairings=plan.pairings, next_cursor=after if paged else None
    )


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
    caller: CallerDep,
    services: ServicesDep,
    model: Annotated[str, Query(max_length=256, description="One model; all if left out.")] = "",
    cursor: Annotated[
        str, Query(max_length=256, description="`next_cursor` of the page before.")
    ] = "",
    limit: Limit = MAX_PAGE,
) -> Profiles:
    """The profiles of all models by name, or of one; there are never more than fit on a page.

    A token of a tenant has to name the model.
    """
    if not model:
        caller.require_no_tenant()
    found = await services.ledger.profiles(cursor=cursor, limit=limit, model=model)
    names = [profile.model for profile in found]
    return Profiles(profiles=found, next_cursor=None if model else next_name(names, limit))


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
    caller: CallerDep, services: ServicesDep, cursor: PositionCursor = None, limit: Limit = 100
) -> ReclaimPage:
    """Reclaims in the order they were opened, also for a while after their end.

    To a token of a tenant those of its producers, on pages that may be short with more to come.
    """
    views, position = await services.ledger.reclaims(
        cursor=cursor, limit=limit, as_tenant=caller.tenant
    )
    return ReclaimPage(reclaims=views, next_cursor=position)


@reclaims.get("/{reclaim_id}")
async def get_reclaim(reclaim_id: Name, caller: CallerDep, services: ServicesDep) -> ReclaimView:
    """Read one reclaim."""
    return await services.ledger.reclaim(reclaim_id, as_tenant=caller.tenant)


@quotas.get("")
async def list_quotas(
    caller: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> QuotaPage:
    """Tenants by name, with their quotas and what they have on lease; to one of them, its own."""
    views = await services.ledger.quotas(cursor=cursor or "", limit=limit, as_tenant=caller.tenant)
    return QuotaPage(quotas=views, next_cursor=next_name([view.tenant for view in views], limit))


@quarantine.get("")
async def list_quarantine(
    caller: CallerDep,
    services: ServicesDep,
    cursor: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,16}-[0-9]{1,16}$", description="`next_cursor` before.")
    ] = None,
    limit: Limit = 100,
) -> QuarantinePage:
    """Records that were set aside, with the reason; oldest first, a bounded number."""
    caller.require(Role.OPERATOR)
    records, position = await services.ledger.quarantined(cursor=cursor, limit=limit)
    return QuarantinePage(records=records, next_cursor=position)
