"""What a service does beside running requests.

It reads inputs, writes outputs, takes up what dead workers had, ends what has expired and deletes
files. Every service does, and any number may at once: each step is a transaction that looks at the
rows as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

import structlog
from sqlalchemy import Connection

from aqua_batch.service.dispatch.dispatcher import Dispatcher
from aqua_batch.service.files.lines import InputReader
from aqua_batch.service.files.objects import MissingObjectError, ObjectStore
from aqua_batch.service.files.results import ResultWriter
from aqua_batch.service.order.rank_writer import RankWriter
from aqua_batch.service.progress import BatchRates, ended_by_batch
from aqua_batch.service.rows.batch_rows import (
    BatchJob,
    BatchStatus,
    claim_batch,
    expire_batches,
    fail_batch,
    holds,
    release_batch,
)
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import doomed_files, drop_files
from aqua_batch.service.rows.request_rows import free_dead_workers
from aqua_batch.service.wire import BatchLineError
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.supervision import SupervisedTask, resting

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.5
"""Seconds between sweeps. Doubled, what a dead worker had is taken up half a second later."""

MOST_READS: Final = 3
"""Claims after which an input that the reader did not foresee fails its batch. Doubled, such an
input holds the loop up three times more, and what a passing fault hits has as many more tries."""

MOST_SERVED: Final = 100
"""Tenants whose turn is remembered; others come first. Doubled, each look for a batch takes a tenth
of a millisecond more."""


class Upkeep:
    """The loops of one service beside its dispatcher.

    Args:
        batch_rates: Told how far running batches are.
        max_requests: Lines that an input may have.
        output_ttl_s: How long outputs are kept where their batch does not say.
    """

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        dispatcher: Dispatcher,
        ranks: RankWriter,
        batch_rates: BatchRates,
        *,
        max_requests: int,
        output_ttl_s: int,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._objects = objects
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._batch_rates = batch_rates
        self._max_requests = max_requests
        self._output_ttl_s = output_ttl_s
        self._now_s = now_s
        self._is_wanted = asyncio.Event()
        self._served: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep things up within the block."""
        async with (
            SupervisedTask(self._work, "batch-files"),
            SupervisedTask(self._sweep, "batch-sweep"),
            SupervisedTask(self._ranks.run, "batch-order"),
        ):
            yield

    def look(self) -> None:
        """Notice now that a batch was created or cancelled."""
        self._is_wanted.set()

    async def _work(self) -> None:
        while True:
            self._is_wanted.clear()
            worker, now_s = self._dispatcher.worker, self._now_s()
            claim = partial(claim_batch, worker=worker, now_s=now_s, served=self._served)
            batch = await self._database.write(claim)
            if batch is None:
                with resting(), contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_S):
                        await self._is_wanted.wait()
                continue
            others = [each for each in self._served if each != batch.tenant]
            self._served = [*others, batch.tenant][-MOST_SERVED:]
            try:
                await self._advance(batch)
            except BaseException:
                await self._database.write(partial(release_batch, batch=batch))
                raise

    async def _advance(self, batch: BatchJob) -> None:
        if batch.status != BatchStatus.VALIDATING:
            writer = ResultWriter(batch, self._objects, self._output_ttl_s)
            if await writer.write(self._database, self._now_s):
                log.info("batch ended", batch=batch.batch_id, status=batch.ending)
            return
        reader = InputReader(batch, self._objects, self._max_requests)
        try:
            if await reader.read(self._database, self._now_s):
                self._ranks.put(batch, reader.good_count)
        except StoreUnavailableError:
            raise
        except MissingObjectError:
            await self._fail(batch, "input_lost", "The store of files has lost the input")
        except Exception as error:
            # What a tenant sends must not keep the loop from the batches of others for ever.
            if batch.generation < MOST_READS:
                raise
            log.warning("input cannot be read", batch=batch.batch_id, error=type(error).__name__)
            message = "The service could not read the input; please report it to its operator"
            await self._fail(batch, "input_unreadable", message)
        self._dispatcher.look()

    async def _fail(self, batch: BatchJob, code: str, message: str) -> None:
        fault = BatchLineError(code=code, message=message, param="input_file_id")

        def fail(connection: Connection) -> None:
            if holds(connection, batch):
                fail_batch(connection, batch, [fault.model_dump()], self._now_s())

        await self._database.write(fail)

    async def _sweep(self) -> None:
        while True:
            now_s = self._now_s()
            freed = await self._database.write(partial(free_dead_workers, now_s=now_s))
            if freed:
                log.warning("took up requests of a dead worker", count=freed)
            if await self._database.write(partial(expire_batches, now_s=now_s)):
                self._dispatcher.look()
            doomed = await self._database.read(partial(doomed_files, now_s=now_s))
            for file in doomed:
                await asyncio.to_thread(self._objects.delete, file.object_key)
            if doomed:
                await self._database.write(partial(drop_files, files=doomed))
            if self._batch_rates.is_due(now_s):
                self._batch_rates.note(now_s, await self._database.read(ended_by_batch))
            with resting():
                await asyncio.sleep(SWEEP_S)
