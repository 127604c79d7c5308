"""A coordinator called without a network."""

from __future__ import annotations

import httpx

from aqua_coordinator.app import Service


def client_of(service: Service, token: str | None = None) -> httpx.AsyncClient:
    """A client of the coordinator's gate; close it, or use it as a context manager."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=service.asgi),
        base_url="http://coordinator",
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
    )
