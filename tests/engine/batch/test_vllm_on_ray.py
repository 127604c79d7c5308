"""A batch on two nodes of a real Ray cluster, with a real vLLM on each.

SIGKILL ends both kinds of process that a user may lose: the command, and an engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from harness.ray_nodes import ray_nodes
from harness.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM, torch and Ray warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

REQUESTS: Final = 80
OPTIONS: Final[dict[str, Any]] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 70,
    "block_size": 32,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.1,
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
}


def write_batch(file: Path) -> Path:
    rows = []
    for index in range(REQUESTS):
        body = {
            "prompt": f"{'the instructions of this group ' * 5}{index % 8}, question {index}",
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 0,
        }
        rows.append({"custom_id": f"r{index}", "url": "/v1/completions", "body": body})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def texts(out: Path) -> dict[str, str]:
    """Answers by request, of whole lines; fails where one was answered twice."""
    content = out.read_bytes() if out.exists() else b""
    rows = [json.loads(raw) for raw in content.split(b"\n")[:-1]]
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(answers) == len(rows)
    return answers


def start(file: Path, out: Path, model: Path, *nodes: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from aqua_batch.cli import main; main()", "run"]
    arguments = [str(file), "-o", str(out), "--model", str(model), "--json", *nodes]
    options = ["--engine-options", json.dumps(OPTIONS)]
    return subprocess.Popen(
        [*program, *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )


def wait_for(out: Path, count: int, command: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 400
    while len(texts(out)) < count:
        assert command.poll() is None, f"ended too early: {command.communicate()[1][-3000:]}"
        assert time.monotonic() < end, "no results"
        time.sleep(0.05)  # a file on disk has no event to wait for; bounded above


def engines() -> list[psutil.Process]:
    """Engines of the cluster that this process started, but not those that are ending."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if each.name().startswith("ray::EngineActor.adv")]


def test_two_vllm_nodes_lose_and_repeat_nothing_when_the_command_and_an_engine_are_killed(
    tmp_path: Path,
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file, out, alone = (
        write_batch(tmp_path / "in.jsonl"),
        tmp_path / "o.jsonl",
        tmp_path / "1.jsonl",
    )
    with ray_nodes(2) as cluster:
        nodes = ["--nodes", "2", "--ray-address", cluster.address]
        first = start(file, out, model, *nodes)
        wait_for(out, 8, first)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=60)
        survived = texts(out)
        assert 8 <= len(survived) < REQUESTS

        second = start(file, out, model, *nodes)
        wait_for(out, len(survived) + 8, second)
        assert len(texts(out)) < REQUESTS
        engines()[0].kill()
        said, complained = second.communicate(timeout=400)
    assert second.returncode == 0, complained[-3000:]
    assert "will run again" in complained
    summary = json.loads(said.splitlines()[-1])
    assert (summary["resumed"], summary["nodes"]) == (len(survived), 2)
    assert summary["ran"] == REQUESTS - len(survived)
    made = texts(out)
    assert list(made)[: len(survived)] == list(survived)
    assert len(made) == REQUESTS

    single = start(file, alone, model)
    assert single.wait(400) == 0, single.communicate()[1][-3000:]
    assert made == texts(alone)
    assert len(set(made.values())) > 1, "degenerate answers would prove nothing"
