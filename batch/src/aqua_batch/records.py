"""The OpenAI batch file: one request per line, and what is wrong with those that are none.

A batch is read once, line by line; a request keeps its place in the file rather than its text, so
a file of gigabytes costs a few hundred bytes per line. A bad line never takes the rest of the file
with it: it becomes a `Rejection` with its line number, and `write_errors` writes those as OpenAI's
error file does.

Places need a file that can be read twice, in any order. A gzip file and a pipe cannot, so they are
copied to a temporary file first.

Source: OpenAI Batch API, "Preparing your batch file": custom_id, method, url, body.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, TextIO, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from aqua_batch.bodies import URLS, ChatBody, CompletionBody, Text, problem_of, prompt_parts
from aqua_protocol.errors import ConfigError

LONGEST_LINE_BYTES: Final = 64 * 2**20
"""Bytes; a longer line is a mistake (a file without line ends), and would take the memory. Doubled,
such a file takes twice as much before it is refused."""

GZIP: Final = b"\x1f\x8b"
UTF8_MARK: Final = b"\xef\xbb\xbf"


class RejectionCode(StrEnum):
    """Why a line is not run; the codes are OpenAI's where it has one."""

    INVALID_JSON = "invalid_json_line"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_ID = "duplicate_custom_id"
    INVALID_URL = "invalid_url"
    INVALID_METHOD = "invalid_method"
    CONTEXT_LENGTH = "context_length_exceeded"
    ENGINE = "engine_error"


CODES: Final = {"method": RejectionCode.INVALID_METHOD, "url": RejectionCode.INVALID_URL}
"""Codes of single fields; any other is an invalid request."""


class _Request(BaseModel):
    """A line; which body it has follows from its URL."""

    model_config = ConfigDict(strict=True)

    custom_id: Text
    method: Literal["POST"] = "POST"


class _Chat(_Request):
    url: Literal["/v1/chat/completions"]
    body: ChatBody


class _Completion(_Request):
    url: Literal["/v1/completions"]
    body: CompletionBody


REQUESTS: Final[TypeAdapter[_Chat | _Completion]] = TypeAdapter(
    Annotated[_Chat | _Completion, Field(discriminator="url")]
)
"""Reads a line, JSON and all."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line that is not run.

    Attributes:
        line: Line number, from 1.
        custom_id: If the line has one.
        param: Field of the line that is wrong, if it is one.
    """

    line: int
    code: RejectionCode
    message: str
    custom_id: str | None = None
    param: str | None = None

    def record(self) -> dict[str, Any]:
        """The line as OpenAI's error file has it, with line and field in the error."""
        return {
            "id": f"batch_req_line_{self.line}",
            "custom_id": self.custom_id,
            "response": None,
            "error": {
                "code": self.code.value,
                "message": f"line {self.line}: {self.message}",
                "param": self.param,
                "line": self.line,
            },
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of the file.

    Attributes:
        line: Line number, from 1.
        start, size: Where the line lies in the file, in bytes, its line end not included.
        answer_count: Answers to each prompt.
        part_count: Prompts times answers: what an engine has to generate.
    """

    line: int
    custom_id: str
    url: str
    start: int
    size: int
    answer_count: int = 1
    part_count: int = 1


class _Content:
    """A file that can be read in any order; a copy goes with its last reference."""

    def __init__(self, path: Path, *, is_copy: bool) -> None:
        self.path = path
        if is_copy:
            weakref.finalize(self, path.unlink, missing_ok=True)


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A batch as read.

    Attributes:
        path: As the user named it.
        entries: Requests that can run, in order of the file.
        rejections: Lines that cannot, in order of the file.
        content: What the lines are read from: the file, or its copy.
    """

    path: Path
    entries: list[Entry]
    rejections: list[Rejection]
    content: _Content

    def bodies(self, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
        """The bodies of some entries, read again from the file."""
        for raw in self.lines(entries):
            body: dict[str, Any] = json.loads(raw)["body"]
            yield body

    def lines(self, entries: Iterable[Entry]) -> Iterator[bytes]:
        """The lines of some entries, as they stand in the file, without line ends."""
        with self.content.path.open("rb") as file:
            for entry in entries:
                file.seek(entry.start)
                yield file.read(entry.size)


def read_batch(path: Path, on_progress: Callable[[int], None] = lambda _: None) -> BatchFile:
    """Read and check a batch file, gzipped or not.

    Args:
        on_progress: Called with the number of bytes read, before zipping.

    Raises:
        ConfigError: The file cannot be read, or has no line at all.
    """
    entries: list[Entry] = []
    rejections: list[Rejection] = []
    first_line: dict[str, int] = {}
    try:
        content = _readable(path)
        with content.path.open("rb") as file:
            file.seek(len(UTF8_MARK) if file.read(len(UTF8_MARK)) == UTF8_MARK else 0)
            for number, begin, raw in numbered_lines(file):
                on_progress(begin)
                checked = _check(raw, number, begin, first_line)
                if isinstance(checked, Entry):
                    entries.append(checked)
                else:
                    rejections.append(checked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{path} is not a whole gzip file: {error}", remedy="Copy or compress it again."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="Check the path.") from error
    if not entries and not rejections:
        raise ConfigError(
            f"{path} is empty: it has no requests", remedy="Write one JSON request per line."
        )
    return BatchFile(path, entries, rejections, content)


def _readable(path: Path) -> _Content:
    """The file itself where it can be read in any order, a plain copy where it cannot."""
    with path.open("rb") as file:
        content = _Content(path, is_copy=False) if file.seekable() else _copy(file)
    with content.path.open("rb") as file:
        if file.read(len(GZIP)) != GZIP:
            return content
        file.seek(0)
        with gzip.open(file) as plain:
            return _copy(cast("IO[bytes]", plain))


def _copy(file: IO[bytes]) -> _Content:
    handle, name = tempfile.mkstemp(prefix="aqua-batch-", suffix=".jsonl")
    content = _Content(Path(name), is_copy=True)
    with os.fdopen(handle, "wb") as copy:
        shutil.copyfileobj(file, copy)
    return content


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    """Number, place and content of each line that is not blank; None where it is too long."""
    number, begin = 0, file.tell()
    while raw := file.readline(LONGEST_LINE_BYTES):
        number += 1
        size = len(raw)
        content: bytes | None = raw.rstrip(b"\r\n")
        while len(raw) == LONGEST_LINE_BYTES and not raw.endswith(b"\n"):
            raw = file.readline(LONGEST_LINE_BYTES)
            size += len(raw)
            content = None
        if content is None or content.strip():
            yield number, begin, content
        begin += size


def _check(
    content: bytes | None, line: int, start: int, first_line: dict[str, int]
) -> Entry | Rejection:
    if content is None:
        message = f"longer than {LONGEST_LINE_BYTES >> 20} MiB"
        return Rejection(line, RejectionCode.INVALID_REQUEST, message)
    try:
        request = REQUESTS.validate_json(content)
    except ValidationError as error:
        return _rejection(error, content, line)
    name = request.custom_id
    if name in first_line:
        message = f"custom_id {name!r} was used in line {first_line[name]} already"
        return Rejection(line, RejectionCode.DUPLICATE_ID, message, name, "custom_id")
    first_line[name] = line
    body = request.body
    prompts = len(prompt_parts(body.prompt)) if isinstance(body, CompletionBody) else 1
    answers = body.n or 1
    return Entry(line, name, request.url, start, len(content), answers, prompts * answers)


def _rejection(error: ValidationError, content: bytes, line: int) -> Rejection:
    """A line that is no request, by the code of what is wrong first."""
    first, (message, param) = error.errors()[0], problem_of(error)
    if first["type"].startswith("union_tag"):
        code, message, param = RejectionCode.INVALID_URL, f"url must be one of {URLS}", "url"
    elif not param:
        return Rejection(line, RejectionCode.INVALID_JSON, first["msg"])
    else:
        code = CODES.get(param, RejectionCode.INVALID_REQUEST)
    name = from_json(content).get("custom_id")
    return Rejection(line, code, message, name if isinstance(name, str) else None, param)


def write_errors(file: TextIO, rejections: Iterable[Rejection]) -> None:
    """Write rejections as OpenAI's error file does."""
    file.writelines(
        json.dumps(rejection.record(), ensure_ascii=False) + "\n" for rejection in rejections
    )
