"""API keys and tenants: what is another's does not exist, and nothing is open by accident."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from sqlalchemy import Connection

from aqua_batch.service import keys
from aqua_batch.service.database import Database
from harness.batch_service import BatchServiceProcess, chat_line, records, submit, wait_until
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
