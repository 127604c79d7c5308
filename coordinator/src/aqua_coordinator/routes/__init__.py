"""The REST resources, one module each; `ALL` is what the application serves."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from aqua_coordinator.routes import (
    consumers,
    events,
    health,
    heartbeats,
    leases,
    offers,
    placements,
    producers,
    profiles,
    reclaims,
)

ALL: Final[list[APIRouter]] = [
    producers.router,
    consumers.router,
    heartbeats.router,
    offers.router,
    leases.router,
    reclaims.router,
    placements.router,
    profiles.router,
    events.router,
    health.router,
]
