"""Events: every change of the books, as server-sent events.

A stream begins where `Last-Event-ID` says, or now. The last 65,536 events are kept; a client that
was away for longer sees a gap and should read the listings anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from aqua_coordinator.access.auth import Caller
from aqua_coordinator.http.connections import Connection
from aqua_coordinator.services import CallerDep, Services, ServicesDep
from aqua_protocol import AquaError

router = APIRouter(prefix="/v1/events", tags=["events"])

KEEP_ALIVE_S: Final = 15.0
"""Below the idle timeouts of common proxies (60 s and more); doubled, it still is."""
RETRY_MS: Final = 1000
"""After which a client connects again, chosen by hand; doubled, a client sees changes a second
later after a restart."""
EVENT_ID_PATTERN: Final = r"^[0-9]{1,15}-[0-9]{1,15}$"


class EventStream(StreamingResponse):
    """Server-sent events; named so that the OpenAPI document tells their media type."""

    media_type = "text/event-stream"


@router.get("", response_class=EventStream)
async def stream_events(
    caller: CallerDep,
    services: ServicesDep,
    request: Request,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID", pattern=EVENT_ID_PATTERN, description="Go on after this event."
        ),
    ] = None,
) -> EventStream:
    """Changes of the books as they happen, while the caller's token and certificate are good.

    A token of a tenant sees offers change, and what happens to its own members and their leases.
    """
    position = last_event_id or await services.ledger.last_event_id()
    events = _stream(services, caller, request.state.connection, position)
    return EventStream(events, headers={"Cache-Control": "no-store"})


async def _stream(
    services: Services, caller: Caller, connection: Connection, position: str
) -> AsyncIterator[str]:
    services.event_watcher.listeners += 1
    try:
        yield f"retry: {RETRY_MS}\n\n"
        while not services.event_watcher.closed:
            left_s = min(services.authenticator.remaining_s(caller), connection.remaining_s())
            if not left_s:
                break
            change = services.event_watcher.next_change()
            events = await services.ledger.events(after=position)
            for event in events:
                position = event.event_id
                if not event.is_visible(caller.tenant):
                    continue
                body = event.model_dump_json(exclude_none=True)
                yield f"id: {event.event_id}\nevent: {event.kind}\ndata: {body}\n\n"
            if events:
                continue
            changed, _ = await asyncio.wait({change}, timeout=min(KEEP_ALIVE_S, left_s))
            if not changed:
                yield ": still here\n\n"
    except AquaError as error:
        # The client comes back with the id of the last event it saw.
        yield f": {error.code}\n\n"
    finally:
        services.event_watcher.listeners -= 1
