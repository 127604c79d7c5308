"""The service on a real PostgreSQL: what SQLite's single writer hides would show here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

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
