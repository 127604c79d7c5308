"""Writes the output and error files of a batch from its rows.

The files are rows before they are bytes, under keys that name the generation of the batch, and are
stored in the transaction that ends the batch. A worker that dies before leaves bytes which the next
one deletes; what one leaves that was only thought dead, and is killed after the next one's end, its
rows name (`file_rows`). One that was thought dead begins no file any more, and deletes none of a
later generation, which may be stored. Lines come in order of the input. A request that was
withdrawn says so in the error file, as OpenAI's does.

Source: OpenAI Batch API, "Retrieving the results", "Batch expiration".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Final

from pydantic_core import to_json
from sqlalchemy import Connection, and_, select

from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.rows.batch_rows import BatchJob, BatchStatus, end_batch, holds
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import (
    add_file,
    end_upload,
    give_up,
    new_file_id,
    output_folder,
)
from aqua_batch.service.rows.request_rows import RequestState
from aqua_batch.service.rows.schema import OUTCOMES, REQUESTS

LINES_AT_ONCE: Final = 200
"""Lines of one query, held in memory: 200 answers of 16 KiB are 3 MiB. Doubled, twice as much."""

WITHDRAWN: Final = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "This request was not executed: the batch was cancelled.",
    ),
}


@dataclass(slots=True)
class _ResultFile:
    """One of the two files while it is written."""

    key: str
    name: str
    file_id: str = field(default_factory=new_file_id)
    size_bytes: int = 0


class ResultWriter:
    """Writes one claimed batch's files, and ends the batch.

    Args:
        batch: As it was claimed.
        default_ttl_s: How long files are kept where the batch does not say.
    """

    def __init__(self, batch: BatchJob, objects: ObjectStore, default_ttl_s: int) -> None:
        self._batch = batch
        self._objects = objects
        self._ttl_s = batch.output_ttl_s or default_ttl_s
        self._folder = f"outputs/{batch.batch_id}"
        here = output_folder(batch.batch_id, batch.generation)
        self._files = {
            is_answer: _ResultFile(f"{here}/{name}.jsonl", f"{batch.batch_id}_{name}.jsonl")
            for is_answer, name in ((True, "output"), (False, "error"))
        }

    async def write(self, database: Database, now_s: Callable[[], float]) -> bool:
        """Bring the batch to its last status, unless another worker has claimed it meanwhile.

        Returns:
            Whether it did.
        """
        of_dead = partial(self._objects.delete_generations, before=self._batch.generation)
        await asyncio.to_thread(of_dead, self._folder)
        if not await database.write(lambda connection: self._begin(connection, now_s())):
            return False
        try:
            await self._fill(database)
        except BaseException:
            await database.write(self._give_up)
            raise
        return await database.write(lambda connection: self._end(connection, now_s()))

    async def _fill(self, database: Database) -> None:
        with ExitStack() as stack:
            create = self._objects.create
            opened = {
                is_answer: await asyncio.to_thread(stack.enter_context, create(each.key))
                for is_answer, each in self._files.items()
            }
            after = 0
            while rows := await database.read(partial(self._rows, after=after)):
                await asyncio.to_thread(self._append, opened, rows)
                after = rows[-1][0]
            await asyncio.to_thread(stack.close)  # On disk before they are stored.

    def _rows(self, connection: Connection, after: int) -> list[tuple[Any, ...]]:
        """Line, id, state, and outcome if there is one; whole lines only."""
        lines = (
            select(REQUESTS.c.line)
            .where(REQUESTS.c.batch == self._batch.seq, REQUESTS.c.line > after)
            .order_by(REQUESTS.c.line)
            .limit(LINES_AT_ONCE)
        )
        found = connection.execute(lines).scalars().all()
        if not found:
            return []
        same = and_(OUTCOMES.c.batch == REQUESTS.c.batch, OUTCOMES.c.line == REQUESTS.c.line)
        query = (
            select(
                REQUESTS.c.line,
                REQUESTS.c.custom_id,
                REQUESTS.c.state,
                OUTCOMES.c.is_answer,
                OUTCOMES.c.record,
            )
            .join_from(REQUESTS, OUTCOMES, same, isouter=True)
            .where(
                REQUESTS.c.batch == self._batch.seq, REQUESTS.c.line.between(found[0], found[-1])
            )
            .order_by(REQUESTS.c.line)
        )
        return [tuple(row) for row in connection.execute(query)]

    def _append(self, opened: dict[bool, IO[bytes]], rows: list[tuple[Any, ...]]) -> None:
        for is_answer, record in self._records(rows):
            self._files[is_answer].size_bytes += opened[is_answer].write(record + b"\n")

    def _records(self, rows: list[tuple[Any, ...]]) -> Iterator[tuple[bool, bytes]]:
        for line, custom_id, state, is_answer, record in rows:
            if state == RequestState.WITHDRAWN:
                code, message = WITHDRAWN[BatchStatus(self._batch.ending)]
                error = {"code": code, "message": message}
                told = {"custom_id": custom_id, "response": None, "error": error}
                yield False, to_json({"id": f"batch_req_line_{line}", **told})
            else:
                assert record is not None, f"line {line} has ended without an outcome"
                yield is_answer, bytes(record)

    def _begin(self, connection: Connection, now_s: float) -> bool:
        if not holds(connection, self._batch):
            return False
        for each in self._files.values():
            add_file(connection, each.file_id, self._batch.tenant, each.key, now_s)
        return True

    def _end(self, connection: Connection, now_s: float) -> bool:
        is_held = holds(connection, self._batch)
        if is_held:
            ids: dict[bool, str | None] = {True: None, False: None}
            for is_answer, each in self._files.items():
                if each.size_bytes == 0:
                    continue
                end_upload(
                    connection,
                    each.file_id,
                    filename=each.name,
                    purpose="batch_output",
                    size_bytes=each.size_bytes,
                    created_s=int(now_s),
                    expires_s=int(now_s) + self._ttl_s,
                )
                ids[is_answer] = each.file_id
            end_batch(
                connection,
                self._batch,
                output_file_id=ids[True],
                error_file_id=ids[False],
                now_s=now_s,
            )
        self._give_up(connection)  # What is empty, or late.
        return is_held

    def _give_up(self, connection: Connection) -> None:
        give_up(connection, [each.file_id for each in self._files.values()])
