"""One vLLM under one scheduler, given requests by the clock; a child of `vllm_burst.py`.

Reads its configuration as JSON from its first argument; then each line of its standard input is a
list of arrivals, answered by one line. The engine runs in this process and is stepped by hand;
between two steps the requests that are due are added. So the times are those of the engine,
without a server's, and every scheduler meets the same arrivals. Between runs it sleeps, so several
can be measured in turns.

Run as `lend URL BYTES` it is the producer of the benchmark: lends until its standard input ends.
"""

from __future__ import annotations

import json
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
    from aqualib.producer.opening import open_producer

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
        if job["aqua"] is not None:
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
        self._steps = 0

    def figures(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        """What one run is judged by."""
        gaps_s, self._gaps_s = self._gaps_s, []
        steps, self._steps = self._steps, 0
        return {
            "rows": rows,
            "tbt_p99_s": statistics.quantiles(gaps_s, n=100, method="inclusive")[98],
            "steps": steps,
            "forced_preemptions": getattr(self._scheduler, "forced_preemptions", 0),
            "paged": self.paged(),
        }

    def await_leases(self, nbytes: int) -> str:
        """Wait for peer memory; where paged blocks go then."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        courier = get_kv_transfer_group().courier
        give_up_s = time.monotonic() + WAIT_FOR_LEASE_S
        while courier._aqua.stats().leased_bytes < nbytes:  # noqa: SLF001 - what a lease is, only Aqua says
            if time.monotonic() > give_up_s:
                raise TimeoutError("no peer memory was leased")
            time.sleep(0.05)
        return str(courier.location())

    def paged(self) -> dict[str, Any]:
        """What was paged so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        courier = get_kv_transfer_group().courier if has_kv_transfer_group() else None
        if courier is None:
            return {}
        return {
            "blocks": dict(courier.paged_blocks),
            "seconds": dict(courier.paging_s),
            "failures": dict(courier.failures),
            "location": str(courier.location()),
        }

    def run(self, arrivals: list[tuple[float, int, int]]) -> list[dict[str, float]]:
        """Serve requests that arrive at `(second, prompt tokens, output tokens)`.

        Returns:
            One row each: arrival, first token, end (seconds of this run) and output tokens.
        """
        from vllm import SamplingParams

        rng = random.Random(7)
        rows: dict[str, dict[str, float]] = {}
        last_s: dict[str, float] = {}
        pending = sorted(arrivals)
        pending.reverse()
        started_s = time.perf_counter()
        while pending or self._engine.has_unfinished_requests():
            now_s = time.perf_counter() - started_s
            while pending and pending[-1][0] <= now_s:
                arrival_s, prompt_tokens, output_tokens = pending.pop()
                self._count += 1
                name = str(self._count)
                prompt = [rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)]
                params = SamplingParams(
                    temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
                )
                self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
                rows[name] = {
                    "arrival_s": arrival_s,
                    "prompt_tokens": prompt_tokens,
                    "output_tokens": output_tokens,
                }
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, pending[-1][0] - now_s))
                continue
            outputs = self._engine.step()
            self._steps += 1
            now_s = time.perf_counter() - started_s
            for output in outputs:
                row = rows[output.request_id]
                if output.outputs[0].token_ids:
                    if "first_s" in row:
                        self._gaps_s.append(now_s - last_s[output.request_id])
                    row.setdefault("first_s", now_s)
                    last_s[output.request_id] = now_s
                if output.finished:
                    row["end_s"] = now_s
        return list(rows.values())


def serve(job: dict[str, Any]) -> None:
    """Run what comes in until it ends."""
    engine = Engine(job)
    if job["leased_bytes"]:
        engine.await_leases(job["leased_bytes"])
    engine.figures(engine.run([(0.0, 64, 16)] * 8))
    say("ready")
    for line in sys.stdin:
        say(engine.figures(engine.run(json.loads(line))))


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
