"""The console over HTTP: the page, who may see what, and that any coordinator shows the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.routes.events import stream_events
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store.keys import KEYS
from aqua_protocol.leases import EndedReclaim, Event, Pairing, PlacementPlan, ReclaimOutcome
from aqua_protocol.members import LoadReport, ReclaimReport
from harness.asgi import allocate, as_json, bare_request, client_of, error_of, hear, join
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

RECLAIM = ReclaimReport(
    reclaim_id="reclaim-of-the-engine",
    requested_bytes=2 * SLAB,
    returned_bytes=2 * SLAB,
    deadline_s=5.0,
    age_s=0.1,
    first_slab_ms=1.5,
    total_ms=20.25,
)
FRAGMENTS = ("/v1/console/cluster", "/v1/console/happened", "/v1/console/timeline")


async def lend(http: httpx.AsyncClient, name: str = "lender") -> PaperProducer:
    """A producer, a consumer `NAME-user` with a lease of it, and a reclaim that has ended."""
    producer = PaperProducer(name=name, domain=f"{name}-domain")
    user = PaperConsumer(name=f"{name}-user", domain=f"{name}-domain")
    await join(http, producer)
    await hear(http, user)
    grant = await allocate(http, user, f"key-{name}")
    producer.hand_out(grant.lease)
    producer.reclaims = [RECLAIM.model_copy(update={"reclaim_id": f"reclaim-of-{name}"})]
    await join(http, producer)
    return producer


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer aqua_0_0"}])
async def test_the_page_loads_nothing_from_elsewhere_and_needs_no_token(
    http: httpx.AsyncClient, header: dict[str, str]
) -> None:
    page = await http.get("/", headers=header)
    assert page.status_code == 200
    files = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(files) >= 6
    assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=", page.text)
    for path in files:
        assert path.startswith("/console/")
        answer = await http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(("text/", "image/svg+xml"))
        for name in ("content-security-policy", "x-content-type-options", "referrer-policy"):
            assert answer.headers[name] == page.headers[name]
        again = await http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_the_policy_allows_no_script_and_no_style_but_files_of_ours(
    http: httpx.AsyncClient,
) -> None:
    answers = [await http.get(path) for path in ("/", "/v1/console/cluster")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert {rules[n] for n in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


@pytest.mark.parametrize("name", ["nothing.js", "..%2F__init__.py", "README.md", "%00", "vendor"])
async def test_no_other_file_is_served(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/console/{name}")
    assert error_of(answer).code == "unknown_resource"


async def test_vendored_files_have_their_versions_and_licences(http: httpx.AsyncClient) -> None:
    for name, licence in (("htmx-4.0.1", "Zero-Clause BSD"), ("uPlot-1.6.32", "MIT License")):
        answer = await http.get(f"/console/{name}.LICENSE.txt")
        assert licence in answer.text
    script = (await http.get("/console/htmx-4.0.1.min.js")).text
    assert '"4.0.1"' in script


async def test_a_cluster_is_drawn_from_the_books(http: httpx.AsyncClient, service: Service) -> None:
    producer = await lend(http)
    load = LoadReport(queue_length=3, memory_used_bytes=0, memory_total_bytes=64 * SLAB)
    answer = await http.put(
        f"/v1/producers/{producer.name}", json=as_json(producer.report(load=load))
    )
    assert answer.status_code == 200
    await service.services.ledger.put_placements(
        PlacementPlan(
            pairings=[
                Pairing(consumer_id="lender-user", producers=["lender"], reason="<b>near</b>")
            ]
        )
    )
    drawn = (await http.get("/v1/console/cluster")).text
    assert drawn.count('class="link leased"') == 1
    bars = dict(re.findall(r'<rect class="(\w+)" x="[\d.]+%" width="([\d.]+)%"', drawn))
    assert float(bars["own"]) == pytest.approx(75.0)
    told = (await http.get("/v1/console/happened")).text
    assert "lender took back 128 KiB in 20 ms, the first of it after 1.5 ms" in told
    details = (await http.get("/v1/console/consumers/lender-user")).text
    assert "64 KiB borrowed from lender." in details
    assert "&lt;b&gt;near&lt;/b&gt;" in details
    assert "64 KiB lent to lender-user." in (await http.get("/v1/console/producers/lender")).text
    gone = await http.get("/v1/console/producers/lender-user")
    assert error_of(gone).code == "unknown_resource"


async def test_the_timeline_has_samples_and_reclaims_that_outlive_their_records(
    http: httpx.AsyncClient, service: Service
) -> None:
    await lend(http)
    ledger = service.services.ledger
    await asyncio.gather(ledger.keep_sample("1 2 3 4"), ledger.keep_sample("5 6 7 8"))
    timeline = (await http.get("/v1/console/timeline")).json()
    (one,) = timeline["reclaims"]
    assert one["reclaim"]["reclaim_id"] == "reclaim-of-lender"
    assert (one["reclaim"]["first_slab_ms"], one["reclaim"]["total_ms"]) == (1.5, 20.25)
    assert one["sentence"].startswith("lender took back 128 KiB")
    # The second came within the ten seconds of the first, from wherever.
    assert len({len(timeline[name]) for name in timeline if name not in {"now_s", "reclaims"}}) == 1
    assert timeline["at_s"] == sorted(timeline["at_s"])
    assert timeline["offered_bytes"].count(5) == 0
    assert timeline["leased_bytes"][-1] == SLAB


async def test_the_end_of_a_reclaim_is_an_event_with_its_figures(
    http: httpx.AsyncClient, service: Service
) -> None:
    await lend(http)
    services = service.services
    caller = services.authenticator.authenticate(None)
    stream = aiter((await stream_events(caller, services, bare_request(), "0-0")).body_iterator)
    found: list[dict[str, Any]] = []
    while not found:
        lines = str(await anext(stream)).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        found = [event for event in events if event["kind"] == "reclaim_closed"]
    event = Event.model_validate(found[0])
    assert event.producer_id == "lender"
    assert isinstance(event.reclaim, EndedReclaim)
    assert event.reclaim.outcome is ReclaimOutcome.RETURNED
    assert event.reclaim.total_ms == 20.25


async def test_what_is_no_entry_is_passed_over(
    http: httpx.AsyncClient, store: EmbeddedValkey
) -> None:
    await lend(http)
    async with Redis.from_url(store.url) as redis:
        for name in ("reclaim_history", "samples", "events"):
            for word in (b"odd", b"a b c", b"\xff"):
                await redis.xadd(KEYS[name], {"reclaim": word, "sums": word})
    for path in FRAGMENTS:
        assert (await http.get(path)).status_code == 200


@pytest.fixture
async def guarded(store: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """Clients of two coordinators over one Redis, by the name of their token."""
    tokens = tmp_path / "tokens.json"
    made = {"reader": create_token(tokens, roles=[Role.READER])[0]}
    roles = [Role.PRODUCER, Role.CONSUMER]
    for tenant in ("red", "blue"):
        made[tenant] = create_token(tokens, roles=roles, tenant=tenant)[0]
    settings = CoordinatorSettings(tokens_file=tokens, silent_member_s=3600)
    async with ledger_room(store.url), AsyncExitStack() as stack:
        found: dict[str, Any] = {}
        for number in (1, 2):
            service = await stack.enter_async_context(Service(settings, store.url).running())
            for name, token in (*made.items(), ("nobody", None)):
                client = await stack.enter_async_context(client_of(service, token))
                found[f"{name}{number}"] = client
        for tenant in ("red", "blue"):
            await lend(found[f"{tenant}1"], tenant)
        yield found


async def test_what_is_of_the_cluster_needs_a_token_and_the_page_does_not(
    guarded: dict[str, httpx.AsyncClient],
) -> None:
    assert (await guarded["nobody1"].get("/")).status_code == 200
    for path in (*FRAGMENTS, "/v1/console/producers/red", "/v1/events"):
        refused = await guarded["nobody1"].get(path)
        assert error_of(refused).code == "unauthenticated"
        asked = await guarded["nobody1"].get(path, params={"token": "aqua_0_0"})
        assert asked.status_code == 401


async def test_a_tenant_sees_its_own_and_a_reader_everything(
    guarded: dict[str, httpx.AsyncClient],
) -> None:
    for path in FRAGMENTS:
        assert {"red", "blue"} <= set(
            re.findall("red|blue", (await guarded["reader1"].get(path)).text)
        )
        own = (await guarded["red1"].get(path)).text
        assert "red" in own
        assert "blue-user" not in own
        # That an offer was made is for all to see, as in /v1/offers.
        assert ("blue" in own) == (path == "/v1/console/happened")
        assert "blue took back" not in own
    seen = await guarded["red1"].get("/v1/console/producers/blue")
    assert error_of(seen).code == "unknown_resource"
    timeline = (await guarded["red1"].get("/v1/console/timeline")).json()
    assert len(timeline["at_s"]) == 1


async def test_every_coordinator_of_one_redis_shows_the_same(
    guarded: dict[str, httpx.AsyncClient],
) -> None:
    for path in FRAGMENTS[:2]:
        texts = {(await guarded[f"reader{number}"].get(path)).text for number in (1, 2)}
        assert len(texts) == 1
    first, second = [
        (await guarded[f"reader{n}"].get("/v1/console/timeline")).json() for n in (1, 2)
    ]
    assert first["reclaims"] == second["reclaims"] != []
