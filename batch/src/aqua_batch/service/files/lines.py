"""Reads the input of a batch into rows.

Each line is checked for what this service needs to know of it: an id of its own, the batch's URL, a
body with a model. The body's other fields are the engine's to judge. A bad line ends at once, with
its number in the error file, and the rest runs; a file without any good line, or with more than may
be, fails as a whole.

Rows are added some at a time while the batch is still as it was claimed; a worker that dies leaves
a part that the next one drops.

Source: OpenAI Batch API, "Preparing your batch file".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, insert

from aqua_batch.bodies import problem_of
from aqua_batch.records import CODES, UTF8_MARK, Rejection, RejectionCode, numbered_lines
from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.rows.batch_rows import BatchJob, begin_batch, fail_batch, holds
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.quotas import open_room
from aqua_batch.service.rows.request_rows import RequestState
from aqua_batch.service.rows.schema import OUTCOMES, REQUESTS
from aqua_batch.service.wire import BatchLineError

LINES_AT_ONCE: Final = 1000
"""Lines of one transaction. Doubled, answers wait twice as long for their turn to be recorded, some
10 ms, while an input is read."""
TOLD_FAULTS: Final = 100
"""Faults that a batch itself names; all are in its error file. Doubled, each look at such a batch
takes 15 KiB more."""

LONGEST_MODEL: Final = 4096
"""Characters of a model's name, which may be a path. Doubled, each look at running batches reads
another 4 KiB for each of them."""

# PostgreSQL keeps no NUL in a text.
CustomId = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_MODEL, pattern=r"^[^\x00]+$")]


class _Body(BaseModel):
    """What every endpoint wants; the engine judges the rest."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: ModelName
    stream: Literal[False] | None = None


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    custom_id: CustomId
    method: Literal["POST"]
    url: str
    body: _Body

    @field_validator("body", mode="before")
    @classmethod
    def _is_finite(cls, body: object) -> object:
        # JSON has 1e999, but not what it is read as; the second look is for texts that say so.
        if b"Infinity" in to_json(body):
            json.dumps(body, allow_nan=False)
        return body


@dataclass(slots=True)
class _Chunk:
    """Rows of some lines."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)


class InputReader:
    """Reads one claimed batch's input.

    Args:
        batch: As it was claimed.
        max_requests: More lines fail the batch.
    """

    def __init__(self, batch: BatchJob, objects: ObjectStore, max_requests: int) -> None:
        self._batch = batch
        self._objects = objects
        self._max_requests = max_requests
        self._first_line: dict[str, int] = {}
        self._models: set[str] = set()
        self._faults: list[dict[str, Any]] = []
        self._count = 0
        self._bad_count = 0

    @property
    def good_count(self) -> int:
        """Lines that can be run."""
        return self._count - self._bad_count

    async def read(self, database: Database, now_s: Callable[[], float]) -> bool:
        """Bring the batch from `validating` to `in_progress`, or to `failed`; whether it runs.

        A batch that is cancelled meanwhile, or claimed by another, is left alone.
        """
        chunks = self._chunks()
        # The generator blocks on the file, so each step of it runs in a thread.
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            if not await database.write(partial(self._add, chunk=chunk)):
                return False
        return await database.write(partial(self._finish, now_s=now_s()))

    def _add(self, connection: Connection, chunk: _Chunk) -> bool:
        if not holds(connection, self._batch):
            return False
        connection.execute(insert(REQUESTS), chunk.requests)
        if chunk.outcomes:
            connection.execute(insert(OUTCOMES), chunk.outcomes)
        return True

    def _finish(self, connection: Connection, now_s: float) -> bool:
        if not holds(connection, self._batch):
            return False
        if self._count > self._max_requests:
            message = f"The file has more than {self._max_requests} requests"
            self._fail(connection, "too_many_requests", message, now_s)
        elif self._count == 0:
            self._fail(connection, "empty_file", "The file has no requests", now_s)
        elif self._bad_count == self._count:
            fail_batch(connection, self._batch, self._faults, now_s)
        elif (room := open_room(connection, self._batch.tenant)) is not None and (
            self.good_count > room
        ):
            message = f"The tenant's batches may have {max(0, room)} more open requests"
            self._fail(connection, "request_limit_exceeded", message, now_s)
        else:
            model = self._models.pop() if len(self._models) == 1 else None
            begin_batch(connection, self._batch, model, self._faults, now_s)
            return True
        return False

    def _fail(self, connection: Connection, code: str, message: str, now_s: float) -> None:
        fault = BatchLineError(code=code, message=message, param="input_file_id")
        fail_batch(connection, self._batch, [fault.model_dump()], now_s)

    def _chunks(self) -> Iterator[_Chunk]:
        chunk = _Chunk()
        with self._objects.open(self._batch.input_key) as file:
            for number, start, raw in numbered_lines(file):
                self._count += 1
                if self._count > self._max_requests:
                    return
                self._place(chunk, number, start, raw)
                if len(chunk.requests) == LINES_AT_ONCE:
                    yield chunk
                    chunk = _Chunk()
        if chunk.requests:
            yield chunk

    def _place(self, chunk: _Chunk, line: int, start: int, raw: bytes | None) -> None:
        checked = self._check(line, raw)
        is_bad = isinstance(checked, Rejection)
        custom_id = (checked.custom_id or "") if isinstance(checked, Rejection) else checked
        chunk.requests.append(
            {
                "batch": self._batch.seq,
                "line": line,
                "custom_id": custom_id,
                "start": start,
                "size": len(raw or b""),
                "rank": line,
                "state": RequestState.ENDED if is_bad else RequestState.WAITING,
                "generation": 0,
                "attempts": 0,
                "not_before_s": 0.0,
            }
        )
        if not isinstance(checked, Rejection):
            return
        self._bad_count += 1
        record = checked.record()
        if len(self._faults) < TOLD_FAULTS:
            self._faults.append(BatchLineError(**record["error"]).model_dump())
        chunk.outcomes.append(
            {
                "batch": self._batch.seq,
                "line": line,
                "generation": 0,
                "is_answer": False,
                "record": to_json(record),
            }
        )

    def _check(self, line: int, raw: bytes | None) -> str | Rejection:
        """The line's id, or what is wrong with it."""
        if raw is None:
            return Rejection(line, RejectionCode.INVALID_REQUEST, "the line is too long")
        try:
            # JSON knows neither NaN nor Infinity, and some engines refuse what has them as a whole.
            text = raw.removeprefix(UTF8_MARK) if line == 1 else raw
            sent = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            return Rejection(line, RejectionCode.INVALID_JSON, f"Invalid JSON: {error}")
        try:
            request = _Line.model_validate(sent)
        except ValidationError as error:
            return _rejection(error, sent, line)
        name = request.custom_id
        if request.url != self._batch.endpoint:
            message = f"url must be that of the batch, {self._batch.endpoint}"
            return Rejection(line, RejectionCode.INVALID_URL, message, name, "url")
        if name in self._first_line:
            message = f"custom_id {name!r} was used in line {self._first_line[name]} already"
            return Rejection(line, RejectionCode.DUPLICATE_ID, message, name, "custom_id")
        self._first_line[name] = line
        if len(self._models) <= 1:  # Of several it does not matter which.
            self._models.add(request.body.model)
        return name


def _rejection(error: ValidationError, sent: Any, line: int) -> Rejection:  # noqa: ANN401 - JSON
    if not isinstance(sent, dict):
        return Rejection(line, RejectionCode.INVALID_JSON, "Input should be an object")
    message, param = problem_of(error)
    name = sent.get("custom_id")
    told = name[:512].replace("\0", "") if isinstance(name, str) else None
    return Rejection(line, CODES.get(param, RejectionCode.INVALID_REQUEST), message, told, param)
