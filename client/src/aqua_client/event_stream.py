"""Server-sent events, line by line, as the coordinator sends them.

Source: WHATWG HTML, "Server-sent events", section 9.2.6, as far as the coordinator uses it: each
event carries one `data` line, which is a whole `Event`.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from aqua_protocol.errors import UnavailableError
from aqua_protocol.leases import Event

SILENCE_S: Final = 45.0
"""A stream silent for longer than this is broken: three of the coordinator's signs of life (15 s).
Doubled, a dead connection is noticed a minute later; halved, a slow proxy cuts good streams."""


def stream_request(after: str | None) -> dict[str, Any]:
    """Arguments of `stream` of either httpx client: from behind event `after` on, or from now."""
    return {
        "method": "GET",
        "url": "/v1/events",
        "headers": {} if after is None else {"Last-Event-ID": after},
        "timeout": SILENCE_S,
    }


def event_of(line: str) -> Event | None:
    """The event of a line; None for lines that carry none.

    Raises:
        UnavailableError: The data is not an event of this version.
    """
    name, _, data = line.partition(":")
    if name != "data":
        return None
    try:
        return Event.model_validate_json(data)
    except ValidationError as error:
        raise UnavailableError(
            f"the event stream carries what is no event: {data[:80]!r}",
            remedy="Check that AQUA_COORDINATOR_URL names an Aqua coordinator of this version.",
        ) from error


def stream_ended(url: str) -> UnavailableError:
    """The coordinator closed the stream, as it does when it stops."""
    return UnavailableError(f"the coordinator at {url} closed the event stream")
