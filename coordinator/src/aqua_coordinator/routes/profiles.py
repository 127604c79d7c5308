"""Profiles: what `aqua-profile` has measured, for informers and placements."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_coordinator.tokens import Role
from aqua_protocol.profile import ModelProfile, Profiles

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])


@router.put("")
async def put_profile(body: ModelProfile, caller: CallerDep, services: ServicesDep) -> ModelProfile:
    """Keep a model's profile; it replaces the one before."""
    caller.require(Role.OPERATOR)
    await services.ledger.put_profile(body)
    return body


@router.get("")
async def get_profiles(
    _: CallerDep,
    services: ServicesDep,
    model: Annotated[str, Query(max_length=256, description="One model; all if left out.")] = "",
) -> Profiles:
    """The profiles of all models, or of one."""
    found = await services.ledger.profiles(model)
    return Profiles(profiles=sorted(found, key=lambda profile: profile.model))
