"""Outputs that nobody can end any more are deleted, and one that a worker may still end is not."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from pathlib import Path

from sqlalchemy import select

from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.files.results import ResultWriter
from aqua_batch.service.rows.batch_rows import BatchStatus
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import FileState, add_file
from aqua_batch.service.rows.request_rows import add_worker
from aqua_batch.service.rows.schema import BATCHES, FILES
from harness.batch_service import BatchServiceProcess
from harness.bounds import HANG_S, stopwatch
from harness.output_writer import CLOCK_S, STOPS, OutputWriterProcess, add_ended_batch, claim

NO_ENGINE = ["http://127.0.0.1:9"]


def files_below(data_dir: Path) -> set[str]:
    """What the store has."""
    folder = data_dir / "files"
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


async def wait_for_a_sweep(database: Database, data_dir: Path) -> None:
    """Wait until a service has swept everything that is to go: a file of 1970 is gone, row and all.

    A sweep forgets the files that it found only when it has deleted all of them.
    """
    with ObjectStore(f"file://{data_dir}/files").create("inputs/canary") as file:
        file.write(b"given up long ago")
    add = partial(add_file, file_id="c", tenant="t", object_key="inputs/canary", now_s=CLOCK_S)
    await database.write(add)
    query = select(FILES.c.seq).where(FILES.c.file_id == "c")
    waited = stopwatch()
    while await database.read(lambda connection: connection.scalar(query)) is not None:
        assert waited() < HANG_S, "no service sweeps"


async def test_what_a_late_writer_left_when_it_was_killed_is_deleted(tmp_path: Path) -> None:
    """It had begun before the next one ended the batch, and its files were there only after it."""
    objects = ObjectStore(f"file://{tmp_path}/files")
    with closing(Database(f"sqlite:///{tmp_path}/batch.db")) as database:
        batch = await database.write(add_ended_batch)
        with OutputWriterProcess(tmp_path, lives_until_s=CLOCK_S + 1) as late:
            late.wait_until(STOPS[0])
            await database.write(partial(add_worker, worker="next", until_s=CLOCK_S + 9))
            following = await claim(database, "next", CLOCK_S + 2)
            assert await ResultWriter(following, objects, 100).write(database, time.time)
            for place in STOPS[1:]:
                late.go_on()
                late.wait_until(place)
            late.kill()
        folder = f"outputs/{batch.batch_id}"
        assert f"{folder}/1/output.jsonl" in files_below(tmp_path)
        with BatchServiceProcess(tmp_path, NO_ENGINE):
            await wait_for_a_sweep(database, tmp_path)
        assert files_below(tmp_path) == {f"{folder}/2/output.jsonl"}
        rows = await database.read(lambda connection: connection.execute(select(FILES)).all())
        assert [(row.object_key, row.state) for row in rows] == [
            (f"{folder}/2/output.jsonl", FileState.STORED)
        ]


async def test_a_live_writer_loses_nothing_however_old_its_files_look(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path}/batch.db")) as database:
        batch = await database.write(add_ended_batch)
        with OutputWriterProcess(tmp_path, lives_until_s=time.time() + HANG_S) as live:
            live.wait_until(STOPS[0])
            with BatchServiceProcess(tmp_path, NO_ENGINE):
                for place in (*STOPS[1:], "ended"):
                    await wait_for_a_sweep(database, tmp_path)
                    live.go_on()
                    live.wait_until(place)
                await wait_for_a_sweep(database, tmp_path)
        (ended,) = await database.read(lambda each: each.execute(select(BATCHES)).all())
        assert ended.status == BatchStatus.COMPLETED
        key = f"outputs/{batch.batch_id}/1/output.jsonl"
        assert files_below(tmp_path) == {key}
        with ObjectStore(f"file://{tmp_path}/files").open(key) as file:
            assert file.read() == b"the answer\n"
