"""What is acknowledged is on every replica that was asked for; what happens when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
from pydantic import SecretStr

from aqua_coordinator.app import Service
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_protocol import LeaseState
from aqua_protocol.errors import CapacityError, StoreFullError, StoreUnavailableError
from harness.asgi import as_json, client_of
from harness.bounds import HANG_S, until
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import PaperConsumer, PaperProducer
from harness.redis_nodes import RedisNode, replicated, resume, stop
from harness.store_servers import short_directory

IMPATIENT_S = 0.3
"""How long a pipeline waits for replicas that do not come; for Redis itself it has all the time."""
LONGEST_STORE_TIMEOUT_S: Final = 60.0
"""As the settings allow."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RedisNode]]:
    """A master and two replicas; tests leave them as they were."""
    with short_directory() as directory, replicated(directory) as running:
        yield running


@asynccontextmanager
async def books(
    node: RedisNode, min_replicas: int, *, replicas_s: float = HANG_S / 2
) -> AsyncIterator[LedgerRoom]:
    """The books at a node, by a coordinator that waits for so many replicas."""
    pool = open_pool(node.url, connect_timeout_s=HANG_S, max_connections=4)
    pipeline = Pipeline(
        pool, timeout_s=HANG_S, min_replicas=min_replicas, replicas_share=replicas_s / HANG_S
    )
    pipeline.start()
    try:
        yield LedgerRoom(node.url, pipeline)
    finally:
        await pipeline.close()


@pytest.fixture
async def room(nodes: list[RedisNode]) -> AsyncIterator[LedgerRoom]:
    """Fresh books whose writes wait for both replicas; a producer and a consumer are in them."""
    async with books(nodes[0], 2) as fresh:
        await fresh.lose_books()
        await fresh.join(PaperProducer())
        await fresh.hear(PaperConsumer())
        yield fresh
        await fresh.check()


async def copies(nodes: list[RedisNode], lease_id: str) -> int:
    """On how many nodes a lease is, without any time passing."""
    return sum(int(node.command("EXISTS", f"{{aqua}}:lease:{lease_id}")) for node in nodes)


def waits(node: RedisNode) -> int:
    """How many times a node was asked to wait for its replicas."""
    return int(node.command("INFO", "commandstats")["cmdstat_wait"]["calls"])


async def test_what_is_acknowledged_is_on_every_replica(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    for _ in range(16):
        lease = (await room.grant(PaperConsumer())).lease
        assert await copies(nodes, lease.lease_id) == 3
    for view in (await room.ledger.leases())[0]:
        await room.ledger.release_lease(view.lease_id, epoch=view.epoch, as_consumer=None)
        for node in nodes:
            assert "released" in node.command("GET", f"{{aqua}}:lease:{view.lease_id}")


async def test_without_a_replica_a_grant_is_refused_under_its_key_and_then_the_same_for_all(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    consumer = PaperConsumer()
    async with (
        books(nodes[0], 2, replicas_s=IMPATIENT_S) as one,
        books(nodes[0], 2, replicas_s=IMPATIENT_S) as other,
    ):
        stop(nodes[2])
        try:
            with pytest.raises(StoreUnavailableError, match="1 replicas have") as refused:
                await one.grant(consumer, key="the-same")
            assert refused.value.retry_after_s
            # It is in the books, and yet nobody is told so: not by another connection either,
            # whose own first write comes after it.
            assert len((await one.ledger.leases())[0]) == 1
            for coordinator in (other, one, other):
                with pytest.raises(StoreUnavailableError):
                    await coordinator.grant(consumer, key="the-same")
            assert len((await one.ledger.leases())[0]) == 1
        finally:
            resume(nodes[2])
        until(lambda: nodes[0].info()["connected_slaves"] == 2, "the replica stays away")
        lease = (await room.grant(consumer, key="the-same")).lease
        assert (await other.grant(consumer, key="the-same")).lease.lease_id == lease.lease_id
        assert [view.lease_id for view in (await one.ledger.leases())[0]] == [lease.lease_id]


async def test_a_grant_that_is_not_asked_for_again_expires(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    async with books(nodes[0], 2, replicas_s=IMPATIENT_S) as impatient:
        stop(nodes[1])
        try:
            with pytest.raises(StoreUnavailableError):
                await impatient.grant(PaperConsumer(), 16, key="all")
        finally:
            resume(nodes[1])
    with pytest.raises(CapacityError):
        await room.grant(PaperConsumer(), key="one")
    await room.pass_time(15)
    assert await room.sweep() == 1
    assert (await room.grant(PaperConsumer(), 16, key="again")).lease.state is LeaseState.GRANTED


async def test_reading_goes_on_without_replicas_and_everything_else_is_refused(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    producer = PaperProducer(revision=9)
    async with books(nodes[0], 2, replicas_s=IMPATIENT_S) as coordinator:
        ledger = coordinator.ledger
        for node in nodes[1:]:
            stop(node)
        try:
            assert [row.producer_id for row in await ledger.producers()] == ["producer"]
            await ledger.leases()
            for mutation in (
                ledger.probe(),
                ledger.report_producer(producer.report()),
                ledger.report_consumer(PaperConsumer(revision=9).report()),
                ledger.sweep(silent_s=60),
                ledger.remove_consumer("consumer", "life-1"),
            ):
                with pytest.raises(StoreUnavailableError, match="0 replicas have"):
                    await mutation
        finally:
            for node in nodes[1:]:
                resume(node)
    await room.hear(PaperConsumer(revision=20))


@pytest.mark.parametrize(("setting", "value"), [("min-replicas-to-write", 3), ("maxmemory", 1000)])
async def test_after_writes_that_the_master_refuses_each_answer_still_goes_to_its_command(
    setting: str, value: int, room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    nodes[0].command("CONFIG", "SET", setting, value)
    try:
        with pytest.raises((StoreUnavailableError, StoreFullError)):
            await room.grant(PaperConsumer())
        # Reading goes on.
        answers = [await room.pipeline.command("ECHO", word) for word in "abc"]
        leases, _ = await room.ledger.leases()
    finally:
        nodes[0].command("CONFIG", "SET", setting, 0)
    assert answers == [b"a", b"b", b"c"]
    assert leases == []


async def test_those_who_wait_are_refused_together_and_not_batch_by_batch(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    async with books(nodes[0], 2, replicas_s=IMPATIENT_S) as coordinator:
        await coordinator.ledger.probe()
        before = waits(nodes[0])
        stop(nodes[1])
        try:
            calls = [coordinator.ledger.probe() for _ in range(8000)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            # The first batch has waited, and the other thirty are refused with it.
            assert waits(nodes[0]) == before + 1
        finally:
            resume(nodes[1])
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailableError}


async def test_who_reads_is_answered_behind_those_who_wait_in_vain(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    async with books(nodes[0], 2, replicas_s=IMPATIENT_S) as coordinator:
        await coordinator.ledger.probe()
        before = waits(nodes[0])
        stop(nodes[1])
        try:
            # By turns, so that every batch has both.
            calls: list[Coroutine[Any, Any, object]] = []
            for number in range(1500):
                calls.append(coordinator.ledger.producers())
                calls.append(coordinator.hear(PaperConsumer(name=f"consumer-{number}")))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert waits(nodes[0]) == before + 1
        finally:
            resume(nodes[1])
    assert {type(outcome) for outcome in outcomes[1::2]} == {StoreUnavailableError}
    assert {type(outcome) for outcome in outcomes[::2]} == {list}


async def test_reading_goes_on_while_sweeps_and_reports_wait_for_a_replica_that_is_away(
    room: LedgerRoom, nodes: list[RedisNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = nodes[0].url
    settings = CoordinatorSettings(
        redis_url=SecretStr(url), min_replicas=2, store_timeout_s=LONGEST_STORE_TIMEOUT_S
    )
    impatient = partial(Pipeline, replicas_share=IMPATIENT_S / LONGEST_STORE_TIMEOUT_S)
    monkeypatch.setattr("aqua_coordinator.app.Pipeline", impatient)
    report = as_json(PaperProducer(revision=9).report())
    reads, writes = list[int](), list[int]()
    async with Service(settings, url).running() as service, client_of(service) as http:

        async def write() -> None:
            enough = waits(nodes[0]) + 6
            while waits(nodes[0]) < enough:
                writes.append((await http.put("/v1/producers/producer", json=report)).status_code)

        stop(nodes[1])
        try:
            writing = asyncio.create_task(write())
            while not writing.done():
                reads.append((await http.get("/v1/producers")).status_code)
            await writing
        finally:
            resume(nodes[1])
    assert set(reads) == {200}
    assert set(writes) == {503}


async def test_a_master_that_was_replaced_acknowledges_nothing(
    room: LedgerRoom, nodes: list[RedisNode]
) -> None:
    """Split brain: another node is the master, and this one has not been told so."""
    old, new, other = nodes
    before = (await room.grant(PaperConsumer(), key="before")).lease
    async with (
        books(old, 2, replicas_s=IMPATIENT_S) as stale,
        books(old, 0) as careless,
        books(new, 1) as current,
    ):
        new.command("REPLICAOF", "NO", "ONE")
        other.command("REPLICAOF", "127.0.0.1", new.port)
        try:
            until(lambda: other.info()["master_link_status"] == "up", "no replica of the new one")
            with pytest.raises(StoreUnavailableError):
                await stale.grant(PaperConsumer(), key="stale")
            # The control: one that does not wait is told of a grant that the new master lacks.
            lost = (await careless.grant(PaperConsumer(), key="careless")).lease
            found, _ = await current.ledger.leases(limit=100)
            assert [view.lease_id for view in found] == [before.lease_id]
            assert lost.lease_id not in {view.lease_id for view in found}
            after = (await current.grant(PaperConsumer(), key="after")).lease
            assert after.epoch > before.epoch
        finally:
            new.command("REPLICAOF", "127.0.0.1", old.port)
            other.command("REPLICAOF", "127.0.0.1", old.port)
            for node in (new, other):
                until(lambda: node.info()["master_link_status"] == "up", "it does not return")  # noqa: B023 - at once
    await room.ledger.probe()


async def test_more_replicas_than_there_are_cannot_open_the_books(nodes: list[RedisNode]) -> None:
    async with books(nodes[0], 3, replicas_s=IMPATIENT_S) as room:
        with pytest.raises(StoreUnavailableError, match="2 replicas have what was written, not 3"):
            await Ledger(room.pipeline).open()
