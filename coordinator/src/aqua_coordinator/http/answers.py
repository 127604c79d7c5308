"""Errors as HTTP answers: one shape, wherever the error was noticed.

Every answer that is not a success carries an `ErrorBody` under the status of its type: errors of
operations, bodies that do not fit, unknown paths, wrong methods, overload, and mistakes of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from aqua_coordinator.access.audit import note
from aqua_protocol import PROTOCOL_VERSION, AquaError, RequestInvalidError, UnknownResourceError
from aqua_protocol.errors import (
    MethodNotAllowedError,
    RequestTooLargeError,
    UnauthenticatedError,
    VersionMismatchError,
)

log = structlog.get_logger(__name__)

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers and body."""

MAX_FAULTS: Final = 20
"""Faults of a body that are named: a person mends a few at once, and a body of garbage has
thousands. Doubled, the longest refusal takes 4 KiB instead of 2."""
JSON_HEADER: Final = (b"content-type", b"application/json")


def typed(error: Exception) -> AquaError:
    """The Aqua error that stands for any exception; an unexpected one is logged with its trace."""
    if isinstance(error, AquaError):
        return error
    if isinstance(error, RequestValidationError):
        # FastAPI puts in front where the value was: body, path, query or header.
        faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        return _other_version(error.body) or _invalid(faults)
    if isinstance(error, HTTPException):
        return _typed_http(error)
    log.error("unexpected error", exc_info=error)
    return AquaError(
        "the coordinator made a mistake",
        remedy="Please report it, with the coordinator's log of this moment.",
    )


def _typed_http(error: HTTPException) -> AquaError:
    """What Starlette and FastAPI refuse by themselves."""
    match error.status_code:
        case 404:
            remedy = "/openapi.json lists every path."
            return UnknownResourceError("there is no such path", remedy=remedy)
        case 405:
            return MethodNotAllowedError("the method does not apply to this path")
        case 413:
            return RequestTooLargeError("the request body is too large")
        case _:
            return RequestInvalidError(str(error.detail))


def _invalid(faults: Sequence[Mapping[str, Any]]) -> AquaError:
    """A body or parameter that does not fit, with where and why; what was sent stays out of it."""
    named = [
        {"field": ".".join(str(part) for part in fault["loc"]), "fault": str(fault["msg"])}
        for fault in faults[:MAX_FAULTS]
    ]
    first = named[0] if named else {"field": "", "fault": "invalid"}
    where = f"{first['field']}: " if first["field"] else ""
    return RequestInvalidError(f"{where}{first['fault']}", faults=named)


def _other_version(sent: Any) -> AquaError | None:  # noqa: ANN401 - any JSON
    """The better reason for a report that does not fit: it is of another protocol version."""
    theirs = sent.get("protocol_version") if isinstance(sent, dict) else None
    if not isinstance(theirs, int) or theirs == PROTOCOL_VERSION:
        return None
    return VersionMismatchError(
        f"the member speaks protocol {theirs}, this coordinator speaks {PROTOCOL_VERSION}",
        theirs=theirs,
        ours=PROTOCOL_VERSION,
    )


def error_answer(error: AquaError) -> Answer:
    """How an error is answered; the length of the body is not among the headers."""
    note(code=error.code)
    headers = [JSON_HEADER]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, UnauthenticatedError):
        headers.append((b"www-authenticate", b'Bearer realm="aqua"'))
    return error.http_status, headers, error.to_body().model_dump_json().encode()
