"""A real coordinator with its embedded store, in a process that can be killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from unittest import mock

import httpx

from harness.bounds import HANG_S
from harness.fork_server import ForkedProcess
from harness.patience import variables

if TYPE_CHECKING:
    from collections.abc import Iterator

START_WITHIN_S: Final = HANG_S
STOP_WITHIN_S: Final = HANG_S


class CoordinatorProcess:
    """One coordinator; starts at once, on a free port.

    Args:
        data_dir: Of the embedded store; a path short enough for its Unix socket.
        port: To listen on; 0 takes a free one.
        library: File with steps over the books as another version has them; its own without.
        environment: `AQUA_*` variables, above those of `harness.patience`.
    """

    def __init__(
        self, data_dir: Path, *, port: int = 0, library: str = "", **environment: str
    ) -> None:
        log, theirs = os.pipe()
        # Not a buffered reader: for what it holds already, `select` would wait in vain.
        self._log: Final = open(log, "rb", buffering=0)  # noqa: PTH123, SIM115 - a descriptor
        self.process: Final = ForkedProcess(
            _serve,
            str(port),
            str(data_dir),
            library,
            streams={2: theirs},
            environment=variables(**environment),
        )
        os.close(theirs)
        self.data_dir: Final = data_dir
        self.url: Final[str] = self._announcement("listening")["url"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> Any:  # noqa: ANN401 - whatever the path answers
        """Read something under `/v1/`."""
        answer = httpx.get(f"{self.url}/v1/{path}", trust_env=False, timeout=HANG_S)
        return answer.raise_for_status().json()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:  # noqa: ANN401 - as above
        """Do something under `/v1/`."""
        response = httpx.post(
            f"{self.url}/v1/{path}", json=body, headers=headers, trust_env=False, timeout=HANG_S
        )
        return response.raise_for_status().json()

    def kill(self) -> None:
        """SIGKILL the coordinator and its store, and wait until both are gone."""
        for child in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.kill()
        self.process.wait(STOP_WITHIN_S)
        self._log.close()

    def children(self) -> list[int]:
        """Its child processes: the embedded store."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return [int(pid) for pid in listing.read_text().split()]
        except FileNotFoundError:
            return []

    def _announcement(self, event: str) -> dict[str, Any]:
        """Read the log up to the line of this event."""
        give_up_at_s = time.monotonic() + START_WITHIN_S
        seen: list[bytes] = []
        while (left_s := give_up_at_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._log], [], [], left_s)
            line = self._log.readline() if ready else b""
            if not line:
                break
            seen.append(line)
            with contextlib.suppress(ValueError):
                entry: dict[str, Any] = json.loads(line)
                if entry.get("event") == event:
                    return entry
        self.process.kill()
        self.process.wait(STOP_WITHIN_S)
        self._log.close()
        raise TimeoutError("the coordinator did not start:\n" + b"".join(seen).decode())


def _serve(port: str, data_dir: str, library: str) -> None:
    from aqua_coordinator.cli import main
    from aqua_coordinator.store.scripts import Library

    if library:
        source = Path(library).read_text()
        name = source.partition("\n")[0].removeprefix("#!lua name=")
        # That version did not say whether the books have quotas; the code around it, which is this
        # version's, reads that at every sweep.
        count = "count('rightful'"
        assert source.count(count) == 1, library
        source = source.replace(count, f"count('quotas', 1)\n{count}")
        released = mock.patch(
            "aqua_coordinator.store.pipeline.load_library", return_value=Library(name, source)
        )
        released.start()
        # It kept no history and has no step for it: every sweep that tried would crash.
        mock.patch("aqua_coordinator.store.history.History.keep", mock.AsyncMock()).start()
    sys.argv = ["aqua-coordinator", "serve", "--port", port, "--data-dir", data_dir]
    main()


@contextlib.contextmanager
def data_dir() -> Iterator[Path]:
    """A directory for an embedded store, with a path short enough for its socket."""
    with tempfile.TemporaryDirectory(
        prefix="aqua-books-", dir="/tmp", ignore_cleanup_errors=True
    ) as path:
        yield Path(path)
