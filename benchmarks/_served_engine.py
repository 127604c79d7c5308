"""One vLLM as a server runs it, and those who send to it; a child of `vllm_coserving.py`.

The engine core is a process of its own with vLLM's input thread, as behind its API server: what
arrives while a step runs waits for it. This process sends each request when it is due and notes
when its tokens come. vLLM spawns the core, which imports this module: what must hold in both, the
clock that stands still and the fault of the negative control, is installed by importing it.

Its argument is a job as JSON. Each line of its input is an order, `{"online": [[second, prompt
tokens, output tokens], ...], "offline": requests kept at it meanwhile, "seconds": at least,
"seed": s}`, answered by a line: what became of each request, and the engine's counters.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import _paused_clock
from _burst_engine import say
from _bursts import draw_lengths

JOB: Final = json.loads(sys.argv[1])
OFFLINE_PROMPT: Final = 2
"""Offline prompts over those of people, by judgement: documents are longer than questions. Doubled,
more of the offline work is prompts."""
OFFLINE_NUMBERS: Final = 1 << 20
"""Numbers of offline requests begin here; there are fewer online ones."""

WORDS: Final = (3, 256)
"""Ids that prompts are made of; any model has them."""

Row = dict[str, Any]


class Server:
    """vLLM's asynchronous engine, and its clients."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = dict(JOB["engine"])
        if JOB["aqua"] is not None:
            options["scheduler_cls"] = "aqualib.engines.vllm.AquaScheduler"
            options["kv_transfer_config"] = {
                "kv_connector": "AquaConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": JOB["aqua"],
            }
        arguments = AsyncEngineArgs(model=JOB["model"], skip_tokenizer_init=True, **options)
        config = arguments.create_engine_config()
        # On a CPU vLLM would spawn the core: another minute of imports on a busy machine.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(config)
        self._longest_prompt = options["max_model_len"] // 2
        self._count = 0

    async def serve(self, order: dict[str, Any]) -> dict[str, Any]:
        """Serve the online requests of an order, with offline ones beside them."""
        begun_s, before = time.monotonic(), counters()
        numbers = order["seed"] * 2 * OFFLINE_NUMBERS
        offline: list[Row] = []
        beside = [
            asyncio.create_task(self._fill(offline, begun_s, numbers + OFFLINE_NUMBERS))
            for _ in range(order["offline"])
        ]
        online = [
            {"arrival_s": at_s, "prompt_tokens": prompt, "output_tokens": output, "tokens": []}
            for at_s, prompt, output in order["online"]
        ]
        await asyncio.gather(
            until(begun_s + order["seconds"]),
            *(self._ask(row, begun_s, numbers + at) for at, row in enumerate(online)),
        )
        took_s = time.monotonic() - begun_s
        after = counters()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return {"online": online, "offline": offline, "seconds": took_s, "counted": counted}

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    async def _fill(self, rows: list[Row], begun_s: float, numbers: int) -> None:
        """Send one offline request after the other; all fillers share the rows."""
        while True:
            number = numbers + len(rows)
            ((prompt, output),) = draw_lengths(1, number)
            prompt = min(self._longest_prompt, OFFLINE_PROMPT * prompt)
            now_s = time.monotonic() - begun_s
            row = {"arrival_s": now_s, "prompt_tokens": prompt, "output_tokens": output}
            rows.append(row | {"tokens": []})
            await self._ask(rows[-1], begun_s, number, is_offline=True)

    async def _ask(
        self, row: Row, begun_s: float, number: int, *, is_offline: bool = False
    ) -> None:
        """Send a request when it is due, and note when its tokens come."""
        await until(begun_s + row["arrival_s"])
        async for token in self._tokens(row, number, is_offline=is_offline):
            row.setdefault("first_s", time.monotonic() - begun_s)
            row["tokens"].append(token)
        row["end_s"] = time.monotonic() - begun_s

    async def _tokens(self, row: Row, number: int, *, is_offline: bool) -> AsyncIterator[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rng = random.Random(number)
        self._count += 1
        told = {"aqua_class": "offline"} if is_offline and JOB["aqua"] is not None else None
        has_priorities = "scheduling_policy" in JOB["engine"]
        params = SamplingParams(
            temperature=0,
            max_tokens=row["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=told,
        )
        prompt = [rng.randrange(*WORDS) for _ in range(row["prompt_tokens"])]
        async for answer in self._engine.generate(
            {"prompt_token_ids": prompt},
            params,
            str(self._count),
            priority=int(is_offline and has_priorities),
        ):
            for token in answer.outputs[0].token_ids:
                yield token


async def until(due_s: float) -> None:
    """Wait for a moment; timers know nothing of pauses."""
    while (left_s := due_s - time.monotonic()) > 0:  # noqa: ASYNC110 - it is time that is waited for
        await asyncio.sleep(min(left_s, 0.05))


def counters() -> dict[str, float]:
    """Aqua's counters, as `/metrics` has them."""
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {
        sample.name: sample.value
        for sample in samples
        if sample.name.startswith("aqua:") and sample.name.endswith("_total")
    }


async def follow() -> None:
    """Follow orders until they end."""
    server = Server()
    warm = [[0.0, 64, 16]] * 8
    await server.serve({"online": warm, "offline": 0, "seconds": 0, "seed": -1})
    say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(await server.serve(json.loads(line)))
    server.close()


def zero_loads_from(fault: Path) -> None:
    """Have checkpoints come back as zeros once this file is there."""
    from aqualib.blocks import BlockStore

    page_in = BlockStore.page_in

    def page_in_or_zeros(self: Any, slots: Any, rows: Any) -> Any:  # noqa: ANN401 - tensors
        transfer = page_in(self, slots, rows)
        if fault.exists():
            transfer.wait()
            rows.zero_()
        return transfer

    BlockStore.page_in = page_in_or_zeros  # type: ignore[assignment, method-assign]  # on purpose


_paused_clock.install(Path(JOB["clock"]))
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
if JOB["aqua"] is not None:
    zero_loads_from(Path(JOB["fault"]))

if __name__ == "__main__":
    asyncio.run(follow())
