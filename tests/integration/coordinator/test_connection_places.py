"""How many connections a token may have, and what is kept for those that report."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import httpx
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.http.connections import MAX_STRANGERS, Connection, ConnectionLimits
from aqua_coordinator.http.request_limits import OWN_FILES
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.settings import CoordinatorSettings
from harness.asgi import as_json, client_of, error_of
from harness.ledger_room import ledger_room
from harness.members_on_paper import PaperConsumer

MOST = 16
"""Connections with a token that the process can have; a quarter is for those that report."""


class Held(NamedTuple):
    """A connection that stays, and what is sent over it."""

    connection: Connection
    http: httpx.AsyncClient

    async def read(self) -> httpx.Response:
        """A request that is no report."""
        return await self.http.get("/v1/leases")


class Callers:
    """A coordinator with few descriptors, and connections that stay."""

    def __init__(self, service: Service, tokens: Path) -> None:
        self.service = service
        self._tokens = tokens
        self.revision = 0

    def token(self, *roles: Role, member: str | None = None) -> str:
        """A fresh one."""
        token, _ = create_token(self._tokens, roles=list(roles), member=member)
        self.service.services.authenticator.refresh()
        return token

    def connect(self, token: str) -> Held:
        """A connection that has not said anything yet."""
        connection = Connection(asyncio.Transport(), strangers={}, active=set())
        return Held(connection, client_of(self.service, token, connection))

    async def report(self, held: Held, name: str) -> int:
        """The status of a consumer's report."""
        self.revision += 1
        report = PaperConsumer(name=name, revision=self.revision).report()
        return (await held.http.put(f"/v1/consumers/{name}", json=as_json(report))).status_code


@pytest.fixture
async def callers(
    store: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callers]:
    tokens = tmp_path / "tokens.json"
    create_token(tokens, roles=[Role.READER])
    settings = CoordinatorSettings(tokens_file=tokens, max_connections_per_token=5)
    files = MOST + MAX_STRANGERS + OWN_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    async with ledger_room(store.url), Service(settings, store.url).running() as service:
        yield Callers(service, tokens)


async def test_one_connection_too_many_is_told_so_and_ends_and_others_are_served(
    callers: Callers,
) -> None:
    token = callers.token(Role.CONSUMER, member="greedy")
    held = [callers.connect(token) for _ in range(5)]
    for one in held * 2:
        assert (await one.read()).status_code == 200
    answer = await callers.connect(token).read()
    assert error_of(answer).code == "service_unavailable"
    assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
    assert await callers.report(callers.connect(token), "greedy") == 200, "counted apart"
    assert (await callers.connect(callers.token(Role.READER)).read()).status_code == 200
    held.pop().connection.leave()
    assert (await callers.connect(token).read()).status_code == 200


async def test_a_part_of_all_descriptors_is_kept_for_connections_that_report(
    callers: Callers,
) -> None:
    tokens = [callers.token(Role.READER) for _ in range(4)]
    held = [callers.connect(token) for token in tokens * 5]
    codes = [(await one.read()).status_code for one in held]
    assert codes == [200] * (MOST * 3 // 4) + [503] * (20 - MOST * 3 // 4)
    heartbeats = callers.service.services.heartbeats
    for name in ("llm-0", "llm-1", "llm-2", "llm-3", "llm-4"):
        held.append(callers.connect(callers.token(Role.CONSUMER, member=name)))
        has_room = len(held) <= 20 + MOST // 4
        assert await callers.report(held[-1], name) == (200 if has_room else 503)
        assert heartbeats.is_refusing != has_room, "want of room stops the clock"


async def test_members_that_share_a_token_leave_a_part_to_others_and_readers_get_none(
    callers: Callers,
) -> None:
    shared, reader = callers.token(Role.CONSUMER), callers.token(Role.READER)
    held = [callers.connect(shared) for _ in range(MOST)]
    codes = [await callers.report(one, f"llm-{number}") for number, one in enumerate(held)]
    assert codes == [200] * (MOST * 3 // 4) + [503] * (MOST // 4)
    held += (posing := [callers.connect(reader) for _ in range(6)])
    assert [await callers.report(one, "llm-0") for one in posing] == [403] * 4 + [503] * 2
    assert not callers.service.services.heartbeats.is_refusing


async def test_tokens_that_members_share_leave_a_part_to_bound_ones_however_many_they_are(
    callers: Callers,
) -> None:
    shared = [callers.token(Role.CONSUMER) for _ in range(2)]
    held = [callers.connect(token) for token in shared * MOST]
    codes = [await callers.report(one, f"llm-{number}") for number, one in enumerate(held)]
    assert codes.count(200) == MOST * 3 // 4
    held.append(callers.connect(callers.token(Role.CONSUMER, member="bound")))
    assert await callers.report(held[-1], "bound") == 200


async def test_a_connection_that_is_lost_leaves_its_places() -> None:
    class Protocol:
        connection: Connection

        def connection_made(self, transport: Connection) -> None:
            self.connection = transport

        def data_received(self, data: bytes) -> None: ...

        def connection_lost(self, error: Exception | None) -> None: ...

    def make(app_state: dict[str, Connection]) -> Protocol:
        return Protocol()

    limits = ConnectionLimits(10.0, Metrics())
    protocol = limits.protocol(make)
    protocol.connection_made(asyncio.Transport())
    counted = Mock()
    protocol.connection.places.append(counted)
    protocol.connection_lost(None)
    counted.leave.assert_called_once_with()
