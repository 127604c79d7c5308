"""The OpenAI batch file: one request per line, and what is wrong with those that are none.

A batch is read once, line by line; a request keeps its place in the file rather than its text, so
a file of gigabytes costs a few hundred bytes per line. A bad line never takes the rest of the file
with it: it becomes a `Rejection` with its line number, and `errors` writes those as OpenAI's error
file does.

Source: OpenAI Batch API, "Preparing your batch file": custom_id, method, url, body.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TextIO

from aqua_protocol.errors import ConfigError

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
URLS: Final = (CHAT_URL, COMPLETION_URL)

LONGEST_LINE_BYTES: Final = 64 * 2**20
"""A longer line is a mistake (a file without line ends), and would take the memory."""


class RejectionCode(StrEnum):
    """Why a line is not run; the codes are OpenAI's where it has one."""

    INVALID_JSON = "invalid_json_line"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_ID = "duplicate_custom_id"
    INVALID_URL = "invalid_url"
    INVALID_METHOD = "invalid_method"
    CONTEXT_LENGTH = "context_length_exceeded"
    ENGINE = "engine_error"


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of the file.

    Attributes:
        line: Line number, from 1.
        start, size: Where the line lies in the file, in bytes, its line end not included.
    """

    line: int
    custom_id: str
    url: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A batch as read.

    Attributes:
        entries: Requests that can run, in order of the file.
        rejections: Lines that cannot, in order of the file.
    """

    path: Path
    entries: list[Entry]
    rejections: list[Rejection]

    def bodies(self, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
        """The bodies of some entries, read again from the file."""
        for raw in self.lines(entries):
            body: dict[str, Any] = json.loads(raw)["body"]
            yield body

    def lines(self, entries: Iterable[Entry]) -> Iterator[bytes]:
        """The lines of some entries, as they stand in the file, without line ends."""
        with self.path.open("rb") as file:
            for entry in entries:
                file.seek(entry.start)
                yield file.read(entry.size)


def read_batch(path: Path) -> BatchFile:
    """Read and check a batch file.

    Raises:
        ConfigError: The file cannot be read, or has no line at all.
    """
    entries: list[Entry] = []
    rejections: list[Rejection] = []
    first_line: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(LONGEST_LINE_BYTES):
                number += 1
                content = raw.rstrip(b"\r\n")
                begin, start = start, start + len(raw)
                if number == 1 and content.startswith(b"\xef\xbb\xbf"):
                    content, begin = content[3:], begin + 3
                if not content.strip():
                    continue
                checked = _check(content, number, begin, first_line)
                if isinstance(checked, Entry):
                    entries.append(checked)
                else:
                    rejections.append(checked)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="Check the path.") from error
    if not entries and not rejections:
        raise ConfigError(
            f"{path} is empty: it has no requests", remedy="Write one JSON request per line."
        )
    return BatchFile(path, entries, rejections)


def _check(  # noqa: PLR0911 - one return per way to be wrong
    content: bytes, line: int, start: int, first_line: dict[str, int]
) -> Entry | Rejection:
    try:
        value = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error.reason
        return Rejection(line, RejectionCode.INVALID_JSON, f"not valid JSON: {reason}{where}")
    except RecursionError:
        return Rejection(line, RejectionCode.INVALID_JSON, "JSON nested too deeply")
    if not isinstance(value, dict):
        return Rejection(line, RejectionCode.INVALID_JSON, "a line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Rejection(
            line,
            RejectionCode.INVALID_REQUEST,
            "custom_id must be a non-empty string",
            param="custom_id",
        )
    if custom_id in first_line:
        return Rejection(
            line,
            RejectionCode.DUPLICATE_ID,
            f"custom_id {custom_id!r} was used in line {first_line[custom_id]} already",
            custom_id,
            "custom_id",
        )
    problem = _request_problem(value)
    if problem is not None:
        code, message, param = problem
        return Rejection(line, code, message, custom_id, param)
    first_line[custom_id] = line
    return Entry(line, custom_id, value["url"], start, len(content))


def _request_problem(  # noqa: PLR0911 - as above
    value: dict[str, Any],
) -> tuple[RejectionCode, str, str] | None:
    """What is wrong with a line that has an id of its own: code, message, field."""
    if value.get("method", "POST") != "POST":
        return RejectionCode.INVALID_METHOD, "method must be POST", "method"
    url = value.get("url")
    if url not in URLS:
        return RejectionCode.INVALID_URL, f"url must be one of {', '.join(URLS)}", "url"
    body = value.get("body")
    if not isinstance(body, dict):
        return RejectionCode.INVALID_REQUEST, "body must be an object", "body"
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        return (
            RejectionCode.INVALID_REQUEST,
            "max_tokens must be a positive integer",
            "body.max_tokens",
        )
    if body.get("n", 1) != 1:
        return RejectionCode.INVALID_REQUEST, "only n = 1 can be run", "body.n"
    if url == CHAT_URL:
        return _messages_problem(body.get("messages"))
    prompt = body.get("prompt")
    is_text = isinstance(prompt, str) and prompt != ""
    is_tokens = (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )
    if not (is_text or is_tokens):
        message = "prompt must be a non-empty string or a list of token ids"
        return RejectionCode.INVALID_REQUEST, message, "body.prompt"
    return None


def _messages_problem(messages: object) -> tuple[RejectionCode, str, str] | None:
    if not isinstance(messages, list) or not messages:
        message = "messages must be a non-empty list"
        return RejectionCode.INVALID_REQUEST, message, "body.messages"
    for index, each in enumerate(messages):
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            message = f"message {index} must be an object with a role"
            return RejectionCode.INVALID_REQUEST, message, f"body.messages[{index}]"
        content = each.get("content")
        if not isinstance(content, str | list | None):
            message = f"content of message {index} must be text or a list of parts"
            return RejectionCode.INVALID_REQUEST, message, f"body.messages[{index}].content"
    return None


def output_limit(body: dict[str, Any]) -> int | None:
    """Most tokens that a request may generate, if it says so."""
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return int(limit) if limit is not None else None


def known_length(body: dict[str, Any]) -> int | None:
    """Tokens that a request will generate, if it fixes them.

    vLLM's `ignore_eos`, and `min_tokens` at the limit, do: that is how media tokens are asked for.
    """
    limit = output_limit(body)
    if limit is not None and (body.get("ignore_eos") is True or body.get("min_tokens") == limit):
        return limit
    return None


def write_errors(file: TextIO, rejections: Iterable[Rejection]) -> None:
    """Write rejections as OpenAI's error file does, with line and field in the error."""
    for rejection in rejections:
        record = {
            "id": f"batch_req_line_{rejection.line}",
            "custom_id": rejection.custom_id,
            "response": None,
            "error": {
                "code": rejection.code.value,
                "message": f"line {rejection.line}: {rejection.message}",
                "param": rejection.param,
                "line": rejection.line,
            },
        }
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
