"""The service on a real PostgreSQL: what SQLite's single writer hides would show here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import openai
import pytest
from sqlalchemy import Connection, update

from aqua_batch.service.refusals import RateLimitError, TenantQuotaError
from aqua_batch.service.rows.batch_rows import create_batch
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import add_file, end_upload, new_file_id
from aqua_batch.service.rows.keys import list_keys, replace_loaded_keys
from aqua_batch.service.rows.quotas import (
    TenantLimits,
    require_open_room,
    require_room,
    set_quota,
)
from aqua_batch.service.rows.schema import BATCHES
from harness.batch_service import (
    BatchServiceProcess,
    chat_line,
    completed,
    records,
    submit,
    wait_until,
)
from harness.counting_server import CountingServer
from harness.postgres_process import postgres


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as process:
        yield process.url


def test_two_services_share_batches_and_one_is_killed(database: str, tmp_path: Path) -> None:
    lines = [chat_line(f"r{i}", f"prompt {i}") for i in range(200)]
    start = partial(BatchServiceProcess, database_url=database, lease_s="0.5")
    with (
        CountingServer() as engine,
        start(tmp_path, [engine.url], engine_concurrency="4") as first,
        start(tmp_path, [engine.url], engine_concurrency="4") as second,
    ):
        batches = [submit(each.client(), lines) for each in (first, second)]
        engine.wait_for("ended", 60)
        first.kill()
        client = second.client()
        for batch in batches:
            ended = wait_until(client, batch.id)
            assert ended.status == "completed"
            found = [each["custom_id"] for each in records(client, ended.output_file_id)]
            assert found == [f"r{i}" for i in range(200)]


def test_a_batch_is_cancelled_amid_its_run(database: str, tmp_path: Path) -> None:
    lines = [chat_line("fine", "fine"), *(chat_line(f"{i}", f"hold on {i}") for i in range(40))]
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], database_url=database) as service,
    ):
        client = service.client()
        batch = submit(client, lines)
        wait_until(client, batch.id, lambda seen: completed(seen) == 1)
        client.batches.cancel(batch.id)
        ended = wait_until(client, batch.id)
        assert ended.status == "cancelled"
        assert len(records(client, ended.error_file_id)) == 40


@pytest.mark.parametrize("of", ["bytes", "requests"])
async def test_two_services_do_not_both_give_a_tenant_its_last_room(database: str, of: str) -> None:
    opened = [Database(database) for _ in range(2)]
    tenant, counted = f"tenant-{of}", threading.Barrier(2)
    limits = TenantLimits(tenant, stored_bytes=10, open_requests=10)
    await opened[0].write(lambda connection: set_quota(connection, limits))

    def take(connection: Connection) -> None:
        if of == "bytes":
            require_room(connection, tenant, 10)
        else:
            require_open_room(connection, tenant)
        with contextlib.suppress(threading.BrokenBarrierError):  # As it ought to be: one waits.
            counted.wait(0.5)
        if of == "bytes":
            add_file(connection, file_id := new_file_id(), tenant, file_id, 0.0)
            times = {"created_s": 0, "expires_s": None}
            end_upload(connection, file_id, filename="", purpose="", size_bytes=10, **times)
        else:
            names = ("endpoint", "completion_window", "input_file_id", "input_key")
            times = {"created_s": 0, "expires_s": 0, "output_ttl_s": None}
            batch = create_batch(
                connection, tenant=tenant, labels={}, **dict.fromkeys(names, ""), **times
            )
            running = {"status": "in_progress", "total": 10}
            connection.execute(update(BATCHES).where(BATCHES.c.seq == batch.seq).values(running))

    taken = await asyncio.gather(*(each.write(take) for each in opened), return_exceptions=True)
    refusal = {"bytes": TenantQuotaError, "requests": RateLimitError}[of]
    assert {type(each) for each in taken} == {type(None), refusal}
    for each in opened:
        each.close()


@pytest.mark.slow
async def test_the_input_of_a_batch_is_not_deleted_while_that_is_created(
    database: str, tmp_path: Path
) -> None:
    """Two services are asked for both at once: one is refused, or both happen in some order."""
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], database_url=database) as first,
        BatchServiceProcess(tmp_path, [engine.url], database_url=database) as second,
    ):
        creating, deleting = first.client(), second.client()
        for _ in range(40):
            file = creating.files.create(file=("in.jsonl", chat_line("a", "x")), purpose="batch")
            create = partial(
                creating.batches.create,
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
            batch, deleted = await asyncio.gather(
                asyncio.to_thread(create),
                asyncio.to_thread(deleting.files.delete, file.id),
                return_exceptions=True,
            )
            if isinstance(batch, openai.NotFoundError):
                assert not isinstance(deleted, BaseException)
            else:
                assert not isinstance(batch, BaseException)
                assert wait_until(creating, batch.id).status == "completed"


async def test_keys_of_a_folder_are_loaded_by_two_services_and_again(database: str) -> None:
    key = f"sk-aqua-0123456789ab-{'s' * 43}"
    opened = [Database(database) for _ in range(2)]
    for tenants, expected in (({key: "red"}, ["red"]), ({key: "blue"}, ["blue"]), ({}, [])):
        load = partial(replace_loaded_keys, tenants=tenants, now_s=0.0)
        await asyncio.gather(*(each.write(load) for each in opened))
        assert [each.tenant for each in await opened[0].read(list_keys)] == expected
    for each in opened:
        each.close()
