"""Puts running batches in BlendServe's order, beside the work on them.

A batch begins in the order of its file, at once; the order is found by another process
(`input_order`) and written to the ranks of its requests while the first of them run. It changes
how fast a batch is, never what is answered: where it cannot be found, or its finder dies with its
service, the order of the file stays. Batches are ordered one after the other. One that engines
could take as a whole needs no order and gets none.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog
from sqlalchemy import Connection, select, update

from aqua_batch.policies import Policy
from aqua_batch.service.order.order_task import OrderTask
from aqua_batch.service.rows.batch_rows import BatchJob
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import FileState
from aqua_batch.service.rows.number_lists import numbered
from aqua_batch.service.rows.request_rows import RequestState, lock_batches
from aqua_batch.service.rows.schema import BATCHES, FILES, REQUESTS
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.supervision import resting

log = structlog.get_logger(__name__)

LONGEST_ORDER_S: Final = 600.0
"""Seconds that an order may take to be found; 50,000 requests take some ten. Doubled, a finder that
hangs holds other batches' orders up for twice as long."""
RANKS_AT_ONCE: Final = 1000
"""Rows of one transaction. Doubled, answers wait twice as long for their turn to be recorded, some
10 ms, while an order is written."""
EARLIER_BATCHES: Final = 4
"""Batches that have ended from which output lengths are learned. Doubled, an order is found some
seconds later, and what a tenant asks seldom is known, too."""
ORDERED: Final = ("/v1/chat/completions", "/v1/completions")
"""Endpoints whose requests decode; the others' only compute, in whatever order."""


class RankWriter:
    """The loop that orders batches.

    Args:
        task: All but the input and endpoint.
        together: Tells how many requests all engines take at once.
    """

    def __init__(self, database: Database, task: OrderTask, together: Callable[[], int]) -> None:
        self._database = database
        self._task = task
        self._together = together
        self._waiting: deque[BatchJob] = deque()
        self._came = asyncio.Event()

    def put(self, batch: BatchJob, count: int) -> None:
        """Have a batch of so many requests ordered, if that is of use."""
        is_wanted = self._task.policy is not Policy.FCFS and batch.endpoint in ORDERED
        if is_wanted and count > self._together():
            self._waiting.append(batch)
            self._came.set()

    async def run(self) -> None:
        """Order batches until cancelled."""
        while True:
            if not self._waiting:
                self._came.clear()
                with resting():
                    await self._came.wait()
            batch = self._waiting.popleft()
            with resting():  # Another process works, and may take its time.
                lines = await self._find(batch)
            if lines is not None:
                await self._write(batch, lines)

    async def _find(self, batch: BatchJob) -> array[int] | None:
        try:
            earlier = await self._database.read(partial(earlier_results, batch=batch))
        except StoreUnavailableError:
            earlier = []  # Then lengths are estimated without them.
        of_batch = {"input_key": batch.input_key, "endpoint": batch.endpoint, "earlier": earlier}
        task = self._task.model_copy(update=of_batch)
        finder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aqua_batch.service.order.input_order"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            sent = task.model_dump_json().encode()
            async with asyncio.timeout(LONGEST_ORDER_S):
                found, said = await finder.communicate(sent)
        except TimeoutError:
            found, said = b"", b"timeout"
        finally:
            if finder.returncode is None:
                finder.kill()
                await finder.wait()
        if finder.returncode != 0:
            why = said.decode(errors="replace").rpartition("\n")[2][:80]
            log.warning("batch keeps the order of its file", batch=batch.batch_id, error=why)
            return None
        return array("i", found)

    async def _write(self, batch: BatchJob, lines: array[int]) -> None:
        try:
            for begin in range(0, len(lines), RANKS_AT_ONCE):
                chunk = lines[begin : begin + RANKS_AT_ONCE]
                rank = partial(rank_requests, batch=batch.seq, first_rank=begin, lines=chunk)
                await self._database.write(rank)
        except StoreUnavailableError as error:
            log.warning("batch is ordered in part", batch=batch.batch_id, error=error.message)
            return
        log.info("batch ordered", batch=batch.batch_id, requests=len(lines))


def earlier_results(connection: Connection, batch: BatchJob) -> list[tuple[str, str]]:
    """Keys of inputs and outputs of batches of the same tenant, the last that have ended."""
    same = (BATCHES.c.tenant == batch.tenant, BATCHES.c.endpoint == batch.endpoint)
    query = (
        select(BATCHES.c.input_key, FILES.c.object_key)
        .join_from(BATCHES, FILES, FILES.c.file_id == BATCHES.c.output_file_id)
        .where(*same, FILES.c.state == FileState.STORED)
        .order_by(BATCHES.c.seq.desc())
        .limit(EARLIER_BATCHES)
    )
    return [(input_key, output_key) for input_key, output_key in connection.execute(query)]


def rank_requests(
    connection: Connection, batch: int, first_rank: int, lines: Sequence[int]
) -> None:
    """Give those of these lines of a batch that wait the ranks from `first_rank` on, in order."""
    lock_batches(connection, [batch])
    numbers = numbered(connection, lines)
    connection.execute(
        update(REQUESTS)
        .where(
            REQUESTS.c.batch == batch,
            REQUESTS.c.line == numbers.c.line,
            REQUESTS.c.state == RequestState.WAITING,
        )
        .values(rank=numbers.c.place + first_rank)
    )
