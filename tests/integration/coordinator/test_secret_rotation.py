"""The secret that signs lease tokens is replaced while coordinators run side by side."""

from __future__ import annotations

import base64
import time
from itertools import pairwise

import pytest

from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.capability import verify
from aqua_protocol.errors import CapabilityError
from harness.asgi import allocate, client_of, hear, join
from harness.ledger_room import ledger_room
from harness.members_on_paper import PaperConsumer, PaperProducer

OLD, NEW = "o" * 32, "n" * 32
STAGES = [(OLD, None), (OLD, NEW), (NEW, OLD), (NEW, None)]
"""The secret and the other one, in the order of a replacement; each stage reaches one after the
other, so two that follow each other run side by side."""


def coordinator(store: EmbeddedValkey, stage: tuple[str, str | None]) -> Service:
    """A coordinator that has come to this stage."""
    secret, other = stage
    settings = {"capability_secret": secret, "capability_secret_other": other}
    return Service(CoordinatorSettings.model_validate(settings), store.url)


async def attach(reported_to: Service, granted_by: Service) -> None:
    """Check the token of one coordinator with the keys of another, as the producer does."""
    producer, consumer = PaperProducer(), PaperConsumer()
    async with client_of(reported_to) as http:
        ack = await join(http, producer)
    async with client_of(granted_by) as http:
        await hear(http, consumer)
        grant = await allocate(http, consumer, "key")
    verify(
        grant.token,
        base64.b64decode(ack.capability_key),
        producer_id="producer",
        now_s=time.time(),
        min_epoch=ack.min_epoch,
    )


@pytest.mark.parametrize("stages", list(pairwise(STAGES)))
@pytest.mark.parametrize("forth", [True, False])
async def test_whichever_coordinator_signs_the_producer_takes_the_token(
    store: EmbeddedValkey, stages: tuple[tuple[str, str | None], ...], *, forth: bool
) -> None:
    before, after = (coordinator(store, stage) for stage in stages)
    async with ledger_room(store.url), before.running(), after.running():
        await attach(*((before, after) if forth else (after, before)))


async def test_a_secret_that_was_taken_out_signs_nothing_that_is_taken(
    store: EmbeddedValkey,
) -> None:
    first, last = coordinator(store, STAGES[0]), coordinator(store, STAGES[-1])
    async with ledger_room(store.url), first.running(), last.running():
        with pytest.raises(CapabilityError, match="not signed"):
            await attach(last, first)
