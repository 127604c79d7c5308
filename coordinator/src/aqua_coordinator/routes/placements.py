"""Placements: which producers the placer has chosen for which consumer."""

from __future__ import annotations

from fastapi import APIRouter

from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol.leases import PlacementPlan

router = APIRouter(prefix="/v1/placements", tags=["placements"])


@router.put("")
async def put_placements(
    body: PlacementPlan, caller: CallerDep, services: ServicesDep
) -> PlacementPlan:
    """Replace the plan. Leases that exist stay; new ones follow it."""
    caller.require(Role.OPERATOR)
    await services.ledger.put_placements(body)
    return body


@router.get("")
async def get_placements(_: CallerDep, services: ServicesDep) -> PlacementPlan:
    """The plan in force."""
    return await services.ledger.placements()
