"""`aqua-place` as a user runs it: files, exit codes, and separate processes where they tell."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from aqua_placer.cli import app
from aqua_placer.problem.families import generate
from harness.bounds import HANG_S
from harness.changed_problems import churned
from harness.closed_pipe import into_closed_pipe
from harness.command import run_here

WORK_BEFORE_INTERRUPT_S = 8.0
"""Processor time, of which importing and reading take about three seconds."""

COMMAND = [sys.executable, "-c", "from aqua_placer.cli import main; main()"]
STATED_KEYS = {
    "objective",
    "value",
    "bound",
    "gap",
    "coverage_gb",
    "coverage_bound_gb",
    "demand_gb",
    "max_abs_mem_gb",
    "max_abs_cnt",
    "proven",
    "solve_seconds",
    "cpu_seconds",
    "assignments",
    "matches",
    "unmatched",
}


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in this process and check how it ended."""
    done = run_here(app, "aqua-place", *arguments)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


def program(*arguments: object) -> str:
    """What a command prints as a program."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=HANG_S
    ).stdout


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json.gz"
    path.write_bytes(gzip.compress(json.dumps(generate("tpscarce", 64, 0)).encode()))
    return path


@pytest.mark.parametrize("objective", ["coverage", "abs", "signed"])
def test_solve_prints_one_object_with_the_stated_keys(problem: Path, objective: str) -> None:
    done = run(
        "solve", problem, "--objective", objective, "--time-limit", 20, "--seed", 1, "--json"
    )
    plan = json.loads(done.stdout)
    assert plan.keys() >= STATED_KEYS
    assert plan["objective"] == objective
    assert len(plan["assignments"]) == len(generate("tpscarce", 64, 0)["groups"]["name"])


def test_a_plan_goes_from_solve_through_check_explain_render_and_replan(
    problem: Path, tmp_path: Path
) -> None:
    plan, later, picture = tmp_path / "plan.json", tmp_path / "later.json", tmp_path / "plan.svg"
    program("solve", problem, "--output", plan)
    assert json.loads(program("check", problem, plan, "--json"))["passed"]
    told = json.loads(program("explain", problem, plan, "--json"))
    assert told["groups"], "tpscarce has more demand than its producers spare"
    assert all(any("fix" in line for line in group["lines"]) for group in told["groups"])
    program("render", problem, plan, "--output", picture)
    assert picture.read_text().lstrip().startswith("<?xml")
    placed = json.loads(plan.read_text())["assignments"]
    churn = churned(generate("tpscarce", 64, 0), [a["server_index"] for a in placed], 0.1, 1)
    later.write_text(json.dumps(churn))
    moved = json.loads(program("replan", later, "--current", plan, "--json"))
    assert moved["moves"]
    stopped = {move["group"] for move in moved["moves"] if move["kind"] == "stop"}
    assert stopped == {a["group"] for a in placed} - set(churn["groups"]["name"])


def test_the_same_seed_gives_the_same_plan_in_another_process(problem: Path) -> None:
    told = [program("solve", problem, "--json"), run("solve", problem, "--json").stdout]
    assert len({json.loads(plan)["plan_hash"] for plan in told}) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": {"name": ["x"], "tp": [1], "r_gb": [float("nan")]}}, "'x'"),
        ({"groups": {"name": ["x", "x"], "tp": [1, 1], "r_gb": [1, 2]}}, "'x'"),
        ({"groups": {"name": ["big"], "tp": [16], "r_gb": [1]}}, "'big'"),
    ],
)
def test_bad_input_names_the_item_and_the_remedy_and_exits_with_2(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**generate("ref50", 16, 0), **change}))
    done = run("solve", path, "--json", code=2)
    body = json.loads(done.stdout)["error"]
    assert body["code"] == "problem_invalid"
    assert says in body["message"]
    told = run("solve", path, code=2)
    assert not told.stdout
    assert body["remedy"] in told.stderr


def test_a_changed_plan_fails_the_check(problem: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("solve", problem, "--output", plan)
    document = json.loads(plan.read_text())
    document["coverage_gb"] += 10
    first, second = document["assignments"][:2]
    first["gpus"] = second["gpus"]
    first["server"], first["server_index"] = second["server"], second["server_index"]
    plan.write_text(json.dumps(document))
    verdict = json.loads(run("check", problem, plan, "--json", code=1).stdout)
    assert any("hash" in line for line in verdict["problems"])
    assert any("holds both" in line for line in verdict["problems"])


@pytest.mark.parametrize("change", [{"group": "nobody"}, {"server": "q/7"}, {"gpus": [99]}])
def test_a_changed_plan_is_neither_drawn_nor_explained(
    problem: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    plan = tmp_path / "plan.json"
    run("solve", problem, "--output", plan)
    document = json.loads(plan.read_text())
    document["assignments"][0].update(change)
    plan.write_text(json.dumps(document))
    for command in (
        ("render", problem, plan, "-o", tmp_path / "plan.svg"),
        ("explain", problem, plan),
    ):
        done = run(*command, code=2)
        assert "plan.json: " in done.stderr
        assert "check" in done.stderr
    assert not (tmp_path / "plan.svg").exists()


def test_an_interrupt_gives_the_best_plan_so_far_with_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps(generate("tpmix-cont", 512, 0)))
    started = subprocess.Popen(
        [
            *COMMAND,
            "solve",
            str(path),
            "--solver",
            "milp",
            "--objective",
            "abs",
            "--time-limit",
            "3600",
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The program of this size takes minutes: whatever it is doing by then, it must stop. Its own
    # processor time tells how far it is, however busy the machine.
    program = psutil.Process(started.pid)
    while (used := program.cpu_times()).user + used.system < WORK_BEFORE_INTERRUPT_S:
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=HANG_S)
    assert started.returncode == 0, err
    plan = json.loads(out)
    assert plan["bound"] <= plan["value"]


def test_gurobi_refusing_the_size_is_told_apart_from_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps(generate("ref50", 256, 0)))
    options = ("--solver", "milp", "--backend", "gurobi", "--objective", "abs")
    done = run("solve", path, *options, code=3)
    assert "auto" in done.stderr


def test_unknown_options_name_the_choices(problem: Path) -> None:
    assert "coverage" in run("solve", problem, "--objective", "speed", code=2).stderr


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from aqua_placer.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'numpy', 'highspy', 'matplotlib', 'fastapi', 'pydantic', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.strip() == "[]"


def test_bench_reads_a_folder(problem: Path) -> None:
    rows = json.loads(run("bench", problem.parent, "--json").stdout)["rows"]
    assert [row["problem"] for row in rows] == [problem.name]
    assert rows[0]["valid"]


def test_a_reader_that_has_left_ends_the_command_without_a_trace(problem: Path) -> None:
    done = into_closed_pipe([*COMMAND, "solve", str(problem), "--json"], 100)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "placer.example"])  # noqa: S104 - it is refused
def test_only_with_a_token_does_the_service_listen_beyond_loopback(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    hosts: list[str] = []
    monkeypatch.setattr("uvicorn.run", lambda _, *, host, **__: hosts.append(host))
    assert "AQUA_PLACER_TOKEN" in run("serve", "--host", host, code=2).stderr
    assert not hosts
    run("serve", "--host", host, "--token", "secret")
    run("serve", "--host", "localhost")
    assert hosts == [host, "localhost"]
