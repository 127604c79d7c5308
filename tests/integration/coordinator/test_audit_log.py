"""The audit log: every change, who asked for it, and what came of it; nothing that is secret."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from fastapi.routing import APIRoute

from aqua_coordinator import routes
from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol import ConfigError
from harness.asgi import allocate, as_json, client_of, error_of, hear, join
from harness.bounds import HANG_S
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

READING: Final = {"GET", "HEAD"}
CHANGES: Final = [
    (method, route.path)
    for router in routes.ALL
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted((route.methods or set()) - READING)
]


class Audited:
    """A coordinator without a server, its tokens and its log."""

    def __init__(self, store: EmbeddedValkey, directory: Path) -> None:
        self.tokens, self.log = directory / "tokens.json", directory / "audit.log"
        self.operator, entry = create_token(self.tokens, roles=[Role.OPERATOR])
        self.operator_id = entry.token_id
        self.member, _ = create_token(self.tokens, roles=[Role.CONSUMER], member="consumer")
        settings = CoordinatorSettings(tokens_file=self.tokens, audit_log=str(self.log))
        self.service = Service(settings, store.url)

    def lines(self) -> list[dict[str, Any]]:
        """What is in the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def audited(store: EmbeddedValkey, tmp_path: Path) -> Audited:
    """A fresh one."""
    return Audited(store, tmp_path)


async def test_every_change_is_a_line_with_who_what_on_what_and_its_outcome(
    audited: Audited, store: EmbeddedValkey
) -> None:
    producer, consumer = PaperProducer(), PaperConsumer()
    async with ledger_room(store.url), audited.service.running():
        async with client_of(audited.service, audited.operator) as http:
            await join(http, producer)
        async with client_of(audited.service, audited.member) as http:
            await hear(http, consumer)
            lease = (await allocate(http, consumer, "key")).lease
            assert (await http.get("/v1/leases")).status_code == 200
            refused = await http.put("/v1/consumers/other", json=as_json(consumer.report()))
            assert error_of(refused).code == "request_invalid"
            many = {"consumers": [as_json(PaperConsumer(name="other").report())]}
            assert (await http.post("/v1/heartbeats", json=many)).status_code == 200
            path = f"/v1/leases/{lease.lease_id}"
            await http.post(f"{path}/release", json={"epoch": lease.epoch})
            assert (await http.post(f"{path}/revoke", json={"epoch": lease.epoch})).is_error
    lines = audited.lines()
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("PUT", "/v1/producers/producer", 200),
        ("PUT", "/v1/producers/producer", 200),
        ("PUT", "/v1/consumers/consumer", 200),
        ("POST", "/v1/leases", 201),
        ("PUT", "/v1/consumers/other", 422),
        ("POST", "/v1/heartbeats", 200),
        ("POST", f"/v1/leases/{lease.lease_id}/release", 200),
        ("POST", f"/v1/leases/{lease.lease_id}/revoke", 403),
    ]
    first, *_, grant, invalid, heartbeat, _, revoke = lines
    assert (first["token"], first["member"]) == (audited.operator_id, None)
    assert first["peer"] == "127.0.0.1"
    assert grant["member"] == "consumer"
    assert (grant["consumer_id"], grant["producer_id"]) == ("consumer", "producer")
    assert (grant["lease_id"], grant["bytes"]) == (lease.lease_id, SLAB)
    assert invalid["code"] == "request_invalid"
    assert heartbeat["consumers"] == {"other": "forbidden"}
    assert revoke["code"] == "forbidden"


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_each_operation_that_changes_something_leaves_a_line(
    audited: Audited, store: EmbeddedValkey, method: str, path: str
) -> None:
    where = path.format(producer_id="some", consumer_id="some", lease_id="some", reclaim_id="some")
    async with (
        ledger_room(store.url),
        audited.service.running(),
        client_of(audited.service, audited.operator) as http,
    ):
        answer = await http.request(method, where, headers={"Idempotency-Key": "key"})
    (line,) = audited.lines()
    assert (line["method"], line["path"], line["status"]) == (method, where, answer.status_code)


async def test_readings_strangers_and_secrets_leave_none(
    audited: Audited, store: EmbeddedValkey
) -> None:
    async with ledger_room(store.url), audited.service.running():
        async with client_of(audited.service) as http:
            assert (await http.post("/v1/leases", json={})).status_code == 401
        async with client_of(audited.service, audited.operator) as http:
            for path in ("/v1/leases", "/v1/producers", "/healthz"):
                assert (await http.get(path)).status_code == 200
            assert audited.lines() == []
            producer = PaperProducer()
            ack = await join(http, producer)
            await hear(http, PaperConsumer())
            grant = await allocate(http, PaperConsumer(), "hush-key")
            content = {"note": "hush-content", "epoch": 1}
            await http.post("/v1/leases/some/release?hush=query", json=content)
    text = audited.log.read_text()
    assert text.count("\n") == 5
    secret = audited.operator.split("_", 2)[2]
    for hidden in (secret, ack.capability_key, grant.token, "hush"):
        assert hidden not in text
    assert audited.log.stat().st_mode & 0o777 == 0o600


async def test_a_log_that_is_moved_away_goes_on_in_a_new_file(
    audited: Audited, store: EmbeddedValkey, tmp_path: Path
) -> None:
    async with (
        ledger_room(store.url),
        audited.service.running(),
        client_of(audited.service, audited.operator) as http,
    ):
        await hear(http, PaperConsumer())
        moved = audited.log.rename(tmp_path / "audit.log.1")
        await hear(http, PaperConsumer())
        assert moved.read_text().count("\n") == 1
        assert len(audited.lines()) == 1
        assert audited.log.stat().st_mode & 0o777 == 0o600


async def test_a_log_that_cannot_be_written_is_counted_and_stops_nobody(
    audited: Audited, store: EmbeddedValkey
) -> None:
    async with (
        ledger_room(store.url),
        audited.service.running(),
        client_of(audited.service, audited.operator) as http,
    ):
        await hear(http, PaperConsumer())
        audited.log.unlink()
        audited.log.mkdir()
        await hear(http, PaperConsumer())
        await hear(http, PaperConsumer())
        metrics = await http.get("/metrics")
        assert "aqua_coordinator_audit_failures_total 2.0" in metrics.text
        audited.log.rmdir()
        await hear(http, PaperConsumer())
        assert len(audited.lines()) == 1


async def test_a_full_disk_stops_nobody(store: EmbeddedValkey) -> None:
    full = Service(CoordinatorSettings(audit_log="/dev/full"), store.url)
    async with ledger_room(store.url), full.running(), client_of(full) as http:
        await hear(http, PaperConsumer())
        metrics = await http.get("/metrics")
        assert "aqua_coordinator_audit_failures_total 1.0" in metrics.text


def test_a_place_that_cannot_be_written_is_told_at_the_start(
    store: EmbeddedValkey, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="audit log") as caught:
        Service(CoordinatorSettings(audit_log=str(tmp_path / "no" / "where")), store.url)
    assert "AQUA_AUDIT_LOG" in caught.value.remedy


def test_what_was_answered_is_in_the_log_of_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    with data_dir() as books, CoordinatorProcess(books, AQUA_AUDIT_LOG=str(log)) as coordinator:
        url = f"{coordinator.url}/v1/consumers/consumer"
        report = PaperConsumer().report().model_dump(mode="json")
        answered = 0
        give_up_s = time.monotonic() + HANG_S
        with httpx.Client(trust_env=False, timeout=HANG_S) as http:
            while answered < 20 and time.monotonic() < give_up_s:
                answered += http.put(url, json=report).status_code < 500
        coordinator.kill()
        assert log.read_text().count("\n") == answered == 20
