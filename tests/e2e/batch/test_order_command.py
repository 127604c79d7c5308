from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from aqua_batch.cli import app
from harness.bounds import HANG_S
from harness.command import run_here
from harness.tiny_llama import write_tiny_llama

COMMAND: Final = [sys.executable, "-c", "from aqua_batch.cli import main; main()"]


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env=os.environ | environment,
    )


def aqua_batch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here(app, "aqua-batch", *arguments)


def request(custom_id: str, prompt: str, tokens: int) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    )


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    lines = [request(f"q{i}", f"{'the same instructions ' * 20}{i % 4} {i}", 2) for i in range(40)]
    lines += [request(f"v{i}", f"a video of {i}", 2000) for i in range(5)]
    lines.insert(7, '{"custom_id": "broken"')
    lines.insert(9, request("q0", "again", 2))
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_order_writes_all_good_lines_a_report_a_picture_and_an_errors_file(
    batch: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    done = program("order", batch, "-o", out, "--report", tmp_path / "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    before, after = batch.read_text().splitlines(), out.read_text().splitlines()
    bad = {before[7], before[9]}
    assert sorted(after) == sorted(line for line in before if line not in bad)
    assert after != [line for line in before if line not in bad]
    assert "planning by bytes" in done.stderr
    assert "line 8" in done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "plan.json").read_text())
    assert report["requests"] == 45
    assert report["tokenizer"] == {"name": "bytes", "exact": False}
    assert report["sharing"]["of_optimal"] > 0.97
    assert 0 < report["time"]["share_of_optimal"] <= 1
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    errors = [json.loads(x) for x in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [each["error"]["line"] for each in errors] == [8, 10]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokenizer", "no-such-tokenizer"], "no-such-tokenizer"),
        (["--gpu", "abacus"], "abacus"),
        (["--max-model-len", "3"], "none of 47 lines can be run; line 1"),
        (["--kv-tokens", "3"], "memory holds 3"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line_and_leaves_no_output(
    batch: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    out = tmp_path / "out.jsonl"
    done = aqua_batch("order", batch, "-o", out, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_a_prompt_that_no_memory_holds_does_not_take_the_others_with_it(
    batch: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    done = aqua_batch("order", batch, "-o", out, "--kv-tokens", 100, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == len(out.read_text().splitlines()) == 5
    lines = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    errors = [json.loads(each)["error"] for each in lines]
    assert sum(each["code"] == "context_length_exceeded" for each in errors) == 40


def test_an_errors_file_never_overwrites_the_input(batch: Path, tmp_path: Path) -> None:
    content = batch.read_bytes()
    renamed = batch.rename(tmp_path / "a.errors.jsonl")
    for options in (
        ["-o", tmp_path / "a.jsonl"],
        ["-o", tmp_path / "b.jsonl", "--errors", renamed],
    ):
        done = aqua_batch("order", renamed, *options)
        assert done.returncode == 2
        assert "input itself" in done.stderr
        assert renamed.read_bytes() == content


def test_a_zipped_file_and_a_pipe_are_read_and_a_zipped_file_is_written(
    batch: Path, tmp_path: Path
) -> None:
    zipped, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    zipped.write_bytes(gzip.compress(batch.read_bytes()))
    done = aqua_batch("order", zipped, "-o", out)
    assert done.returncode == 0, done.stderr
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 45
    assert (tmp_path / "out.plan.json").exists()
    arguments = ["order", "/dev/stdin", "-o", str(tmp_path / "piped.jsonl")]
    piped = subprocess.run(
        [*COMMAND, *arguments], input=zipped.read_bytes(), capture_output=True, check=False
    )
    assert piped.returncode == 0, piped.stderr
    assert len((tmp_path / "piped.jsonl").read_bytes().splitlines()) == 45


def test_an_empty_or_absent_file_and_an_output_over_the_input_are_refused(
    batch: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for source, output, said in (
        (empty, tmp_path / "o.jsonl", "is empty"),
        (tmp_path / "absent.jsonl", tmp_path / "o.jsonl", "absent.jsonl"),
        (batch, batch, "input itself"),
    ):
        content = batch.read_bytes()
        done = aqua_batch("order", source, "-o", output)
        assert done.returncode == 2
        assert said in done.stderr
        assert batch.read_bytes() == content


def test_a_run_without_vllm_says_what_to_install(batch: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    out = tmp_path / "out.jsonl"
    done = aqua_batch("run", batch, "-o", out, "--model", tmp_path, "--tokenizer", "bytes")
    assert done.returncode == 3
    assert "pip install vllm" in done.stderr


def test_several_nodes_without_ray_or_without_their_number_say_what_to_do(
    batch: Path, tmp_path: Path
) -> None:
    run = ["run", batch, "-o", tmp_path / "o.jsonl", "--model", tmp_path, "--tokenizer", "bytes"]
    done = aqua_batch(*run, "--ray-address", "localhost:6379")
    assert done.returncode == 2
    assert "--nodes N" in done.stderr
    code = "import sys; sys.modules['ray'] = None; from aqua_batch.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, run), "--nodes", "2"]
    bare = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bare.returncode == 3
    assert "pip install 'aqua-batch[ray]'" in bare.stderr
    assert "Traceback" not in bare.stderr


def test_a_model_in_the_hugging_face_cache_is_found_by_its_name(
    batch: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "cache" / "models--owner--tiny"
    write_tiny_llama(cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    arguments = ["order", batch, "-o", tmp_path / "out.jsonl", "--json"]
    done = program(*arguments, "--tokenizer", "owner/tiny", HF_HUB_CACHE=str(cached.parent))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokenizer"] == {"name": "owner/tiny", "exact": True}
