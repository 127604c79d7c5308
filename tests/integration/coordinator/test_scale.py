"""What the size of a cluster may not change: the work of a scrape, of a listing, of a page."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from aqua_coordinator import routes
from aqua_coordinator.app import Service
from aqua_coordinator.metrics import MAX_LABELLED_MEMBERS
from aqua_coordinator.services import MAX_PAGE
from aqua_coordinator.store import member_totals
from aqua_protocol.members import MAX_MEMBERS_PER_HEARTBEAT, Heartbeat
from harness.asgi import as_json, error_of
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer


def paged_paths() -> set[str]:
    """Every listing: what is read without naming one thing, but the stream and the console."""
    return {
        route.path
        for router in routes.ALL
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ())
        if route.path.startswith("/v1/") and "{" not in route.path and "console" not in route.tags
    } - {"/v1/events"}


async def fill(http: httpx.AsyncClient, number: int) -> None:
    """Let `number` producers and as many consumers report."""
    for first in range(0, number, MAX_MEMBERS_PER_HEARTBEAT):
        names = range(first, min(first + MAX_MEMBERS_PER_HEARTBEAT, number))
        reports = Heartbeat(
            producers=[PaperProducer(f"p{one}").report() for one in names],
            consumers=[
                PaperConsumer(f"c{one}").report(wanted_bytes=2, spilled_bytes=3) for one in names
            ],
        )
        (await http.post("/v1/heartbeats", json=as_json(reports))).raise_for_status()


async def scrape(http: httpx.AsyncClient) -> dict[str, list[float]]:
    """The values of every gauge of the books, by name."""
    text = (await http.get("/metrics")).text
    return {
        family.name: [sample.value for sample in family.samples]
        for family in text_string_to_metric_families(text)
        if family.type == "gauge"
    }


async def test_a_scrape_shows_members_while_they_are_few_and_sums_however_many_they_are(
    http: httpx.AsyncClient,
) -> None:
    shown = {}
    for number in (MAX_LABELLED_MEMBERS, MAX_LABELLED_MEMBERS + 1, member_totals.MEMBERS_AT_ONCE):
        await fill(http, number)
        gauges = await scrape(http)
        assert gauges["aqua_members"] == [number, number]
        sums = {"offered": 16 * SLAB, "leased": 0, "wanted": 2, "spilled_host": 3}
        for name, each in sums.items():
            assert gauges[f"aqua_{name}_bytes"] == [number * each], (number, name)
        shown[number] = sum(map(len, gauges.values()))
        assert len(gauges["aqua_producer_offered_bytes"]) in {0, number}
    few, some, many = shown.values()
    assert few > MAX_LABELLED_MEMBERS * 7
    assert some == many < 200


async def test_a_plan_comes_in_pages_and_whole_only_while_it_fits_on_one(
    http: httpx.AsyncClient,
) -> None:
    names = sorted(f"c{number}" for number in range(MAX_PAGE + 1))
    pairings = [
        {"consumer_id": name, "producers": ["p1", "p0"], "reason": "near" if at % 2 else ""}
        for at, name in enumerate(names)
    ]
    for count in (MAX_PAGE, MAX_PAGE + 1):
        plan = {"plan_hash": f"plan-{count}", "pairings": pairings[:count]}
        (await http.put("/v1/placements", json=plan)).raise_for_status()
        whole = await http.get("/v1/placements")
        if count == MAX_PAGE:
            assert whole.json() == plan
        else:
            assert error_of(whole).code == "request_invalid"
        read = []
        params: dict[str, str] = {"limit": "300"}
        while True:
            page = (await http.get("/v1/placements", params=params)).json()
            assert page["plan_hash"] == plan["plan_hash"]
            assert 0 < len(page["pairings"]) <= 300
            read += page["pairings"]
            if "next_cursor" not in page:
                break
            params["cursor"] = page["next_cursor"]
        assert read == plan["pairings"]
    for limit in (0, MAX_PAGE + 1):
        refused = await http.get("/v1/placements", params={"limit": limit})
        assert error_of(refused).code == "request_invalid"


async def test_profiles_come_in_pages_by_name(http: httpx.AsyncClient) -> None:
    models = [f"org/m{number}" for number in (3, 1, 2, 5, 4)]
    for model in models:
        await http.put("/v1/profiles", json={"model": model, "label": "neutral"})
    read = []
    page: dict[str, Any] = {"next_cursor": ""}
    while (cursor := page["next_cursor"]) is not None:
        page = (await http.get("/v1/profiles", params={"limit": 2, "cursor": cursor})).json()
        read.append([profile["model"] for profile in page["profiles"]])
    assert read == [["org/m1", "org/m2"], ["org/m3", "org/m4"], ["org/m5"]]
    whole = (await http.get("/v1/profiles")).json()
    assert [profile["model"] for profile in whole["profiles"]] == sorted(models)
    assert whole["next_cursor"] is None


@pytest.mark.parametrize("path", sorted(paged_paths()))
async def test_no_listing_gives_more_than_a_page(http: httpx.AsyncClient, path: str) -> None:
    most = (await http.get(path, params={"limit": MAX_PAGE})).raise_for_status()
    assert most.json().get("next_cursor") is None
    refused = await http.get(path, params={"limit": MAX_PAGE + 1})
    assert error_of(refused).code == "request_invalid"


async def test_readiness_tells_the_heartbeat_where_it_is_not_the_usual(
    http: httpx.AsyncClient, service: Service
) -> None:
    assert "heartbeat_s" not in (await http.get("/readyz")).json()
    # What the sweep keeps, without 400 members.
    service.services.heartbeats.shortest_s = 2.5
    assert (await http.get("/readyz")).json()["heartbeat_s"] == 2.5


async def calls_in(room: LedgerRoom) -> dict[str, int]:
    """How often Redis has carried out each command since `CONFIG RESETSTAT`, in steps too."""
    lines = (await room.command("INFO", "commandstats")).decode().splitlines()
    rows = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if ":calls=" in line)
    return {name: int(rest.partition(",")[0]) for name, rest in rows}


async def test_sums_are_read_in_rounds_of_bounded_parts_and_are_those_of_a_full_one(
    room: LedgerRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_totals, "MEMBERS_A_PART", 3)
    monkeypatch.setattr(member_totals, "MEMBERS_AT_ONCE", 3)
    producers = [PaperProducer(f"p{number}", slabs=number) for number in range(1, 9)]
    for producer in producers:
        await room.join(producer)
    consumer = PaperConsumer()
    await room.hear(consumer, wanted_bytes=5)
    await room.grant(consumer, 8)
    running = member_totals.MemberTotals(room.ledger)
    for _ in range(2):
        for _ in range(3):
            assert (await running.read()).member_counts == {"producer": 8, "consumer": 1}
            before = dict(running.sums)
            await room.command("CONFIG", "RESETSTAT")
            await running.read_part()
            assert (await calls_in(room)).get("hmget", 0) <= 1 + 3 + 1
        assert running.sums == before
        await running.read_part()
        slabs = sum(producer.slabs for producer in producers)
        assert running.sums["offered_bytes"] == slabs * SLAB
        assert (running.sums["leased_bytes"], running.sums["wanted_bytes"]) == (8 * SLAB, 5)
        await room.tell(producers[0], offered_bytes=3 * SLAB)
        producers[0].slabs = 3


async def test_what_a_consumer_has_on_lease_is_kept_and_not_added_up_when_it_is_read(
    room: LedgerRoom,
) -> None:
    producer, consumer = await room.join(PaperProducer(slabs=64)), PaperConsumer()
    await room.hear(consumer)
    grants = [(await room.grant(consumer, 2)).lease for _ in range(20)]
    await room.command("CONFIG", "RESETSTAT")
    assert (await room.ledger.consumer("consumer")).leased_bytes == 40 * SLAB
    assert "zrange" not in await calls_in(room)
    # Between two reports of the consumer.
    for lease in grants[:5]:
        await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
    producer.hand_out(grants[5], slabs=1)
    await room.tell(producer)
    assert (await room.ledger.consumer("consumer")).leased_bytes == 29 * SLAB


async def test_a_consumer_that_comes_back_finds_what_was_booked_for_it_meanwhile(
    room: LedgerRoom,
) -> None:
    producer, consumer = await room.join(PaperProducer()), PaperConsumer()
    await room.hear(consumer)
    lease = await room.attached(producer, consumer, 3)
    await room.pass_time(21)
    await room.tell(producer)
    await room.sweep()
    assert await room.ledger.consumers() == []
    producer.hand_out(lease, slabs=2)
    await room.tell(producer)
    await room.hear(consumer)
    assert (await room.ledger.consumer("consumer")).leased_bytes == 2 * SLAB
