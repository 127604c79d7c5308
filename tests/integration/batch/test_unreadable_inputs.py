"""An input that the reader did not foresee: its batch fails, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import pytest_asyncio

from aqua_batch.records import numbered_lines
from aqua_batch.service.app import BatchService
from aqua_batch.service.files import lines
from aqua_batch.service.settings import load_batch_settings
from aqua_protocol.errors import StoreUnavailableError
from harness.batch_service import chat_line
from harness.faults import UnforeseenError

POISON = b"poison"


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = load_batch_settings(data_dir=tmp_path, engines=["http://127.0.0.1:9"])
    async with (
        BatchService(settings).running() as service,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=service.asgi), base_url="http://127.0.0.1"
        ) as client,
    ):
        yield client


async def _submit(client: httpx.AsyncClient, custom_id: str) -> str:
    file = {"file": ("in.jsonl", chat_line(custom_id, "Hello"))}
    stored = await client.post("/v1/files", data={"purpose": "batch"}, files=file)
    asked = {
        "input_file_id": stored.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return str((await client.post("/v1/batches", json=asked)).json()["id"])


async def _read(client: httpx.AsyncClient, batch: str) -> dict[str, Any]:
    """The batch, when its input has been read or given up."""
    while True:
        answer = (await client.get(f"/v1/batches/{batch}")).json()
        if answer["status"] != "validating":
            return dict(answer)
        await asyncio.sleep(0.01)


def _plant(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Have reading raise at a poisoned line four times; gives the reads of it so far."""
    reads: list[int] = []

    def reading(file: IO[bytes]) -> Iterator[tuple[int, int, bytes | None]]:
        for number, start, raw in numbered_lines(file):
            if POISON in (raw or b""):
                reads.append(number)
                if len(reads) <= 4:
                    raise error
            yield number, start, raw

    monkeypatch.setattr(lines, "numbered_lines", reading)
    return reads


async def test_a_batch_whose_input_crashes_the_reader_fails_and_others_run(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = _plant(monkeypatch, UnforeseenError("of a kind that nobody thought of"))
    poisoned, good = await _submit(client, POISON.decode()), await _submit(client, "good")
    failed = await _read(client, poisoned)
    assert failed["status"] == "failed"
    assert [each["code"] for each in failed["errors"]["data"]] == ["input_unreadable"]
    assert len(reads) == 3
    assert (await _read(client, good))["status"] == "in_progress"


async def test_a_store_that_fails_for_a_while_fails_no_batch(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = _plant(monkeypatch, StoreUnavailableError("the store of files fails"))
    assert (await _read(client, await _submit(client, POISON.decode())))["status"] == "in_progress"
    assert len(reads) == 5
