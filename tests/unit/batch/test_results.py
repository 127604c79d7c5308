"""Output files of batches: a worker that was thought dead harms none that came after it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from aqua_batch.service.files.objects import MissingObjectError, ObjectStore
from aqua_batch.service.files.results import ResultWriter
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import FileState
from aqua_batch.service.rows.request_rows import add_worker
from aqua_batch.service.rows.schema import FILES
from harness.output_writer import add_ended_batch, claim


def fill(connection: Connection) -> None:
    """A batch that has ended, and two workers."""
    add_ended_batch(connection)
    add_worker(connection, "slow", until_s=1.0)
    add_worker(connection, "next", until_s=100.0)


async def test_a_late_writer_leaves_the_output_of_the_next_alone(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}/files")
    with closing(Database(f"sqlite:///{tmp_path}/batch.db")) as database:
        await database.write(fill)
        slow = await claim(database, "slow", now_s=0.0)
        following = await claim(database, "next", now_s=2.0)
        for batch in (following, slow):
            await ResultWriter(batch, objects, 100).write(database, lambda: 3.0)
        stored = select(FILES.c.object_key).where(FILES.c.state == FileState.STORED)
        (key,) = await database.read(lambda each: each.scalars(stored).all())
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
