"""The REST resources; `ALL` is what the application serves."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from aqua_coordinator.routes import console, events, health, leases, members, operators

ALL: Final[list[APIRouter]] = [
    *(members.producers, members.consumers, members.heartbeats, members.offers),
    *(leases.router, operators.reclaims, operators.placements, operators.profiles),
    *(operators.quotas, operators.quarantine, events.router, health.router),
    *(console.router, console.page),
]
