"""vLLM's API server as a serving engineer starts it, people who ask it, and what its counters say.

The command is vLLM's own, with the two flags of the tutorial where it co-serves. People's requests
go to it by OpenAI's client, as streams; each is sent when it is due, whatever became of the others,
and the moments at which its tokens come are noted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aqua_demo.engines.online_load import OnlineLoad, Row, draw_prompt, unanswered
from aqua_demo.engines.paused_clock import ONE_THREAD
from aqua_demo.engines.race import Run
from aqua_demo.engines.scale import with_aqua
from aqua_demo.messages import SAMPLE_INTERVAL_S
from aqua_demo.processes import DemoError, ProcessGroup
from aqua_protocol.supervision import SerialExecutor

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MODEL_NAME: Final = "tiny"
READY_WITHIN_S: Final = 900.0
"""Seconds for an engine to start: importing vLLM takes minutes beside busy neighbours. Doubled, a
demo whose engine hangs says so a quarter of an hour later."""
ANSWER_WITHIN_S: Final = 60.0
"""Seconds for metrics on a busy machine. Doubled, one that hangs is told of a minute later."""
KEPT_S: Final = 2.0
"""Seconds that an idle connection is kept: less than the 5 after which vLLM closes one, for a
request sent at that moment is lost. Doubled, a slow machine may lose some."""
EXACT: Final = {"ignore_eos": True, "return_token_ids": True}
"""Fields of vLLM's, for answers of known lengths that are compared token by token."""


class ApiServer:
    """One engine behind HTTP.

    Args:
        group: Whose child it becomes.
        name: What it is called.
        model: Its folder, with a tokenizer.
        engine: Options as vLLM calls them.
        aqua: Options of the adapter; None for a vLLM as it is.
        environment: Further variables.
        port: Where it listens; a free one if None.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        model: Path,
        engine: Mapping[str, Any],
        aqua: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port: Final = port or _free_port()
        self.name: Final = name
        self.url: Final = f"http://127.0.0.1:{self.port}"
        options = with_aqua(engine, aqua)
        if aqua is not None:
            options["middleware"] = "aqualib.engines.vllm.AquaMiddleware"
        options |= {"model": model, "served_model_name": MODEL_NAME, "host": "127.0.0.1"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        self._group = group
        self._child = group.start_service(
            name,
            [*command, *flags_of(options | {"port": self.port})],
            {**ONE_THREAD, **quiet, **(environment or {})},
        )
        self._http = httpx.Client(
            base_url=self.url,
            timeout=ANSWER_WITHIN_S,
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            trust_env=False,
        )

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._child.is_killed

    def await_ready(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until it answers.

        Raises:
            DemoError: It did not start; its log is in the message.
        """
        until_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < until_s:
            try:
                if self._http.get("/health").is_success:
                    return
            except httpx.TransportError:
                on_wait()
            if self._child.wait(SAMPLE_INTERVAL_S) is not None:
                raise self._group.died(self.name)
        raise DemoError(
            f"{self.name} does not answer after {READY_WITHIN_S:.0f} s:\n{self._child.log_tail()}"
        )

    def counters(self) -> dict[str, float]:
        """What `/metrics` says, by name; sums over labels. Nothing of one that was killed."""
        return {} if self.is_killed else metric_sums(self._http.get("/metrics").text)

    def kill(self) -> None:
        """SIGKILL the server and its engine."""
        self._child.kill()
        self._http.close()


class OnlineClient:
    """People who ask an engine, on a thread of their own.

    Args:
        server: Whom they ask.
        load: When, and how much.
        seed: Of the prompts.

    Attributes:
        rows: Of each request, as far as it has come: `arrival_s`, `tokens`, `token_s`, `end_s`.
    """

    def __init__(self, server: ApiServer, load: OnlineLoad, seed: int) -> None:
        self.rows: Final = [unanswered(*arrival) for arrival in load.arrivals]
        self._seed = seed
        self._url = server.url
        self._clients = SerialExecutor("demo-clients")
        self._ended: Future[float] = self._clients.submit(lambda: asyncio.run(self._ask_all()))

    @property
    def has_ended(self) -> bool:
        """Whether all have their answers, or one failed."""
        return self._ended.done()

    @property
    def answered(self) -> int:
        """Requests that have their whole answer."""
        return sum("end_s" in row for row in self.rows)

    def run(self) -> Run:
        """Wait until they have; the requests, and seconds until the last one ended.

        Raises:
            DemoError: One got none.
        """
        from openai import OpenAIError

        try:
            return {"online": self.rows, "seconds": self._ended.result()}
        except OpenAIError as error:
            raise DemoError(f"an online request failed: {error}") from error

    async def _ask_all(self) -> float:
        # Here, because importing it takes a second.
        from openai import AsyncOpenAI

        # One number is for connections, too: of these, its own would be five seconds.
        async with AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key="none", timeout=READY_WITHIN_S
        ) as client:
            begun_s = time.monotonic()
            await asyncio.gather(
                *(self._ask(client, row, begun_s, at) for at, row in enumerate(self.rows))
            )
            return time.monotonic() - begun_s

    async def _ask(self, client: AsyncOpenAI, row: Row, begun_s: float, number: int) -> None:
        await asyncio.sleep(begun_s + row["arrival_s"] - time.monotonic())
        stream = await client.completions.create(
            model=MODEL_NAME,
            prompt=draw_prompt(row["prompt_tokens"], self._seed + number),
            max_tokens=row["output_tokens"],
            temperature=0,
            stream=True,
            extra_body=EXACT,
        )
        async for part in stream:
            for choice in part.choices:
                tokens = (choice.model_extra or {}).get("token_ids") or []
                row["tokens"] += tokens
                row["token_s"] += [time.monotonic() - begun_s] * len(tokens)
        row["end_s"] = time.monotonic() - begun_s


def metric_sums(text: str) -> dict[str, float]:
    """Metrics by name, from Prometheus' text; sums over labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options as flags of vLLM's command line."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            flags += [f"--{flag}", json.dumps(value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
