"""Batch files on a stock vLLM (CPU build), judged by the engine's own counters.

One engine serves the module, because starting one takes longer than all tests; its prefix cache is
emptied between runs. The memory is small enough that prefixes are lost when their requests are
apart: file order is the negative control that shows it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from harness.tiny_llama import write_tiny_llama

if TYPE_CHECKING:
    from aqua_batch.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

GROUPS: Final = 14
PER_GROUP: Final = 10
LONG: Final = 8
OPTIONS: Final[dict[str, Any]] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 70,
    "block_size": 32,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.1,
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
}


def write_batch(file: Path, *, output_tokens: int = 4) -> Path:
    """Short answers under shared instructions, and long ones without, in random order."""
    rng = random.Random(3)
    lines = []
    for group in range(GROUPS):
        shared = f"{group:02} " + "".join(rng.choices("abcdefgh ", k=230))
        for index in range(PER_GROUP):
            body = {"prompt": f"{shared} question {index}", "max_tokens": output_tokens}
            lines.append((f"g{group}-{index}", body))
    for index in range(LONG):
        body = {"prompt": f"{index} tell a story", "max_tokens": 300, "ignore_eos": True}
        lines.append((f"long-{index}", body))
    rng.shuffle(lines)
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "temperature": 0, **body},
        }
        for name, body in lines
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def engine(model: Path) -> VllmEngine:
    # Whoever uses the class may have compiled things long before.
    import aqua_schedulers.blendserve  # noqa: F401 - for numba
    from aqua_batch.vllm_engine import VllmEngine

    return VllmEngine(str(model), OPTIONS)


def run(
    engine: VllmEngine, model: Path, file: Path, out: Path, policy: str
) -> tuple[int, int, dict[str, str]]:
    """Hit tokens, queried tokens and texts by custom_id of one run from an empty cache."""
    from aqua_batch.batch_run import BatchRun
    from aqua_batch.fleet import LocalFleet
    from aqua_batch.journal import ResultJournal
    from aqua_batch.policies import Policy
    from aqua_batch.records import read_batch
    from aqua_batch.target import describe
    from aqua_batch.tokenization import tokenize
    from aqua_batch.tokens import load_tokenizer

    assert engine._engine.reset_prefix_cache()
    before = engine.cache_counters()
    batch = read_batch(file)
    fleet = LocalFleet(engine)
    words, longest = load_tokenizer(str(model)), fleet.facts.longest_tokens
    tokenized = tokenize(batch, words, longest_tokens=longest, to_run=True)
    cost = describe("A100-80GB", model, capacity_tokens=fleet.facts.capacity_tokens).cost
    with ResultJournal(out) as journal:
        plan = BatchRun(
            batch, tokenized, fleet, journal, model="tiny", cost=cost, policy=Policy(policy)
        )
        assert plan.finish() == len(batch.entries)
    after = engine.cache_counters()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(texts) == len(rows) == len(batch.entries)
    return (
        after.hit_tokens - before.hit_tokens,
        after.queried_tokens - before.queried_tokens,
        texts,
    )


def test_the_blended_order_keeps_the_prefix_hits_of_dfs_and_the_outputs_of_file_order(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    file = write_batch(tmp_path / "in.jsonl")
    hits = {}
    texts = {}
    for policy in ("fcfs", "dfs", "foresight", "paper"):
        out = tmp_path / f"{policy}.jsonl"
        hits[policy], queried, texts[policy] = run(engine, model, file, out, policy)
        assert queried > 0
    assert hits["fcfs"] < 0.9 * hits["dfs"], f"no pressure on the cache, nothing shown: {hits}"
    assert hits["foresight"] >= 0.97 * hits["dfs"], hits
    assert hits["paper"] >= 0.97 * hits["dfs"], hits
    assert len(set(texts["fcfs"].values())) > 1, "degenerate outputs would prove nothing"
    assert texts["foresight"] == texts["fcfs"]


def command(model: Path, file: Path, out: Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from aqua_batch.cli import main; main()",
        "run",
        str(file),
        "-o",
        str(out),
        "--model",
        str(model),
        "--engine-options",
        json.dumps(OPTIONS),
        "--json",
    ]


def whole_lines(out: Path) -> list[str]:
    content = out.read_bytes() if out.exists() else b""
    return [json.loads(raw)["custom_id"] for raw in content.split(b"\n")[:-1]]


def test_a_run_killed_in_the_middle_and_resumed_loses_and_repeats_nothing(
    model: Path, tmp_path: Path
) -> None:
    file, out = write_batch(tmp_path / "in.jsonl", output_tokens=40), tmp_path / "out.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command(model, file, out), stdout=subprocess.DEVNULL, env=environment, text=True
    )
    try:
        end = time.monotonic() + 400
        while len(whole_lines(out)) < 10:
            assert first.poll() is None, "ended before it could be killed"
            assert time.monotonic() < end, "no results"
            time.sleep(0.01)  # a file on disk has no event to wait for; bounded above
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        first.wait(30)
    survived = whole_lines(out)
    total = GROUPS * PER_GROUP + LONG
    assert 10 <= len(survived) < total
    second = subprocess.run(
        command(model, file, out), capture_output=True, env=environment, text=True, check=False
    )
    assert second.returncode == 0, second.stderr[-3000:]
    summary = json.loads(second.stdout.splitlines()[-1])
    assert summary["resumed"] == len(survived)
    assert summary["ran"] == total - len(survived)
    names = whole_lines(out)
    assert names[: len(survived)] == survived
    assert len(names) == len(set(names)) == total
