"""The audit log: who asked to change the books, what, and what came of it.

One JSON line for each request with a good token that does not only read, refused or not, written
before its answer leaves: what was answered is in the log, and none is sampled. A line has names,
ids, sizes and codes, and nothing else that was sent. What time does to the books (expiry, silence)
is asked for by no caller: `/v1/events` tells it.

A line that cannot be written is counted and logged, and the request goes on: a full disk must not
cost members their leases.
"""

from __future__ import annotations

import io
import json
import os
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import Counter
from starlette.types import Scope

from aqua_protocol import ConfigError

log = structlog.get_logger(__name__)

STANDARD_ERROR: Final = "stderr"
MAX_PATH_LENGTH: Final = 512
"""Characters of a request's path: a name and its route take 170. Doubled, junk takes more room."""
_details: ContextVar[dict[str, object]] = ContextVar("details")


def note(**details: object) -> None:
    """Add to the line of the request that is being served what its path does not tell."""
    if (line := _details.get(None)) is not None:
        line.update(details)


class AuditLog:
    """Appends lines to a file, a new one once it has been moved away, or to standard error.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, target: str, failures: Counter) -> None:
        self._path = None if target == STANDARD_ERROR else Path(target)
        self._failures = failures
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"cannot write the audit log {target}: {error.strerror}",
                remedy="Let AQUA_AUDIT_LOG name a file in a directory of this user, or stderr.",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def begin(self) -> None:
        """Forget the details of another request."""
        _details.set({})

    def write(self, scope: Scope, status: int) -> None:
        """Write the line of an authenticated request."""
        caller, peer = scope["user"], scope["client"]
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "token": caller.token_id,
            "member": caller.member,
            "peer": peer[0] if peer else None,
            "method": scope["method"],
            "path": scope["path"][:MAX_PATH_LENGTH],
            "status": status,
            **_details.get({}),
        }
        try:
            if self._path is not None and _identity(self._path) != self._opened:
                moved, self._file = self._file, self._open()
                moved.close()
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._failures.inc()
            log.error("audit log not written", error=str(error))  # noqa: TRY400 - no fault of ours

    def _open(self) -> io.FileIO:
        if self._path is None:
            return io.FileIO(2, "a", closefd=False)
        file = io.FileIO(self._path, "a", opener=partial(os.open, mode=0o600))
        self._opened = _identity(self._path)
        return file


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
