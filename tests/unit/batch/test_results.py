"""Output files of batches: a worker that was thought dead harms none that came after it."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, update

from aqua_batch.service.files.objects import MissingObjectError, ObjectStore
from aqua_batch.service.files.results import ResultWriter
from aqua_batch.service.rows.batch_rows import BatchJob, BatchStatus, claim_batch, create_batch
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import RequestState, add_worker
from aqua_batch.service.rows.schema import BATCHES, FILES, OUTCOMES, REQUESTS


def fill(connection: Connection) -> None:
    """A batch of one request, which has ended."""
    batch = create_batch(
        connection,
        tenant="t",
        endpoint="/v1/completions",
        completion_window="24h",
        input_file_id="f",
        input_key="k",
        created_s=0,
        expires_s=10,
        labels={},
    )
    ended = {"status": BatchStatus.FINALIZING, "total": 1, "completed": 1}
    connection.execute(update(BATCHES).values(ended))
    key = {"batch": batch.seq, "line": 1}
    request = {"custom_id": "r", "start": 0, "size": 1, "rank": 1, "state": RequestState.ENDED}
    request |= {"generation": 1, "attempts": 0, "not_before_s": 0.0}
    connection.execute(insert(REQUESTS).values(**key, **request))
    outcome = {"generation": 1, "is_answer": True, "record": b"the answer"}
    connection.execute(insert(OUTCOMES).values(**key, **outcome))
    add_worker(connection, "slow", until_s=1.0)
    add_worker(connection, "next", until_s=100.0)


async def claim(database: Database, worker: str, now_s: float) -> BatchJob:
    claimed = await database.write(partial(claim_batch, worker=worker, now_s=now_s))
    assert claimed is not None
    return claimed


async def test_a_late_writer_leaves_the_output_of_the_next_alone(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}/files")
    with closing(Database(f"sqlite:///{tmp_path}/batch.db")) as database:
        await database.write(fill)
        slow = await claim(database, "slow", now_s=0.0)
        following = await claim(database, "next", now_s=2.0)
        for batch in (following, slow):
            await ResultWriter(batch, objects, 100).write(database, lambda: 3.0)
        (key,) = await database.read(lambda each: each.scalars(select(FILES.c.object_key)).all())
        with objects.open(key) as file:
            assert file.read() == b"the answer\n"


async def test_what_a_dead_writer_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}/files")
    with closing(Database(f"sqlite:///{tmp_path}/batch.db")) as database:
        await database.write(fill)
        slow = await claim(database, "slow", now_s=0.0)
        with objects.create(f"outputs/{slow.batch_id}/{slow.generation}/output.jsonl") as half:
            half.write(b"the ans")
        following = await claim(database, "next", now_s=2.0)
        await ResultWriter(following, objects, 100).write(database, lambda: 3.0)
    name = f"outputs/{slow.batch_id}/{{}}/output.jsonl"
    with pytest.raises(MissingObjectError), objects.open(name.format(slow.generation)) as file:
        file.read()
    assert objects.ranges(name.format(following.generation), [(0, 3)]) == [b"the"]
