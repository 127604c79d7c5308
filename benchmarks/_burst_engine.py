"""One vLLM under one scheduler, given requests by the clock; a child of `_burst_race.py`.

Reads its configuration as JSON from its first argument; then each line of its standard input is an
order, answered by one line: a list of arrivals begins a run, a number lets it go on for so many
seconds. The engine runs in this process and is stepped by hand; between two steps the requests that
are due are added. So the times are those of the engine, without a server's, and every scheduler
meets the same arrivals.

The clock of a run counts the engine's steps and nothing else: it stands still between orders, and
skips what would be idle. So several engines serve the same requests by turns of a fraction of a
second, and a machine that slows down slows down all of them. What another thread does while the
clock stands still is not counted: of a turn, at most the copies that its last step began.

Run as `lend URL BYTES` it is the producer of the benchmark: lends until its standard input ends.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 2048
SLAB_BYTES: Final = 4 << 20
WAIT_FOR_LEASE_S: Final = 60.0
NULL_CONNECTOR: Final[dict[str, Any]] = {"connector": "null"}
"""In the place of the adapter's options: vLLM as it is, with a connector that does nothing."""
STOP: Final = "stop"
"""The order to end a run."""


def write_model(folder: Path, *, layers: int, hidden: int) -> None:
    """A Llama with real random weights: it decides nothing here but what a token costs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def lend(url: str, nbytes: int) -> None:
    """Offer memory until standard input ends."""
    from aqualib.connection import open_producer

    with open_producer(
        f"burst-lender-{os.getpid()}", coordinator_url=url, device="cpu", slab_bytes=SLAB_BYTES
    ) as producer:
        producer.offer(nbytes)
        print("ready", flush=True)
        sys.stdin.read()


class Engine:
    """vLLM in this process.

    Args:
        job: What `vllm_burst.py` asks for.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        options = dict(job["engine"])
        if job["aqua"] == NULL_CONNECTOR:
            sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
            options["kv_transfer_config"] = {
                "kv_connector": "IdleConnector",
                "kv_connector_module_path": "harness.idle_connector",
                "kv_role": "kv_both",
            }
        elif job["aqua"] is not None:
            options["scheduler_cls"] = "aqualib.engines.vllm.AquaScheduler"
            options["kv_transfer_config"] = {
                "kv_connector": "AquaConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": job["aqua"],
            }
        llm = LLM(model=job["model"], skip_tokenizer_init=True, **options)
        self._engine = llm.llm_engine
        self._count = 0
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._gaps_s: list[float] = []
        self._steps: list[tuple[float, ...]] = []
        self._load = (0, 0, 0)
        self._most_waiting = 0
        self._watch_schedule()
        self._pending: list[tuple[float, int, int]] = []
        self._now_s = 0.0
        # Over all runs: a prompt that came before would be found in the prefix tier.
        self._prompts = random.Random(7)
        self._rows: dict[str, dict[str, float]] = {}
        self._last_s: dict[str, float] = {}

    def figures(self) -> dict[str, Any]:
        """What a run that has ended is judged by.

        Its `rows` say of each request: arrival, first token, end (seconds of the run), prompt and
        output tokens; its `steps` of each step: prompt tokens, requests that decode, tokens before
        these, blocks paged, seconds. `most_waiting` had no memory at once.
        """
        gaps_s, self._gaps_s = self._gaps_s, []
        steps, self._steps = self._steps, []
        most_waiting, self._most_waiting = self._most_waiting, 0
        return {
            "rows": list(self._rows.values()),
            "tbt_p99_s": statistics.quantiles(gaps_s, n=100, method="inclusive")[98],
            "steps": steps,
            "most_waiting": most_waiting,
            "forced_preemptions": getattr(self._scheduler, "forced_preemptions", 0),
            "paged": self.paged(),
        }

    def await_leases(self, nbytes: int) -> str:
        """Wait for peer memory; where paged blocks go then."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().paging_worker
        give_up_s = time.monotonic() + WAIT_FOR_LEASE_S
        while worker.aqua.stats().leased_bytes < nbytes:
            if time.monotonic() > give_up_s:
                raise TimeoutError("no peer memory was leased")
            time.sleep(0.05)
        return str(worker.location())

    def paged(self) -> dict[str, Any]:
        """What was paged so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        worker = getattr(connector, "paging_worker", None)
        if worker is None:
            return {}
        return {
            "blocks": {
                way: nbytes // worker.block_bytes for way, nbytes in worker.paged_bytes.items()
            },
            "seconds": dict(worker.paging_s),
            "failures": dict(worker.failures),
            "location": str(worker.location()),
        }

    def begin(self, arrivals: list[tuple[float, int, int]]) -> None:
        """Start a run of requests `(second, prompt tokens, output tokens)` at second 0."""
        self._pending = sorted(arrivals, reverse=True)
        self._now_s = 0.0
        self._rows = {}
        self._last_s = {}

    def go_on(self, seconds: float) -> bool:
        """Serve for so long, by the clock of the run; whether anything is left to do."""
        until_s = self._now_s + seconds
        while self._pending or self._engine.has_unfinished_requests():
            if self._now_s >= until_s:
                return True
            if not self._engine.has_unfinished_requests():
                self._now_s = max(self._now_s, self._pending[-1][0])
            began_s = time.perf_counter()
            while self._pending and self._pending[-1][0] <= self._now_s:
                self._add(*self._pending.pop())
            blocks = self._paged_blocks()
            outputs = self._engine.step()
            took_s = time.perf_counter() - began_s
            self._now_s += took_s
            self._steps.append((*self._load, self._paged_blocks() - blocks, took_s))
            self._load = (0, 0, 0)
            for output in outputs:
                self._note(output)
        return False

    def stop(self) -> None:
        """End the run now; what is unfinished counts as ended at this moment."""
        self._now_s = max([self._now_s, *(at_s for at_s, _, _ in self._pending)])
        while self._pending:
            self._add(*self._pending.pop())
        unfinished = [name for name, row in self._rows.items() if "end_s" not in row]
        self._engine.abort_request(unfinished)
        for name in unfinished:
            self._rows[name].setdefault("first_s", self._now_s)
            self._rows[name]["end_s"] = self._now_s

    def _watch_schedule(self) -> None:
        """Note what each step computes as it is scheduled."""
        schedule = self._scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            output = schedule(*args, **kwargs)
            prompt_tokens = decoding = context = 0
            for name, count in output.num_scheduled_tokens.items():
                request = self._scheduler.requests[name]
                if count == 1 and request.num_computed_tokens > request.num_prompt_tokens:
                    decoding += 1
                    context += request.num_computed_tokens
                else:
                    prompt_tokens += count
            self._load = (prompt_tokens, decoding, context)
            self._most_waiting = max(self._most_waiting, len(self._scheduler.waiting))
            return output

        self._scheduler.schedule = watched

    def _paged_blocks(self) -> int:
        return sum(self.paged().get("blocks", {}).values())

    def _add(self, arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        from vllm import SamplingParams

        self._count += 1
        name = str(self._count)
        prompt = [self._prompts.randrange(3, VOCABULARY) for _ in range(prompt_tokens)]
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._rows[name] = {
            "arrival_s": arrival_s,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        }

    def _note(self, output: Any) -> None:  # noqa: ANN401 - a RequestOutput; vLLM is imported late
        row = self._rows[output.request_id]
        if output.outputs[0].token_ids:
            if "first_s" in row:
                self._gaps_s.append(self._now_s - self._last_s[output.request_id])
            row.setdefault("first_s", self._now_s)
            self._last_s[output.request_id] = self._now_s
        if output.finished:
            row["end_s"] = self._now_s


def serve(job: dict[str, Any]) -> None:
    """Follow orders until they end."""
    engine = Engine(job)
    if job["leased_bytes"]:
        engine.await_leases(job["leased_bytes"])
    engine.begin([(0.0, 64, 16)] * 8)
    engine.go_on(math.inf)
    engine.figures()
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, list):
            engine.begin(order)
            say(None)
        elif order == STOP:
            engine.stop()
            say(engine.figures())
        else:
            say(None if engine.go_on(order) else engine.figures())


def say(answer: object) -> None:
    """Answer one line; vLLM may print others."""
    print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lend", url, nbytes]:
            lend(url, int(nbytes))
        case ["model", folder, shape]:
            write_model(Path(folder), **json.loads(shape))
        case [job]:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
            os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
            serve(json.loads(job))
