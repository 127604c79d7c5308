"""No message of a member to the coordinator has a field that could carry a prompt or a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from aqua_protocol.leases import LeaseAction, LeaseRenewal, LeaseRequest
from aqua_protocol.members import ConsumerReport, Heartbeat, OfferUpdate, ProducerReport
from aqua_protocol.wire import Wire

MESSAGES: Final[list[type[Wire]]] = [
    *(ProducerReport, ConsumerReport, Heartbeat, OfferUpdate),
    *(LeaseRequest, LeaseRenewal, LeaseAction),
]
MOST_CHARACTERS: Final = 256
"""A name or an address: some words of a prompt would fit, a page would not."""


def strings_of(schema: object, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every string in a schema, and every place where anything at all may stand."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from strings_of(one, f"{at}/{number}")
    if isinstance(schema, dict):
        is_open = schema.get("type") == "object" and schema.get("additionalProperties") is not False
        if schema.get("type") == "string" or is_open:
            yield at, schema
        for name, one in schema.items():
            yield from strings_of(one, f"{at}/{name}")


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_a_member_carries_names_and_numbers_alone(message: type[Wire]) -> None:
    loose = {
        at: schema
        for at, schema in strings_of(message.model_json_schema())
        if not ("enum" in schema or "const" in schema)
        and schema.get("maxLength", MOST_CHARACTERS + 1) > MOST_CHARACTERS
    }
    assert loose == {}
