"""A worker that writes the outputs of a batch, stands still where it is told to, and can be killed.

Its clock says 1970. So to a service that runs now, all that it writes is older than any file for
which a sweep waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final, Self

from sqlalchemy import Connection, insert, update

from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.files.results import ResultWriter
from aqua_batch.service.rows.batch_rows import BatchJob, BatchStatus, claim_batch, create_batch
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import RequestState, add_worker
from aqua_batch.service.rows.schema import BATCHES, OUTCOMES, REQUESTS
from harness.bounds import HANG_S
from harness.fork_server import ForkedProcess

CLOCK_S: Final = 0.0
"""Unix seconds."""
STOPS: Final = ("opening", "opening", "written", "written")
"""Where it stands still: before each of the two files is there, and when each is on its disk."""


def add_ended_batch(connection: Connection) -> BatchJob:
    """A batch of one request, which has been answered; no output is written."""
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
    return batch


async def claim(database: Database, worker: str, now_s: float) -> BatchJob:
    """Claim the batch that is there."""
    claimed = await database.write(partial(claim_batch, worker=worker, now_s=now_s))
    assert claimed is not None, f"{worker} finds nothing to work on"
    return claimed


class OutputWriterProcess:
    """A worker, in the folder of a service, that claims a batch and writes its outputs.

    Args:
        data_dir: Of the service.
        lives_until_s: Unix seconds until which others think that it lives.
    """

    def __init__(self, data_dir: Path, lives_until_s: float) -> None:
        orders, self._orders = os.pipe()
        self._said, said = os.pipe()
        self._process = ForkedProcess(
            _write, str(data_dir), str(lives_until_s), streams={0: orders, 1: said}
        )
        os.close(orders)
        os.close(said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._orders)
        os.close(self._said)

    def wait_until(self, place: str) -> None:
        """Wait until it stands still there."""
        assert os.read(self._said, 16).decode() == f"{place}\n"

    def go_on(self) -> None:
        """Let it go on from where it stands still."""
        os.write(self._orders, b".")

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self._process.wait(HANG_S)


class _StoppingStore(ObjectStore):
    @contextmanager
    def create(self, key: str) -> Iterator[IO[bytes]]:
        _stand_still("opening")
        with super().create(key) as file:
            yield file
        _stand_still("written")


def _stand_still(place: str) -> None:
    os.write(1, f"{place}\n".encode())
    os.read(0, 1)


def _write(data_dir: str, lives_until_s: str) -> None:
    asyncio.run(_claim_and_write(data_dir, float(lives_until_s)))


async def _claim_and_write(data_dir: str, lives_until_s: float) -> None:
    objects = _StoppingStore(f"file://{data_dir}/files")
    with closing(Database(f"sqlite:///{data_dir}/batch.db")) as database:
        await database.write(partial(add_worker, worker="late", until_s=lives_until_s))
        batch = await claim(database, "late", CLOCK_S)
        await ResultWriter(batch, objects, default_ttl_s=1 << 31).write(database, lambda: CLOCK_S)
    os.write(1, b"ended\n")
