"""Stores for the coordinator's tests: one server of each kind a session, fresh books a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from harness.asgi import client_of
from harness.ledger_room import LedgerRoom, ledger_room
from harness.members_on_paper import Pair, PaperConsumer, PaperProducer
from harness.store_servers import KINDS, running_store


@pytest.fixture(scope="session", params=KINDS)
def each_store(request: pytest.FixtureRequest) -> Iterator[EmbeddedValkey]:
    """Valkey, then Redis where it is installed."""
    with running_store(request.param) as store:
        yield store


@pytest.fixture(scope="session")
def store() -> Iterator[EmbeddedValkey]:
    """The bundled Valkey."""
    with running_store() as server:
        yield server


@pytest.fixture
async def room(each_store: EmbeddedValkey) -> AsyncIterator[LedgerRoom]:
    """Fresh books, checked when the test is over."""
    async with ledger_room(each_store.url) as fresh:
        yield fresh


@pytest.fixture
async def pair(room: LedgerRoom) -> Pair:
    """A producer to lend from and a consumer that may ask."""
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    return producer, consumer


@pytest.fixture
async def service(store: EmbeddedValkey) -> AsyncIterator[Service]:
    """A coordinator without a server around it, over fresh books."""
    async with (
        ledger_room(store.url),
        Service(CoordinatorSettings(), store.url).running() as running,
    ):
        yield running


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `service`."""
    async with client_of(service) as client:
        yield client
