"""API keys and tenants: what is another's does not exist, and nothing is open by accident."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from sqlalchemy import Connection

from aqua_batch.service.rows import keys
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.quotas import TenantLimits, list_quotas, set_quota
from harness.batch_service import BatchServiceProcess, chat_line, records, submit, wait_until
from harness.bounds import until
from harness.counting_server import CountingServer


async def key_of(database: Database, tenant: str) -> tuple[str, str]:
    """A new key and its id."""

    def add(connection: Connection) -> tuple[str, keys.ApiKey]:
        return keys.add_key(connection, tenant, "", 0.0)

    key, row = await database.write(add)
    return key, row.key_id


async def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    red, red_id = await key_of(database, "red")
    blue, _ = await key_of(database, "blue")
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], listen_host="0.0.0.0") as service,  # noqa: S104 - there are keys
    ):
        ours, theirs = service.client(red), service.client(blue)
        batch = submit(ours, [chat_line("a", "fine")])
        ended = wait_until(ours, batch.id)
        assert len(records(ours, ended.output_file_id)) == 1
        assert ended.output_file_id
        assert [each.id for each in theirs.batches.list()] == []
        assert [each.id for each in theirs.files.list()] == []
        for refused in (
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.files.retrieve(batch.input_file_id),
            lambda: theirs.files.content(str(ended.output_file_id)),
            lambda: theirs.files.delete(batch.input_file_id),
            lambda: theirs.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        for key in ("none", red[:-1] + "!", f"sk-aqua-{red_id}-guess"):
            with pytest.raises(openai.AuthenticationError):
                service.client(key).batches.list()
        await database.write(lambda connection: keys.revoke_key(connection, red_id))
        with pytest.raises(openai.AuthenticationError):
            ours.batches.list()
    database.close()


@pytest.mark.slow
async def test_a_tenants_batch_waits_for_no_more_than_one_of_anothers(tmp_path: Path) -> None:
    """Inputs are read and outputs written one after the other, each tenant's in its turn."""
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    red, _ = await key_of(database, "red")
    blue, _ = await key_of(database, "blue")
    database.close()
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url]) as service,
    ):
        theirs, ours = service.client(red), service.client(blue)
        many = submit(theirs, [chat_line(f"{i}", "x") for i in range(5000)])
        for _ in range(50):
            theirs.batches.create(
                input_file_id=many.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        wait_until(ours, submit(ours, [chat_line("a", "fine")]).id)
        assert "validating" in {each.status for each in theirs.batches.list(limit=100)}


async def test_a_tenant_that_has_its_share_is_refused_and_others_are_not(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    red, _ = await key_of(database, "red")
    blue, _ = await key_of(database, "blue")
    line = chat_line("a", "hold quota")
    limits = TenantLimits("red", 8 * len(line), open_requests=2, requests_per_minute=1)
    await database.write(lambda connection: set_quota(connection, limits))
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], listen_host="0.0.0.0") as service,  # noqa: S104 - there are keys
    ):
        ours = service.client(red).with_options(max_retries=0)
        theirs = service.client(blue).with_options(max_retries=0)
        with pytest.raises(openai.PermissionDeniedError, match="would exceed"):
            ours.files.create(file=("in.jsonl", line * 9), purpose="batch")
        assert list(ours.files.list()) == []
        until(
            lambda: not any((tmp_path / "files/inputs").iterdir()),
            "a refused upload leaves no bytes",
        )
        three = submit(ours, [chat_line(f"{i}", "x") for i in range(3)])
        ended = wait_until(ours, three.id)
        assert ended.errors
        assert ended.errors.data
        assert [each.code for each in ended.errors.data] == ["request_limit_exceeded"]
        held = submit(ours, [chat_line(f"{i}", "hold quota") for i in range(2)])
        engine.wait_for("began", 2)
        with pytest.raises(openai.RateLimitError, match="as many open requests") as caught:
            submit(ours, [line])
        assert caught.value.response.headers["retry-after"] == "60"
        assert submit(theirs, [line]).status == "validating"
        ours.completions.create(model="m", prompt="x")
        with pytest.raises(openai.RateLimitError, match="requests of this minute"):
            ours.completions.create(model="m", prompt="x")
        theirs.completions.create(model="m", prompt="x")
        engine.release("quota")
        assert wait_until(ours, held.id).status == "completed"
        await database.write(lambda connection: set_quota(connection, TenantLimits("red")))
        assert await database.read(list_quotas) == []
        ours.completions.create(model="m", prompt="x")
    database.close()
