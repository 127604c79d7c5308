"""Profiles of an HTTP server: what is found, and what a failing one may never be called.

Server and profiler share a virtual clock, so that how fast the machine is makes no difference.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aqua_profiler.cli import app
from aqua_profiler.errors import EndpointError
from aqua_profiler.report.files import read_profile
from aqua_protocol import ConfigError
from aqua_protocol.profile import ModelProfile, ProfileLabel
from aqualib.producer.profile import Profile
from harness.openai_server import Fault, Manners, OpenAIServer, on_virtual_clock
from harness.scripted_server import Answer, Request, ScriptedServer

GB = 10**9
BUDGET_S = 40.0
"""More than any of these takes, in virtual seconds."""

LIMITS = ("--ttft-s", "1", "--tbt-p99-s", "0.1")

LENGTHS = "prompt_tokens,output_tokens\n" + "".join(f"{20 + n},{2 + n % 4}\n" for n in range(40))


def _profile(
    tmp_path: Path, manners: Manners, *options: str, budget_s: float = BUDGET_S
) -> tuple[int, dict[str, Any]]:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    with on_virtual_clock(manners, tmp_path / "socket") as server:
        command = ["run", "llm", "--endpoint", server.url, "--model", "m", "--json"]
        command += ["--lengths", str(lengths), *LIMITS]
        result = CliRunner().invoke(app, [*command, "--budget-s", str(budget_s), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault.DIES, "endpoint_gone"),
        (Fault.STALLS, "endpoint_stalled"),
        (Fault.ERRORS, "endpoint_refused"),
        (Fault.GARBAGE, "endpoint_garbled"),
        (Fault.CUTS_OFF, "endpoint_garbled"),
    ],
)
@pytest.mark.parametrize("fails_from", [0, 60])
def test_a_failing_endpoint_leaves_a_partial_profile_and_a_clear_error(
    tmp_path: Path, fault: Fault, code: str, fails_from: int
) -> None:
    manners = Manners(fault=fault, fails_from=fails_from, cache_tokens=10**6, cache_bytes=10**11)
    output = tmp_path / "profile.json"
    # Short only for the server that never answers: others must not be taken for one.
    stall_s = "2" if fault is Fault.STALLS else "60"
    exit_code, content = _profile(tmp_path, manners, "--stall-s", stall_s, "--output", str(output))
    assert exit_code == 3
    assert content["partial"] is True
    assert content["label"] == "unknown"
    assert content["spare_bytes"] is None
    assert content["error"]["code"] == code
    assert content["error"]["remedy"]
    assert read_profile(output).partial


def test_nobody_listening_is_a_clear_error(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    result = CliRunner().invoke(
        app,
        [
            *("run", "llm", "--endpoint", "http://127.0.0.1:9", "--model", "m", "--json"),
            *("--lengths", str(lengths), "--budget-s", "5"),
        ],
    )
    assert result.exit_code == 3
    content = json.loads(result.stdout)
    assert content["partial"] is True
    assert content["error"]["code"] == "endpoint_gone"


def test_without_metrics_the_spare_memory_is_unknown_and_said_to_be(tmp_path: Path) -> None:
    exit_code, content = _profile(tmp_path, Manners(), "--max-rate", "20")
    assert exit_code == 0
    assert content["partial"] is False
    assert content["label"] == "unknown"
    assert content["spare_bytes"] is None
    assert content["needed_bytes"] is None
    assert any("/metrics" in note for note in content["notes"])


def test_a_cache_that_stays_empty_makes_a_producer(tmp_path: Path) -> None:
    manners = Manners(cache_tokens=10**6, cache_bytes=40 * 10**9)
    exit_code, content = _profile(tmp_path, manners, "--max-rate", "20")
    assert exit_code == 0
    assert content["label"] == "producer"
    assert 39e9 < content["spare_bytes"] <= 40e9
    assert content["stable_rate_per_s"] == 20.0


def test_bursts_beyond_the_cache_make_a_consumer(tmp_path: Path) -> None:
    manners = Manners(cache_tokens=100, cache_bytes=10**6, prefill_s=0.02)
    options = ["--max-rate", "20", "--bursts", "2", "--burst-s", "2"]
    exit_code, content = _profile(tmp_path, manners, *options)
    assert exit_code == 0
    assert content["label"] == "consumer"
    (burst,) = content["bursts"]
    assert burst["factor"] == 2.0
    assert content["needed_bytes"] == burst["needed_bytes"] > 0
    assert burst["requests"] > 40


@pytest.mark.parametrize("unknown", [("ignore_eos",), ("stream_options",)])
def test_a_strict_server_that_does_not_know_an_option_is_profiled_without(
    tmp_path: Path, unknown: tuple[str, ...]
) -> None:
    exit_code, content = _profile(tmp_path, Manners(unknown=unknown), "--max-rate", "20")
    assert exit_code == 0
    assert content["stable_rate_per_s"] == 20.0


def test_a_server_that_does_not_count_tokens_is_said_not_to(tmp_path: Path) -> None:
    exit_code, content = _profile(tmp_path, Manners(word_tokens=0), "--max-rate", "20")
    assert exit_code == 0
    assert any("does not count tokens" in note for note in content["notes"])


def test_words_of_many_tokens_do_not_overflow_the_context(tmp_path: Path) -> None:
    # The longest prompt with its answer has 64 tokens, which is just what fits; a word has five.
    manners = Manners(word_tokens=5, context_tokens=64)
    exit_code, content = _profile(tmp_path, manners, "--max-rate", "20")
    assert exit_code == 0, content
    assert content["error"] is None


def test_a_second_profile_of_a_seed_finds_none_of_its_prompts_in_a_cache(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    with on_virtual_clock(Manners(), tmp_path / "socket") as server:
        command = ["run", "llm", "--endpoint", server.url, "--model", "m", "--json", "--seed", "1"]
        command += ["--lengths", str(lengths), *LIMITS, "--budget-s", "10", "--max-rate", "10"]
        for _ in range(2):
            CliRunner().invoke(app, command)
        beginnings = [" ".join(str(prompt).split()[:16]) for prompt in server.prompts]
    assert len(beginnings) > 60
    assert len(set(beginnings)) == len(beginnings)


def test_a_server_that_cannot_keep_up_is_rated_below_what_it_can_finish(tmp_path: Path) -> None:
    # One at a time, 25 ms each at the least: 40 requests/s.
    manners = Manners(slots=1, prefill_s=0.02, token_s=0.005)
    exit_code, content = _profile(tmp_path, manners, "--max-rate", "200", "--precision", "0.1")
    assert exit_code == 0
    assert 0 < content["stable_rate_per_s"] < 40
    assert content["limited_by"] == "ttft"
    assert content["queue"] is None, "without metrics it is not known"


def test_the_queue_at_the_stable_rate_is_what_a_lender_takes_for_normal(tmp_path: Path) -> None:
    manners = Manners(slots=1, prefill_s=0.02, token_s=0.005, cache_tokens=10**6)
    manners = replace(manners, cache_bytes=40 * 10**9)
    exit_code, content = _profile(tmp_path, manners, "--max-rate", "20")
    assert exit_code == 0
    queue, rate = content["queue"], content["stable_rate_per_s"]
    # One server at a time, 32.5 ms on average and 5.6 of scatter: M/G/1 has that many wait.
    busy = rate * 0.0325
    expected = busy**2 * (1 + (5.6 / 32.5) ** 2) / (2 * (1 - busy))
    assert 0.5 * expected < queue["mean_length"] < 2.0 * expected, (rate, expected, queue)
    assert 0.1 < queue["waiting_share"] < busy
    profile = Profile.measured(ModelProfile.model_validate(content), slab_bytes=1 << 20)
    assert profile.steady_queue_length > 0
    assert profile.queue_margin > 2


@pytest.mark.slow
def test_a_server_that_sheds_load_is_not_called_faulty(tmp_path: Path) -> None:
    manners = Manners(fault=Fault.SHEDS, fails_from=60)
    exit_code, content = _profile(tmp_path, manners, "--max-rate", "20", budget_s=10.0)
    assert exit_code == 3 or content["partial"]
    assert content["label"] == "unknown"


def test_an_interrupted_profile_goes_on_from_its_journal(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    broken = Manners(fault=Fault.DIES, fails_from=90)
    options = ["--max-rate", "20", "--output", str(output)]
    exit_code, first = _profile(tmp_path, broken, *options)
    assert exit_code == 3
    journal = output.with_name(output.name + ".journal")
    kept = [json.loads(line) for line in journal.read_text().splitlines()]
    assert "unloaded" in kept[1]
    exit_code, content = _profile(tmp_path, Manners(), *options)  # The endpoint is back.
    assert exit_code == 0
    assert content["runs"][: len(first["runs"])] == first["runs"]
    assert not journal.exists()
    assert read_profile(output).label is ProfileLabel.UNKNOWN


def test_over_tcp_and_in_real_time_every_request_that_is_counted_has_arrived(
    tmp_path: Path,
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    with OpenAIServer(Manners()) as server:
        command = ["run", "llm", "--endpoint", server.url, "--model", "m", "--json"]
        command += ["--lengths", str(lengths), "--budget-s", "4", "--max-rate", "5"]
        result = CliRunner().invoke(app, command)
        # How many fit into the budget is the clock's affair.
        assert json.loads(result.stdout)["requests_sent"] == server.asked > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"subject": {"url": "http://elsewhere"}}\n', "about something else"),
        ('{"subject": {}}\n{"run": {"rate_per_s": 1.0}}\n', "not a journal of this version"),
    ],
)
def test_a_journal_of_another_workload_or_version_is_refused(
    tmp_path: Path, content: str, said: str
) -> None:
    journal = tmp_path / "journal"
    journal.write_text(content)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    with pytest.raises(Exception, match=said) as caught:
        CliRunner().invoke(
            app,
            [
                *("run", "llm", "--endpoint", "http://127.0.0.1:9", "--model", "m"),
                *("--lengths", str(lengths), "--journal", str(journal)),
            ],
            catch_exceptions=False,
        )
    assert not isinstance(caught.value, EndpointError)


def test_a_search_between_two_rates_wants_the_lower_one_first(tmp_path: Path) -> None:
    command = ["run", "llm", "--endpoint", "http://127.0.0.1:9", "--model", "m"]
    command += ["--lengths", str(tmp_path / "absent.csv"), "--min-rate", "2", "--max-rate", "1"]
    with pytest.raises(ConfigError, match="--min-rate 2 is above --max-rate 1"):
        CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("api", "path"), [("chat", "/v1/chat/completions"), ("completions", "/v1/completions")]
)
def test_an_operation_that_is_named_is_the_only_one_loaded(
    tmp_path: Path, api: str, path: str
) -> None:
    asked = []

    def refuse(request: Request) -> Answer:
        asked.append((request.method, request.path))
        return Answer(404, {"error": {"message": "no such operation"}})

    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    with ScriptedServer(refuse) as server:
        command = ["run", "llm", "--endpoint", server.url, "--model", "m", "--api", api]
        CliRunner().invoke(app, [*command, "--lengths", str(lengths), "--budget-s", "5"])
    assert {at for method, at in asked if method == "POST"} == {path}


def test_a_batch_server_is_profiled_by_what_it_tells_of_its_memory(tmp_path: Path) -> None:
    sizes: list[int] = []

    def answer(request: Request) -> Answer:
        if request.method == "POST":
            sizes.append(request.body["n"])
            return Answer(200, {"data": []})
        return Answer(200, {"used_bytes": (20 + sizes[-1]) * GB, "total_bytes": 80 * GB})

    with ScriptedServer(answer) as server:
        command = ["run", "batch", "--model", "sd", "--endpoint", f"{server.url}/v1/images"]
        command += ["--memory-url", f"{server.url}/memory", "--largest", "4", "--json"]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["label"] == "producer"
    assert content["spare_bytes"] == (60 - content["peak_batch"]) * GB
    assert content["meter"] == "url"
