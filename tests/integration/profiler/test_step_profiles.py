"""`aqua-profile steps` and a server that records its steps; both on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aqua_profiler.cli import app
from aqua_protocol import AquaError
from aqua_schedulers.conserve import StepLoad, StepTimeKey, find_profile
from harness.openai_server import Fault, Manners, on_virtual_clock

LIMITS = {
    "step_tokens": 256,
    "requests": 8,
    "context_tokens": 512,
    "memory_tokens": 2048,
    "vocabulary": 320,
}
KEY = StepTimeKey("m", "fake 1", "none")


def steps(tmp_path: Path, manners: Manners, *options: str) -> tuple[int, dict[str, Any], list[Any]]:
    with on_virtual_clock(manners, tmp_path / "socket") as server:
        command = ["steps", "--endpoint", server.url, "--model", "m", "--json"]
        command += ["--folder", str(tmp_path / "profiles"), *options]
        result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout), list(server.prompts)


def test_the_profile_is_found_by_what_the_engine_says_it_is(tmp_path: Path) -> None:
    code, told, prompts = steps(tmp_path, Manners(limits=LIMITS), "--plot", str(tmp_path / "a.svg"))
    assert code == 0
    found = find_profile(tmp_path / "profiles", KEY)
    assert told["path"] == str(tmp_path / "profiles" / KEY.file_name)
    assert told["relative_error"] == found.relative_error < 0.02
    assert found.seconds(StepLoad().and_chunk(200, 0)) == pytest.approx(0.007, rel=0.03)
    assert (tmp_path / "a.svg").exists()
    ids = [tuple(prompt) for prompt in prompts]
    assert len(set(ids)) == len(ids), "none is answered from a prefix cache"


def test_an_interrupted_run_goes_on_from_its_journal(tmp_path: Path) -> None:
    broken = Manners(limits=LIMITS, fault=Fault.DIES, fails_from=40)
    code, told, asked = steps(tmp_path, broken)
    assert code == 3
    assert told["partial"] is True
    assert told["error"]["code"] == "endpoint_gone"
    assert 5 < told["done"] < told["of"]
    code, _, again = steps(tmp_path, Manners(limits=LIMITS))  # The endpoint is back.
    assert code == 0
    code, _, whole = steps(tmp_path, Manners(limits=LIMITS))
    assert code == 0
    point_of_failure = 12
    assert len(whole) <= len(asked) + len(again) < len(whole) + point_of_failure
    assert [path.suffix for path in (tmp_path / "profiles").iterdir()] == [".json"]


def test_a_spent_budget_is_told_and_the_next_run_goes_on(tmp_path: Path) -> None:
    runs = 0
    code, done = 1, -1
    while code == 1 and runs < 100:
        code, told, _ = steps(tmp_path, Manners(limits=LIMITS), "--budget-s", "1")
        runs += 1
        assert code == 0 or told["done"] > done
        done = told.get("done", 0)
    assert code == 0
    assert runs > 2


def test_a_journal_of_another_engine_is_refused(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "journal"))
    steps(tmp_path, Manners(limits=LIMITS), "--budget-s", "1", *journal)
    with pytest.raises(AquaError, match="limits differ"):
        steps(tmp_path, Manners(limits={**LIMITS, "requests": 4}), *journal)


def test_a_server_that_records_no_steps_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AquaError, match="does not record its steps") as caught:
        steps(tmp_path, Manners())
    assert "AquaMiddleware" in caught.value.remedy
    result = CliRunner().invoke(app, ["steps", "--endpoint", "http://127.0.0.1:9"])
    assert isinstance(result.exception, AquaError)
    assert result.exception.code == "endpoint_gone"
