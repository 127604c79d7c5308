"""Recordings of other makers: read, assumed where they are silent, refused by name where broken."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.recordings import read_recordings
from aqua_simulator.serving.replay import (
    COMPARED,
    calibrate,
    compare,
    errors_by_metric,
    iteration_time,
    simulate,
)
from harness.profile_tables import GPU, MODEL, write_kernel_tables, write_recording

BENCHMARK = {
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "request_rate": 2.0,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 2, 0],
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.02, 0.02], [0.03], []],
    "start_times": [1000.5, 1000.0, 1001.0],
    "errors": ["", "", "timed out"],
}
LOG = {
    "request_id": "a",
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "arrival_time": 50.0,
    "ttft": 0.2,
    "latency": 0.6,
}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder with a run of ours."""
    rows = [(f"r{n}", 100, 5, n, n + 0.1, n + 0.2, n + 0.6) for n in range(4)]
    write_recording(tmp_path, rows, blocks=400)
    return tmp_path


def test_a_full_description_leaves_nothing_to_assume(recorded: Path) -> None:
    (one,) = read_recordings(recorded).recordings
    assert (one.gpu, one.model_key) == (GPU, MODEL)
    assert (one.block_count, one.block_tokens, one.assumed) == (400, 16, ())
    assert one.settings.max_num_batched_tokens == 512
    assert one.served[2].arrival_s == 2.0


def test_an_older_description_falls_back_to_the_engines_arguments(recorded: Path) -> None:
    meta = recorded / f"vllm_real_{GPU}_{MODEL}_meta.json"
    meta.write_text(
        json.dumps(
            {
                "engine_kwargs": {"max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.8},
                "hardware": {"device_total_memory_bytes": 80 * 10**9},
            }
        )
    )
    (one,) = read_recordings(recorded).recordings
    assert one.settings.max_num_batched_tokens == 1024
    assert one.settings.max_num_seqs == 256
    assert one.settings.steps_in_flight == 2
    model = DECODERS["Llama-3-8B"]
    room = 0.8 * 80e9 - 2e9 - model.weight_bytes
    assert one.block_count == int(room // (16 * model.kv_bytes_per_token))
    said = "; ".join(one.assumed)
    assert "max_num_batched_tokens 1024 (the engine's arguments)" in said
    assert "max_num_seqs 256 (vLLM's default)" in said
    assert "asynchronous scheduling" in said
    assert "what 0.8 of the memory leaves" in said


@pytest.mark.parametrize(
    ("cache", "arguments", "blocks"),
    [
        ({"num_kv_tokens": 4800}, {}, 300),
        (None, {"num_gpu_blocks_override": 77, "block_size": 32}, 77),
        ({"num_gpu_blocks": 5, "num_kv_tokens": 4800}, {"num_gpu_blocks_override": 77}, 5),
    ],
)
def test_the_cache_is_taken_from_whatever_says_its_size(
    recorded: Path, cache: object, arguments: dict[str, int], blocks: int
) -> None:
    change = {"kv_cache": cache, "engine_kwargs": arguments}
    edit(recorded / f"vllm_real_{GPU}_{MODEL}_meta.json", lambda meta: meta.update(change))
    assert read_recordings(recorded).recordings[0].block_count == blocks


def test_without_a_description_the_catalogue_tells_the_memory(recorded: Path) -> None:
    (recorded / f"vllm_real_{GPU}_{MODEL}_meta.json").unlink()
    with pytest.raises(ConfigError, match="does not say how large the KV cache was"):
        read_recordings(recorded, gpu="Some-GPU")
    (one,) = read_recordings(recorded, gpu="H100-80GB").recordings
    assert one.settings.max_num_seqs == 1024
    assert one.assumed[0].startswith("no vllm_real_")


def test_a_benchmark_of_vllm_is_read_as_its_client_saw_it(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(BENCHMARK))
    (one,) = read_recordings(tmp_path, gpu="NVIDIA H100 80GB HBM3").recordings
    assert one.model == DECODERS["Llama-3.1-8B"]
    first, second = one.served
    assert (first.arrival_s, second.arrival_s) == (0.5, 0.0)
    assert first.ttft_s == pytest.approx(0.1)
    assert first.tpot_s == pytest.approx(0.02)
    assert "1 of 3 requests failed and are left out" in one.assumed
    # Older versions record no start times: only a rate of inf says when requests were sent.
    older = {key: value for key, value in BENCHMARK.items() if key != "start_times"}
    (tmp_path / "bench.json").write_text(json.dumps(older))
    with pytest.raises(ConfigError, match="does not say when its requests were sent"):
        read_recordings(tmp_path, gpu="H100-80GB")
    (tmp_path / "bench.json").write_text(json.dumps({**older, "request_rate": "inf"}))
    (one,) = read_recordings(tmp_path, gpu="H100-80GB").recordings
    assert [row.arrival_s for row in one.served] == [0.0, 0.0]
    (tmp_path / "bench.json").write_text(json.dumps({**BENCHMARK, "ttfts": None}))
    with pytest.raises(ConfigError, match="has no ttfts"):
        read_recordings(tmp_path, gpu="H100-80GB")


def test_a_request_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    later = {"prompt_len": 7, "output_len": 1, "start_time": 49.0, "first_token_ts": 49.5}
    later["last_token_ts"] = 49.5
    path.write_text(f"{json.dumps(LOG)}\n\n{json.dumps(later)}\n")
    (one,) = read_recordings(tmp_path, gpu="H100-80GB", model="Llama-3.1-8B").recordings
    assert [row.request_id for row in one.served] == ["a", "2"]
    assert one.served[0].completion_s == pytest.approx(0.6)
    assert one.served[0].arrival_s == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrival_time": None}, "request 1 has no queued"),
        ({"latency": 0.1}, "times are not in order"),
        ({"ttft": "soon"}, "request 1: could not convert"),
        ({"ttft": "nan"}, "times are not in order, or no numbers"),
        ({"completion_tokens": 0}, "lengths must be 1 to"),
        ({"completion_tokens": 1e308}, "lengths must be 1 to"),
        ({"prompt_tokens": "inf"}, "request 1: cannot convert"),
        ({"prompt_tokens": 10**400}, "request 1: int too large"),
        ({"arrival_time": 1.7e12}, "times are no seconds"),
        ({"ttft": 0.0, "latency": 0.0}, "take no time"),
    ],
)
def test_a_broken_request_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({**LOG, **change}))
    with pytest.raises(ConfigError, match=rf"log\.jsonl, {words}|log\.jsonl.*{words}"):
        read_recordings(tmp_path, gpu="H100-80GB", model="Llama-3.1-8B")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ('{"engine_kwargs": 3}', "engine_kwargs is no object"),
        ('{"engine_kwargs": {"max_num_seqs": "many"}}', "max_num_seqs is 'many'"),
        ('{"engine_kwargs": {"max_num_seqs": Infinity}}', "max_num_seqs is inf"),
        ('{"engine_kwargs": {"max_num_seqs": 0}}', "max_num_seqs is 0"),
        ('{"engine_kwargs": {"tensor_parallel_size": 4}}', "ran on 4 GPUs"),
        ('{"engine_kwargs": {"gpu_memory_utilization": 5}}', "is 5, no share of a memory"),
        ('{"engine_kwargs": {"gpu_memory_utilization": NaN}}', "is nan, no share of a memory"),
        ('{"kv_cache": {"num_gpu_blocks": -4}}', "num_gpu_blocks is -4"),
        ('{"kv_cache": {"block_size": "x"}}', "block_size is 'x'"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_a_broken_description_is_named(recorded: Path, text: str, words: str) -> None:
    (recorded / f"vllm_real_{GPU}_{MODEL}_meta.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_recordings(recorded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_times": 5}, "must be lists"),
        ({"errors": 5}, "must be lists"),
        ({"input_lens": [float("inf"), 1, 1]}, "request 1: cannot convert"),
    ],
)
def test_a_broken_benchmark_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({**BENCHMARK, **change}))
    with pytest.raises(ConfigError, match=rf"bench\.json.*{words}"):
        read_recordings(tmp_path, gpu="H100-80GB")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl", b"[" * 100_000),
        ("a_requests.csv", b"\xff\xfe"),
        ("a_requests.csv", b"input_toks\n" + b"9" * 200_000),
        ("a_requests.csv.gz", b"no gzip"),
        ("a_requests.csv.gz", gzip.compress(random.Random(0).randbytes(1000), mtime=0)[:500]),
    ],
)
def test_a_file_that_is_broken_does_not_hide_the_others(
    recorded: Path, name: str, content: bytes
) -> None:
    (recorded / name).write_bytes(content)
    (recorded / "folder.json").mkdir()
    (recorded / "gone.json").symlink_to("nowhere")
    found = read_recordings(recorded)
    assert len(found.recordings) == 1
    assert list(found.refused) == [name]


def test_what_a_recording_must_say_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(LOG))
    with pytest.raises(ConfigError, match="does not say which GPU"):
        read_recordings(tmp_path, model="Llama-3.1-8B")
    with pytest.raises(ConfigError, match="does not say which model"):
        read_recordings(tmp_path, gpu="H100-80GB")
    with pytest.raises(ConfigError, match="unknown model 'My-Own'"):
        read_recordings(tmp_path, gpu="H100-80GB", model="My-Own")


def test_one_broken_recording_does_not_hide_the_others(recorded: Path) -> None:
    (recorded / "log.jsonl").write_text("{broken")
    (recorded / "report.json").write_text("{}")
    found = read_recordings(recorded)
    assert len(found.recordings) == 1
    assert list(found.refused) == ["log.jsonl"]
    assert "line 1 is no JSON" in found.refused["log.jsonl"]


def test_step_times_fall_back_to_the_data_sheet_and_say_so(recorded: Path) -> None:
    (one,) = read_recordings(recorded, gpu="H100-80GB").recordings
    time_of, source = iteration_time(recorded, one)
    assert "data sheet" in source
    served, _ = simulate(one, calibrate(one, time_of, first=0.5))
    assert {row["name"] for row in compare(one, served)} == set(COMPARED)
    (unknown,) = read_recordings(recorded, gpu="Some-GPU").recordings
    with pytest.raises(ConfigError, match="no kernel tables"):
        iteration_time(recorded, unknown)
    write_kernel_tables(recorded)
    (known,) = read_recordings(recorded).recordings
    assert iteration_time(recorded, known)[1].startswith("kernel tables")


def test_outputs_of_one_token_have_no_time_per_token(tmp_path: Path) -> None:
    rows = [{**LOG, "request_id": str(n), "completion_tokens": 1, "latency": 0.2} for n in (1, 2)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (one,) = read_recordings(tmp_path, gpu="H100-80GB", model="Llama-3.1-8B").recordings
    time_of, _ = iteration_time(tmp_path, one)
    assert calibrate(one, time_of, first=0.5) == time_of
    served, _ = simulate(one, time_of)
    assert "tpot_mean_s" not in {row["name"] for row in compare(one, served)}


def test_errors_over_a_folder_are_means_of_absolute_values_and_the_worst() -> None:
    def rows(percent: float) -> list[dict[str, object]]:
        return [{"name": "ttft_mean_s", "difference_percent": percent}]

    (one,) = errors_by_metric({"a": rows(2.0), "b": rows(-6.0)})
    assert one == {
        "name": "ttft_mean_s",
        "recordings": 2,
        "mean_absolute_percent": 4.0,
        "worst_percent": -6.0,
        "worst_recording": "b",
    }
