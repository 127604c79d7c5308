"""One vLLM as a server runs it, and those who send to it; a child of `engines.race`.

The engine core is a process of its own with vLLM's input thread, as behind its API server: what
arrives while a step runs waits for it. This process sends each request when it is due and notes
when its tokens come. vLLM may spawn the core, which imports this module then: what must hold in
both, the clock that stands still and the fault of a negative control, is installed by importing it.

Its argument is a job as JSON. Each line of its input is an order:

    {"online": [[second, prompt tokens, output tokens], ...], "offline": a file in JSON lines or
     null, "at_once": offline requests kept at it meanwhile, "seconds": at least, "drains": whether
     offline requests that began are waited for, "seed": of prompts}

It is answered by a line `answer ...`: what became of each request, and the engine's counters, over
the time until the last online one ended, and its gauges then. Meanwhile lines `sample ...` tell how
it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from aqua_demo.child import own_output
from aqua_demo.engines import paused_clock
from aqua_demo.engines.online_load import Row, draw_prompt, read_offline_file, unanswered
from aqua_protocol.supervision import SupervisedTask, resting, start_job

SAMPLE_S: Final = 0.5
"""Seconds between samples, by the engine's clock. Doubled, the live view shows half as many."""
ONLINE_NUMBERS: Final = 1 << 20
"""Prompts of one seed; a load has fewer requests. Doubled, a load may have twice as many."""


class EngineServer:
    """vLLM's asynchronous engine, and its clients.

    Args:
        job: `model`, options of the `engine`, and whether it `co_serves`.
        out: Gets what it says.
    """

    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options: dict[str, Any] = job["engine"]
        self._co_serves: bool = job["co_serves"]
        self._has_priorities = "scheduling_policy" in options
        arguments = AsyncEngineArgs(model=job["model"], skip_tokenizer_init=True, **options)
        config = arguments.create_engine_config()
        # On a CPU vLLM would spawn the core: another minute of imports on a busy machine.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(config)
        self._count = 0
        self._out = out

    async def serve(self, order: dict[str, Any]) -> dict[str, Any]:
        """Serve the online requests of an order, with offline ones beside them."""
        file = order["offline"]
        # Before the clock is read: no request of a person's waits for a client that reads a file.
        waiting = iter([] if file is None else read_offline_file(Path(file)))
        begun_s, before = time.monotonic(), counters()
        online = [unanswered(*arrival) for arrival in order["online"]]
        offline: list[Row] = []
        beside = [
            start_job(self._fill(offline, waiting, begun_s), lambda _: None)  # It is awaited.
            for _ in range(order["at_once"])
        ]
        first = order["seed"] * ONLINE_NUMBERS
        async with SupervisedTask(
            partial(self._tell, online, offline, begun_s, before), "demo-samples"
        ):
            await asyncio.gather(
                until(begun_s + order["seconds"]),
                *(self._ask_online(row, begun_s, first + at) for at, row in enumerate(online)),
            )
            took_s, after = time.monotonic() - begun_s, counters()
            for _ in waiting:
                pass  # None begins any more.
            if not order["drains"]:
                for task in beside:
                    task.cancel()
            for task in beside:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
        rows = {"online": online, "offline": offline}
        return rows | {"seconds": took_s, "counted": counted, "levels": levels()}

    def say(self, kind: str, content: object) -> None:
        """Say one line."""
        self._out.write(f"{kind} {json.dumps(content)}\n")
        self._out.flush()

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    async def _tell(
        self, online: list[Row], offline: list[Row], begun_s: float, before: dict[str, float]
    ) -> None:
        """Say again and again how an order stands."""
        name = "aqua:offline_preemptions_total"
        while True:
            now_s = time.monotonic() - begun_s
            sample = {
                "at_s": now_s,
                "online_come": sum(row["arrival_s"] <= now_s for row in online),
                "online_answered": sum("end_s" in row for row in online),
                "offline_begun": len(offline),
                "offline_answered": sum("end_s" in row for row in offline),
                "offline_tokens": sum(len(row["tokens"]) for row in offline),
                "preemptions": counters().get(name, 0.0) - before.get(name, 0.0),
            }
            self.say("sample", sample)
            with resting():
                await asyncio.sleep(SAMPLE_S)

    async def _ask_online(self, row: Row, begun_s: float, number: int) -> None:
        """Send a request when it is due."""
        await until(begun_s + row["arrival_s"])
        prompt = draw_prompt(row["prompt_tokens"], number)
        await self._ask(row, prompt, begun_s, is_offline=False)

    async def _fill(self, rows: list[Row], waiting: Iterator[Row], begun_s: float) -> None:
        """Send one offline request after the other; all fillers share the file and the rows."""
        for line in waiting:
            body = line["body"]
            come_s = time.monotonic() - begun_s
            row = unanswered(come_s, len(body["prompt"]), body["max_tokens"])
            row["name"] = line["custom_id"]
            rows.append(row)
            await self._ask(row, body["prompt"], begun_s, is_offline=True)

    async def _ask(self, row: Row, prompt: list[int], begun_s: float, *, is_offline: bool) -> None:
        """Send a request, and note when its tokens come."""
        tokens = self._tokens(prompt, row["output_tokens"], is_offline=is_offline)
        async for token in tokens:
            row["tokens"].append(token)
            row["token_s"].append(time.monotonic() - begun_s)
        row["end_s"] = time.monotonic() - begun_s

    async def _tokens(
        self, prompt: list[int], count: int, *, is_offline: bool
    ) -> AsyncIterator[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"aqua_class": "offline"} if is_offline and self._co_serves else None,
        )
        async for answer in self._engine.generate(
            {"prompt_token_ids": prompt},
            params,
            str(self._count),
            priority=int(is_offline and self._has_priorities),
        ):
            for token in answer.outputs[0].token_ids:
                yield token


async def until(due_s: float) -> None:
    """Wait for a moment; timers know nothing of pauses."""
    while (left_s := due_s - time.monotonic()) > 0:  # noqa: ASYNC110 - it is time that is waited for
        await asyncio.sleep(min(left_s, 0.05))


def counters() -> dict[str, float]:
    """Aqua's counters, as `/metrics` has them."""
    return {name: value for name, value in figures().items() if name.endswith("_total")}


def levels() -> dict[str, float]:
    """Aqua's gauges, likewise."""
    others = ("_total", "_created")
    return {name: value for name, value in figures().items() if not name.endswith(others)}


def figures() -> dict[str, float]:
    """All that Aqua tells on `/metrics`."""
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {sample.name: sample.value for sample in samples if sample.name.startswith("aqua:")}


async def follow(job: dict[str, Any], out: TextIO) -> None:
    """Follow orders until they end."""
    server = EngineServer(job, out)
    warm = {"online": [[0.0, 64, 16]] * 8, "offline": None, "at_once": 0, "seconds": 0}
    await server.serve(warm | {"drains": True, "seed": -1})
    server.say("answer", "ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        server.say("answer", await server.serve(json.loads(line)))
    server.close()


def zero_loads_from(fault: Path) -> None:
    """Have checkpoints come back as zeros once this file is there."""
    from aqualib.blocks import BlockStore

    page_in = BlockStore.page_in

    def page_in_or_zeros(self: Any, slots: Any, rows: Any, **how: Any) -> Any:  # noqa: ANN401 - tensors
        transfer = page_in(self, slots, rows, **how)
        if fault.exists():
            transfer.wait()
            rows.zero_()
        return transfer

    BlockStore.page_in = page_in_or_zeros  # type: ignore[assignment, method-assign]  # on purpose


def prepare(job: dict[str, Any]) -> None:
    """What holds in this process and in the core."""
    paused_clock.install(Path(job["clock"]))
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    if job["co_serves"]:
        zero_loads_from(Path(job["fault"]))


# The second is what a spawned process has for the first.
if __name__ in {"__main__", "__mp_main__"}:
    prepare(json.loads(sys.argv[1]))

if __name__ == "__main__":
    asyncio.run(follow(json.loads(sys.argv[1]), own_output()))
