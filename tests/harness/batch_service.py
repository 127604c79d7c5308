"""A real batch service in a process that can be killed, frozen and started again.

The process finds its function here, so this module imports little: not OpenAI's client, which takes
ten times as long to import as a service takes to start.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self, cast

from harness.bounds import HANG_S, stopwatch
from harness.fork_server import ForkedProcess
from harness.patience import variables

if TYPE_CHECKING:
    import openai
    from openai.types import Batch
    from sqlalchemy import Connection

    from aqua_batch.service.rows.request_rows import LeasedRequest


class BatchServiceProcess:
    """One service; starts at once, on a free port.

    Args:
        data_dir: Of its database and files; several services may share one.
        engines: Their URLs.
        is_fenced: False for a control without fencing: late answers are recorded, too.
        order: Of batches that engines do not take at once. BlendServe's is found by a process that
            compiles what it computes with, so it is for tests that are about it.
        settings: Further settings, `lease_s="0.5"`.
    """

    def __init__(
        self,
        data_dir: Path,
        engines: Iterable[str],
        *,
        is_fenced: bool = True,
        order: str = "fcfs",
        **settings: str,
    ) -> None:
        ours = {
            "AQUA_BATCH_DATA_DIR": str(data_dir),
            "AQUA_BATCH_ENGINES": ",".join(engines),
            "AQUA_BATCH_LISTEN_PORT": "0",
            "AQUA_BATCH_ORDER": order,
            **{f"AQUA_BATCH_{name.upper()}": value for name, value in settings.items()},
        }
        log, theirs = os.pipe()
        self._lines: Final[SimpleQueue[str]] = SimpleQueue()
        threading.Thread(target=_drain, args=(log, self._lines), daemon=True).start()
        self.process: Final = ForkedProcess(
            _serve if is_fenced else _serve_unfenced,
            streams={2: theirs},
            environment=variables(**ours),
        )
        os.close(theirs)
        self._data_dir: Final = data_dir
        self.said: list[dict[str, Any]] = []
        try:
            self.url: Final[str] = self.wait_to_say("listening")["url"]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """OpenAI's own client of this service."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, timeout=HANG_S)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self.process.kill()
        self.process.wait(HANG_S)

    def stop(self) -> int:
        """SIGTERM it, and wait until it is gone; its exit status."""
        self.process.terminate()
        return self.process.wait(HANG_S)

    def freeze(self) -> None:
        """Stop it as a machine that stands still, between two transactions of its own.

        One that stands still within a write holds SQLite's lock, so that no other writes.
        """
        while True:
            self.process.send_signal(signal.SIGSTOP)
            threads = Path(f"/proc/{self.process.pid}/task")
            while any(_state_of(each) != "T" for each in threads.iterdir()):
                pass
            if not self._is_writing():
                return
            self.thaw()

    def _is_writing(self) -> bool:
        with closing(sqlite3.connect(self._data_dir / "batch.db", timeout=0.0)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            return False

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def wait_to_say(self, event: str) -> dict[str, Any]:
        """Wait for an event in its log."""
        for line in iter(self._lines.get, ""):
            try:
                said = json.loads(line)
            except ValueError:
                raise AssertionError(line + "".join(iter(self._lines.get, ""))) from None
            self.said.append(said)
            if said["event"] == event:
                return dict(said)
        raise AssertionError(f"the service ended before it was {event}: {self.said}")


def _drain(log: int, lines: SimpleQueue[str]) -> None:
    """Read on whether anybody waits or not: a service whose log is full would stand still."""
    with os.fdopen(log, encoding="utf-8") as stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(") ")[2][0]


def _serve() -> None:
    from aqua_batch.service.server import serve
    from aqua_batch.service.settings import load_batch_settings
    from aqua_cli.service import configure_logs

    settings = load_batch_settings()
    configure_logs(settings.log_level)
    serve(settings)


def _serve_unfenced() -> None:
    from aqua_batch.service.rows import request_rows

    end_leases = request_rows.end_leases

    def all_of_them(
        connection: Connection, requests: Sequence[LeasedRequest]
    ) -> set[tuple[int, int, int]]:
        end_leases(connection, requests)
        return {each.key for each in requests}

    request_rows.end_leases = all_of_them
    _serve()


def chat_line(
    custom_id: str, prompt: str, url: str = "/v1/chat/completions", model: str = "m"
) -> bytes:
    """A line of a batch file."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode() + b"\n"


def submit(
    client: openai.OpenAI,
    lines: Iterable[bytes],
    window: str = "24h",
    endpoint: str = "/v1/chat/completions",
) -> Batch:
    """Upload lines and create a batch of them, as OpenAI's examples do."""
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=cast("Any", endpoint),
        completion_window=cast("Any", window),
    )


def wait_until(
    client: openai.OpenAI, batch_id: str, is_so: Callable[[Batch], bool] | None = None
) -> Batch:
    """Look at a batch until something is so; by default, until it has ended."""
    last = {"completed", "failed", "expired", "cancelled"}
    ended = stopwatch()
    while ended() < HANG_S:
        batch = client.batches.retrieve(batch_id)
        if is_so(batch) if is_so is not None else batch.status in last:
            return batch
        time.sleep(0.02)  # The API has no event to wait for.
    raise TimeoutError(f"{batch_id} is still {batch.status}")


def completed(batch: Batch) -> int:
    """How many of its requests were answered."""
    return batch.request_counts.completed if batch.request_counts else 0


def records(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none where there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
