"""What operators put in the books: the placer's plan, and profiles of models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol.leases import PlacementPlan
from aqua_protocol.profile import ModelProfile, Profiles

placements = APIRouter(prefix="/v1/placements", tags=["placements"])
profiles = APIRouter(prefix="/v1/profiles", tags=["profiles"])


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
