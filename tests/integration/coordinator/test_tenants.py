"""Tenants over the REST interface: what each sees, may change and may have."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from fastapi.routing import APIRoute

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.routes import ALL
from aqua_coordinator.routes.events import stream_events
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store.keys import KEYS
from aqua_protocol import LeaseState
from aqua_protocol.leases import LeaseGrant, Pairing, PlacementPlan, QuotaPage, ReclaimRequest
from harness.asgi import allocate, as_json, bare_request, client_of, error_of, hear, join
from harness.ledger_room import LedgerRoom, ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

TENANTS = ("red", "blue")


class Clients:
    """A coordinator with a producer and a consumer of each tenant, and a lease of each.

    Attributes:
        service: It.
        quotas: Its file of quotas.
        room: Its books.
        of: A client of each tenant, and of an operator, by name.
        tokens: Their tokens.
        leases: A lease of each tenant, on its own producer.
    """

    def __init__(self, service: Service, quotas: Path, room: LedgerRoom) -> None:
        self.service, self.quotas, self.room = service, quotas, room
        self.of: dict[str, httpx.AsyncClient] = {}
        self.tokens: dict[str, str] = {}
        self.leases: dict[str, LeaseGrant] = {}

    async def fill(self, stack: AsyncExitStack) -> None:
        """Make tokens and members."""
        path = self.service.services.settings.tokens_file
        assert path is not None
        self.tokens["operator"], _ = create_token(path, roles=[Role.OPERATOR])
        for tenant in TENANTS:
            roles = [Role.PRODUCER, Role.CONSUMER]
            self.tokens[tenant], _ = create_token(path, roles=roles, tenant=tenant)
        self.service.services.authenticator.refresh()
        for name, token in self.tokens.items():
            self.of[name] = await stack.enter_async_context(client_of(self.service, token))
        for tenant in TENANTS:
            producer = PaperProducer(name=f"{tenant}-lender", domain=f"{tenant}-domain")
            consumer = PaperConsumer(name=f"{tenant}-borrower", domain=f"{tenant}-domain")
            await join(self.of[tenant], producer)
            await hear(self.of[tenant], consumer)
            grant = self.leases[tenant] = await allocate(self.of[tenant], consumer, f"key-{tenant}")
            producer.hand_out(grant.lease)
            await join(self.of[tenant], producer)
        ledger = self.service.services.ledger
        await ledger.put_placements(
            PlacementPlan(
                pairings=[
                    Pairing(consumer_id=f"{t}-borrower", producers=[f"{t}-lender"], reason=t)
                    for t in TENANTS
                ]
            )
        )
        for tenant in TENANTS:
            request = ReclaimRequest(producer_id=f"{tenant}-lender", bytes=SLAB)
            await ledger.open_reclaim(request, idempotency_key=f"key-{tenant}")


@pytest.fixture
async def clients(store: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[Clients]:
    """Two tenants of one cohort."""
    tokens, quotas = tmp_path / "tokens.json", tmp_path / "quotas.json"
    create_token(tokens, roles=[Role.READER])
    quotas.write_text(json.dumps({"tenants": {"red": {"nominal": "256KiB"}}}))
    settings = CoordinatorSettings(tokens_file=tokens, quotas_file=quotas, max_grants_per_s=1.0)
    async with ledger_room(store.url) as room, AsyncExitStack() as stack:
        service = await stack.enter_async_context(Service(settings, store.url).running())
        clients = Clients(service, quotas, room)
        await clients.fill(stack)
        yield clients


FOR_OPERATORS: Final = ("/v1/profiles", "/v1/quarantine", "/v1/console/batches")
"""Refused to tenants."""


async def test_no_reading_shows_a_tenant_the_members_of_another(clients: Clients) -> None:
    """Every route that reads is found in the application, so that a new one is asked as well."""
    reclaims = (await clients.of["operator"].get("/v1/reclaims")).json()["reclaims"]
    ids = {
        "lease_id": clients.leases["blue"].lease.lease_id,
        "producer_id": "blue-lender",
        "consumer_id": "blue-borrower",
        "role": "producers",
        "member_id": "blue-lender",
        "reclaim_id": next(r["reclaim_id"] for r in reclaims if r["producer_id"] == "blue-lender"),
    }
    asked = 0
    for route in (route for router in ALL for route in router.routes):
        assert isinstance(route, APIRoute)
        if route.methods != {"GET"} or not route.path.startswith("/v1/"):
            continue
        if route.path == "/v1/events":
            continue
        path = route.path.format(**ids)
        answers = [await clients.of[who].get(path) for who in ("red", "operator")]
        if "{" in route.path:
            assert [answer.status_code for answer in answers] == [404, 200], route.path
        elif route.path not in {*FOR_OPERATORS, "/v1/console/timeline"}:
            assert "red" in answers[0].text, route.path
            assert "blue" in answers[1].text, route.path
            offers = {"/v1/offers", "/v1/console/happened"}
            assert ("blue" in answers[0].text) == (route.path in offers), route.path
            assert "blue-borrower" not in answers[0].text, route.path
        asked += 1
    assert asked > 10
    offers = (await clients.of["red"].get("/v1/offers")).json()["offers"]
    assert [offer["producer_id"] for offer in offers] == ["blue-lender", "red-lender"]
    for path in (*FOR_OPERATORS, "/metrics"):
        answer = await clients.of["red"].get(path)
        assert path == "/metrics" or error_of(answer).code == "forbidden"
    assert (await clients.of["red"].get("/v1/profiles?model=m")).status_code == 200


async def test_a_tenants_events_are_its_own_and_those_of_offers(clients: Clients) -> None:
    services = clients.service.services
    header = f"Bearer {clients.tokens['red']}"
    caller = services.authenticator.authenticate(header)
    await services.ledger.put_placements(PlacementPlan(pairings=[]))
    stream = aiter((await stream_events(caller, services, bare_request(), "0-0")).body_iterator)
    seen: list[dict[str, Any]] = []
    while [event["kind"] for event in seen].count("placement_changed") < 2:
        lines = str(await anext(stream)).splitlines()
        seen += [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = {event["kind"] for event in seen if "blue-lender" in event.values()}
    assert kinds == {"producer_joined"}
    assert not [event for event in seen if "blue-borrower" in event.values()]
    own = {event["kind"] for event in seen if event.get("producer_id") == "red-lender"}
    assert own == {"producer_joined", "lease_changed", "reclaim_opened"}


async def test_a_tenant_changes_nothing_of_another(clients: Clients) -> None:
    lease = clients.leases["blue"].lease
    http = clients.of["red"]
    for action in ("release", "renew"):
        answer = await http.post(
            f"/v1/leases/{lease.lease_id}/{action}", json={"epoch": lease.epoch}
        )
        assert error_of(answer).code == "unknown_resource"
    for kind, report in (
        ("producers", PaperProducer(name="blue-lender", incarnation="life-2").report()),
        ("consumers", PaperConsumer(name="blue-borrower", incarnation="life-2").report()),
    ):
        name = report.model_dump()[f"{kind[:-1]}_id"]
        answer = await http.put(f"/v1/{kind}/{name}", json=as_json(report))
        assert error_of(answer).code == "forbidden"
        answer = await http.delete(f"/v1/{kind}/{name}?incarnation=life-1")
        assert error_of(answer).code == "unknown_resource"
    offer = {"incarnation": "life-1", "revision": 99, "offered_bytes": 0}
    answer = await http.put("/v1/offers/blue-lender", json=offer)
    assert error_of(answer).code == "unknown_resource"
    view = await clients.service.services.ledger.lease(lease.lease_id)
    assert view.state is LeaseState.ACTIVE


async def test_the_quotas_file_is_followed_and_survives_the_books(
    clients: Clients, store: EmbeddedValkey
) -> None:
    services = clients.service.services

    async def quotas() -> dict[str, tuple[int | None, int]]:
        books = await services.ledger.summary()
        await services.quotas.keep(services.ledger, books.books_id, has_quotas=books.has_quotas)
        page = QuotaPage.model_validate_json((await clients.of["operator"].get("/v1/quotas")).text)
        return {view.tenant: (view.nominal_bytes, view.leased_bytes) for view in page.quotas}

    assert await quotas() == {"blue": (None, SLAB), "red": (4 * SLAB, SLAB)}
    clients.quotas.write_text(json.dumps({"tenants": {"blue": {"nominal": SLAB}}}))
    assert await quotas() == {"blue": (SLAB, SLAB), "red": (None, SLAB)}
    clients.quotas.write_text("no quotas")
    assert await quotas() == {"blue": (SLAB, SLAB), "red": (None, SLAB)}
    for command in (
        ("DEL", KEYS["quotas"]),
        ("SET", KEYS["quotas"], "junk"),
        ("HDEL", KEYS["books"], "quotas"),
    ):
        await clients.room.command(*command)
        await services.ledger.audit()
        assert await quotas() == {"blue": (SLAB, SLAB), "red": (None, SLAB)}
        assert await services.ledger.audit() == []
    async with ledger_room(store.url):
        pass
    await services.ledger.open()
    assert await quotas() == {"blue": (SLAB, 0)}


async def test_who_asks_too_often_is_told_when_to_ask_again(clients: Clients) -> None:
    """Five seconds of its rate at once, and no more; reports and other tokens are not touched."""
    codes: list[str] = []
    while "rate_limited" not in codes:
        answer = await clients.of["red"].post(
            "/v1/leases",
            json=as_json(PaperConsumer(name="red-borrower").request(64)),
            headers={"Idempotency-Key": f"more-{len(codes)}"},
        )
        codes.append(error_of(answer).code)
        assert len(codes) <= 100
    error = error_of(answer)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == str(math.ceil(error.retry_after_s or 0))
    assert "rate_limited" not in codes[:3]
    await hear(clients.of["red"], PaperConsumer(name="red-borrower", incarnation="life-2"))
    consumer = PaperConsumer(name="blue-borrower", domain="blue-domain")
    await allocate(clients.of["blue"], consumer, "another")


async def test_where_there_are_no_tenants_and_quotas_nothing_is_read_of_them(
    room: LedgerRoom,
) -> None:
    """What cannot be read would be set aside: a grant costs what it did without any of this."""
    keys = [KEYS[name] for name in ("quotas", "tenants")]
    for key in keys:
        await room.command("SET", key, "no hash")
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producer, consumer)
    await room.hear(consumer)
    await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
    producer.take_back(lease)
    await room.tell(producer)
    assert await room.command("EXISTS", *keys) == len(keys)
    await room.command("DEL", *keys)
