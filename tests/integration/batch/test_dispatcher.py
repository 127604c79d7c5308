"""The dispatcher on a database whose answers come late, against a real engine process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from sqlalchemy import Connection

from aqua_batch.service.dispatch import dispatcher as dispatch
from aqua_batch.service.dispatch.dispatcher import Dispatcher
from aqua_batch.service.dispatch.engines import EngineEndpoint, EnginePool
from aqua_batch.service.dispatch.metrics import BatchMetrics
from aqua_batch.service.files.lines import InputReader
from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.rows.batch_rows import (
    BatchJob,
    cancel_batch,
    claim_batch,
    create_batch,
    find_batch,
)
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import (
    LeasedRequest,
    active_batches,
    add_worker,
    free_dead_workers,
    lease_requests,
)
from aqua_protocol.errors import StoreUnavailableError
from harness.batch_service import chat_line
from harness.bounds import HANG_S
from harness.counting_server import CountingServer

ResultT = TypeVar("ResultT")


class LateDatabase(Database):
    """What a look at batches found is told once something that was leased since is ready to run."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.looked = asyncio.Event()
        self.is_leased = False
        self.told = asyncio.Event()

    async def read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        found = await super().read(work)
        if isinstance(work, partial) and work.func is active_batches and not self.told.is_set():
            self.looked.set()
            await self.told.wait()
        return found

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        done = await super().write(work)
        if isinstance(work, partial) and work.func is lease_requests and done:
            self.is_leased = self.looked.is_set()
        return done


class LostAnswerDatabase(Database):
    """Its first lease of requests is written, and the answer lost, as when a server dies then."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lost = 0

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        done = await super().write(work)
        if isinstance(work, partial) and work.func is lease_requests and done and not self.lost:
            self.lost = len(cast("list[object]", done))
            raise StoreUnavailableError("the database has gone away", remedy="Try again.")
        return done


class AskedPool(EnginePool):
    """Engines that tell when a place was asked for, which is for requests that are ready."""

    def __init__(self, url: str, database: LateDatabase) -> None:
        super().__init__([url], places=1, api_key=None, timeout_s=HANG_S)
        self._database = database

    def take(self, model: str | None) -> EngineEndpoint | None:
        if self._database.is_leased:
            self._database.told.set()
        return super().take(model)


def dispatcher_of(database: Database, objects: ObjectStore, engines: EnginePool) -> Dispatcher:
    """One whose leases outlast the test, and which asks for each answer once."""
    return Dispatcher(database, objects, engines, BatchMetrics(), lease_s=HANG_S, max_attempts=1)


async def add_batch(
    database: Database,
    objects: ObjectStore,
    key: str,
    model: str = "m",
    prompt: str | None = None,
) -> BatchJob:
    """A batch of a single request, ready to run; its prompt is the input's key or another."""
    with objects.create(key) as file:
        file.write(chat_line(key, prompt or key, model=model))
    values: dict[str, Any] = {
        "tenant": "red",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "input_file_id": "file",
        "input_key": key,
        "created_s": 0,
        "expires_s": 2**40,
        "output_ttl_s": None,
        "labels": {},
    }
    await database.write(lambda connection: create_batch(connection, **values))
    batch = await database.write(partial(claim_batch, worker="reader", now_s=0.0))
    assert batch is not None
    assert await InputReader(batch, objects, 10).read(database, time.time)
    return batch


async def test_a_request_leased_amid_a_look_at_batches_is_kept(tmp_path: Path) -> None:
    database = LateDatabase(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer() as server:
        engines = AskedPool(server.url, database)
        dispatcher = dispatcher_of(database, objects, engines)
        async with engines, dispatcher.running():
            first = await add_batch(database, objects, "hold first")
            dispatcher.look()
            await asyncio.to_thread(server.wait_for, "began", 1)
            dispatcher.look()
            await asyncio.wait_for(database.looked.wait(), HANG_S)
            second = await add_batch(database, objects, "second")
            dispatcher.look()
            await asyncio.wait_for(database.told.wait(), HANG_S)
            await asyncio.to_thread(server.release, "first")
            async with asyncio.timeout(HANG_S):  # An answer is sent before it is written down.
                for each in (first, second):
                    find = partial(find_batch, tenant="red", batch_id=each.batch_id)
                    while not (await database.read(find)).completed:
                        pass
    database.close()


async def test_requests_whose_lease_was_never_heard_of_run_all_the_same(tmp_path: Path) -> None:
    database = LostAnswerDatabase(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer() as server:
        engines = EnginePool([server.url], places=1, api_key=None, timeout_s=HANG_S)
        dispatcher = dispatcher_of(database, objects, engines)
        async with engines, dispatcher.running():
            await add_batch(database, objects, "only")
            dispatcher.look()
            await asyncio.to_thread(server.wait_for, "ended", 1)
    assert database.lost == 1
    database.close()


class CountedPool(EnginePool):
    """Engines that count the looks at them."""

    def __init__(self, *urls: str, places: int = 1) -> None:
        super().__init__(urls, places=places, api_key=None, timeout_s=HANG_S)
        self.looks = 0
        self.looked = asyncio.Condition()

    async def look(self) -> None:
        await super().look()
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()


class CountedDatabase(Database):
    """It counts attempts to lease, and what was leased, by the first word of its input."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.leases = 0
        self.leased: Counter[str] = Counter()
        self.changed = asyncio.Condition()

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        done = await super().write(work)
        if isinstance(work, partial) and work.func is lease_requests:
            async with self.changed:
                self.leases += 1
                found = cast("list[LeasedRequest]", done)
                self.leased.update(each.input_key.split()[0] for each in found)
                self.changed.notify_all()
        return done

    async def until_leased(self, kind: str, count: int) -> None:
        """Wait until so many of a kind are."""
        async with self.changed:
            reached = self.changed.wait_for(lambda: self.leased[kind] >= count)
            await asyncio.wait_for(reached, HANG_S)


async def test_a_dispatcher_without_work_leaves_the_database_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides what the clock says it looks once after each look at the engines."""
    monkeypatch.setattr(dispatch, "POLL_S", HANG_S)
    database = CountedDatabase(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer() as server:
        engines = CountedPool(server.url)
        dispatcher = dispatcher_of(database, objects, engines)
        async with engines, dispatcher.running(), engines.looked:
            await engines.looked.wait_for(lambda: engines.looks > 2)
            assert database.leases <= engines.looks
    database.close()


async def test_an_engine_of_another_model_works_while_those_of_one_are_full(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer(model="a") as busy, CountingServer(model="b") as free:
        engines = EnginePool([busy.url, free.url], places=1, api_key=None, timeout_s=HANG_S)
        dispatcher = dispatcher_of(database, objects, engines)
        held = [await add_batch(database, objects, f"hold {at}", "a") for at in range(4)]
        await add_batch(database, objects, "other", "b")
        async with engines, dispatcher.running():
            await asyncio.to_thread(free.wait_for, "ended", 1)
            assert busy.counts()["ended"] == {}
            for at in range(len(held)):
                busy.release(f"{at}")
            await asyncio.to_thread(busy.wait_for, "ended", len(held))
        assert free.counts()["began"] == {"other": 1}
    database.close()


async def add_held(
    database: Database, objects: ObjectStore, model: str, count: int
) -> list[BatchJob]:
    """Batches of a request each, which the engine of a model answers when it is told to."""
    return [
        await add_batch(database, objects, f"{model} {at}", model, f"hold {at}")
        for at in range(count)
    ]


async def test_requests_are_leased_ahead_for_each_model_by_itself(tmp_path: Path) -> None:
    """Those of a model that has no room are not what another one has ready."""
    database = CountedDatabase(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    places = 4
    with CountingServer(model="a") as full, CountingServer(model="b") as busy:
        engines = EnginePool([full.url, busy.url], places=places, api_key=None, timeout_s=HANG_S)
        dispatcher = dispatcher_of(database, objects, engines)
        await add_held(database, objects, "a", 3 * places)
        await add_held(database, objects, "b", 3 * places)
        async with engines, dispatcher.running():
            await database.until_leased("a", 2 * places)
            await database.until_leased("b", 2 * places)
            for at in range(places - 1):
                await asyncio.to_thread(busy.release, f"{at}")
            # One is left, and no engine has room.
            await database.until_leased("b", 3 * places - 1)
        assert database.leased["a"] == 2 * places
    database.close()


async def test_a_model_without_room_is_no_reason_to_look_at_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another engine's room: what waits is looked for when something has happened."""
    monkeypatch.setattr(dispatch, "POLL_S", HANG_S)
    database = CountedDatabase(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer(model="a") as full, CountingServer(model="b") as idle:
        engines = CountedPool(full.url, idle.url)
        dispatcher = dispatcher_of(database, objects, engines)
        await add_held(database, objects, "a", 4)
        async with engines, dispatcher.running():
            await database.until_leased("a", 2)
            async with engines.looked:
                looks, leases = engines.looks, database.leases
                await engines.looked.wait_for(lambda: engines.looks > looks + 2)
                assert database.leases - leases <= engines.looks - looks + 1
        assert database.leased["a"] == 2
    database.close()


def spoil(folder: Path) -> None:
    """Overwrite the only input."""
    (file,) = folder.glob("files/**/spoiled")
    file.write_bytes(b"x" * file.stat().st_size)


async def test_an_input_that_is_no_longer_what_was_checked_ends_its_requests_only(
    tmp_path: Path,
) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    with CountingServer() as server:
        engines = EnginePool([server.url], places=1, api_key=None, timeout_s=HANG_S)
        dispatcher = dispatcher_of(database, objects, engines)
        spoiled = await add_batch(database, objects, "spoiled")
        spoil(tmp_path)
        await add_batch(database, objects, "fine")
        async with engines, dispatcher.running():
            await asyncio.to_thread(server.wait_for, "ended", 1)
        assert server.counts()["ended"] == {"fine": 1}
    find = partial(find_batch, tenant="red", batch_id=spoiled.batch_id)
    assert (await database.read(find)).failed == 1
    database.close()


async def test_a_worker_whose_life_is_over_leases_nothing(tmp_path: Path) -> None:
    """Nothing would free what it leased after its leases were freed, and before it noticed."""
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    await add_batch(database, objects, "only")
    lease = partial(
        lease_requests,
        worker="slow",
        room=1,
        room_of=lambda _: 1,
        most_bytes=1 << 20,
        running={},
        now_s=1.0,
    )
    await database.write(partial(add_worker, worker="slow", until_s=1.0))
    assert await database.write(lease) == []
    await database.write(partial(add_worker, worker="quick", until_s=2.0))
    await database.write(partial(free_dead_workers, now_s=1.0))
    assert await database.write(lease) == []
    assert len(await database.write(partial(lease, worker="quick"))) == 1
    database.close()


async def test_a_batch_whose_claim_was_never_heard_of_is_claimed_again(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    objects = ObjectStore(f"file://{tmp_path}/files")
    batch = await add_batch(database, objects, "only")
    await database.write(partial(cancel_batch, tenant="red", batch_id=batch.batch_id, now_s=1.0))
    claims = [
        await database.write(partial(claim_batch, worker="writer", now_s=1.0)) for _ in range(2)
    ]
    assert [each and each.seq for each in claims] == [batch.seq, batch.seq]
    assert len({each and each.generation for each in claims}) == 2
    database.close()
