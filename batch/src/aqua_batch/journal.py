"""Results on disk: written as they come, found again after a crash.

One line per finished request, in OpenAI's output format, appended and flushed before the request
counts as done. A line is the unit of truth: after a crash the file is read, a last line without
its end (the machine died while writing it) is cut off, and every request with a whole line is not
run again. So nothing is lost but what was in flight, and nothing is done twice.

Promises: after `record` returns, the result survives the death of the process; after `sync`, that
of the machine. Two writers exclude each other by a lock on the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from aqua_batch.outputs import output_tokens
from aqua_protocol.errors import ConfigError

SYNC_EVERY = 64
"""Results between two syncs: what a power cut can cost. A sync takes milliseconds, as an answer
does. Doubled, it can cost twice as many."""


class ResultJournal:
    """An output file that knows what it holds.

    Attributes:
        finished: Output tokens of each finished request, by custom_id; 0 where unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, int] = {}
        self._unsynced = 0
        if path.suffix == ".gz":
            raise ConfigError(
                f"{path}: results are appended as plain lines, which gzip is not",
                remedy="Name a .jsonl file, and compress it when the run has ended.",
            )
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}", remedy="Choose another output file."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"{path} is being written by another run",
                remedy="Wait for it, or choose another output file.",
            ) from error
        try:
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> None:
        self._file.seek(0)
        good = 0
        for number, raw in enumerate(self._file, start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                record = json.loads(raw)
                custom_id = record["custom_id"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{self.path}, line {number}: not a result of a batch",
                    remedy="Choose an output file of its own for each batch.",
                ) from error
            self.finished[custom_id] = output_tokens(record)
            good += len(raw)
        self._file.truncate(good)
        self._file.seek(0, os.SEEK_END)

    def record(self, result: dict[str, Any]) -> None:
        """Append a finished request.

        Args:
            result: In OpenAI's output format, with `custom_id`.
        """
        custom_id = result["custom_id"]
        assert custom_id not in self.finished, custom_id
        self._file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.finished[custom_id] = output_tokens(result)
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Wait until everything recorded is on the disk."""
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        """Sync and close; harmless when closed."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
