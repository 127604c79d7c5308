"""`aqua batch serve` as an operator starts it, and one batch at it by OpenAI's own client.

Several services may share a folder, with database and files in it: whichever is asked tells the
same, and goes on with what another one has left.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

from aqua_demo.engines.api_server import ANSWER_WITHIN_S, READY_WITHIN_S, metric_sums
from aqua_demo.engines.race import Run
from aqua_demo.processes import ProcessGroup, await_listening

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

ENDPOINT: Final = "/v1/completions"
LEASE_S: Final = 10.0
"""Seconds until what a killed service held is taken up, long enough that one on a busy machine does
not pass for dead. Doubled, what a dead one held waits ten seconds longer."""
AT_ONCE: Final = 16
"""Requests of all services at an engine: more than fit into its memory. Doubled, so many are at
engines from the start on that order makes no difference."""


class BatchDispatcher:
    """One service over a folder and engines.

    Args:
        group: Whose child it becomes.
        name: What it is called.
        folder: Of database and files; several may share it.
        engines: Their URLs.
        order: `AQUA_BATCH_ORDER`.
        model: Folder of the model that the order is found for.
        at_once: Requests that each engine gets from this service.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        folder: Path,
        engines: list[str],
        *,
        order: str,
        model: Path,
        at_once: int = AT_ONCE,
    ) -> None:
        self.name: Final = name
        self._child = group.start_service(
            name,
            [str(Path(sys.executable).with_name("aqua-batch")), "serve"],
            {
                "AQUA_BATCH_DATA_DIR": str(folder),
                "AQUA_BATCH_ENGINES": ",".join(engines),
                "AQUA_BATCH_LISTEN_PORT": "0",
                "AQUA_BATCH_LEASE_S": str(LEASE_S),
                "AQUA_BATCH_ENGINE_CONCURRENCY": str(at_once),
                "AQUA_BATCH_ORDER": order,
                "AQUA_BATCH_MODEL": str(model),
            },
        )
        self.url: Final = await_listening(group, self._child)

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._child.is_killed

    def running(self) -> int:
        """Requests that it has at engines."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_WITHIN_S, trust_env=False).text
        return int(metric_sums(text).get("aqua_batch_running_requests", 0))

    def kill(self) -> None:
        """SIGKILL it."""
        self._child.kill()

    def stop(self) -> None:
        """Stop it as an operator does."""
        self._child.is_killed = True
        self._child.stop()


class OfflineBatch:
    """A batch from its file to its answers.

    Args:
        dispatcher: Who gets it.
        file: In JSON lines.

    Attributes:
        progress: Seconds since it was submitted, and requests answered until then.
        status: As OpenAI calls it.
    """

    def __init__(self, dispatcher: BatchDispatcher, file: Path) -> None:
        self._clients: dict[str, OpenAI] = {}
        client = self._client(dispatcher)
        uploaded = client.files.create(file=file, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h"
        )
        self._id: Final[str] = batch.id
        self._begun_s: Final = time.monotonic()
        self.progress: list[tuple[float, int]] = [(0.0, 0)]
        self.status = batch.status

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status in {"completed", "failed", "expired", "cancelled"}

    @property
    def answered(self) -> int:
        """Requests that were answered at the last look."""
        return self.progress[-1][1]

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._begun_s

    def look(self, dispatcher: BatchDispatcher) -> Batch:
        """Ask how it stands."""
        batch = self._client(dispatcher).batches.retrieve(self._id)
        if batch.request_counts is not None and not self.has_ended:
            self.progress.append((self.age_s, batch.request_counts.completed))
        self.status = batch.status
        return batch

    def run(self, dispatcher: BatchDispatcher) -> Run:
        """What became of its requests: `offline` rows of answers, `errors`, and its `progress`."""
        batch = self.look(dispatcher)
        rows = []
        for line in self._lines(dispatcher, batch.output_file_id):
            body = line["response"]["body"]
            row = {"name": line["custom_id"], "tokens": body["choices"][0]["token_ids"]}
            rows.append(row | {"prompt_tokens": body["usage"]["prompt_tokens"]})
        errors = self._lines(dispatcher, batch.error_file_id)
        return {
            "offline": rows,
            "errors": errors,
            "status": self.status,
            "progress": self.progress,
        }

    def _lines(self, dispatcher: BatchDispatcher, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self._client(dispatcher).files.content(file_id).text
        return [json.loads(line) for line in text.splitlines()]

    def _client(self, dispatcher: BatchDispatcher) -> OpenAI:
        # Here, because importing it takes a second.
        from openai import OpenAI

        if dispatcher.url not in self._clients:
            url = f"{dispatcher.url}/v1"
            client = OpenAI(base_url=url, api_key="none", timeout=READY_WITHIN_S)
            self._clients[dispatcher.url] = client
        return self._clients[dispatcher.url]
