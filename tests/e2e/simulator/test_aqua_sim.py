"""`aqua-sim` as a user runs it: every command, on small tables, tables for people and JSON.

Each command is run as a program once; its variants run in this process (`harness.command`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aqua_protocol.decoders import DECODERS
from aqua_simulator.cli import app
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.fit import fit_samples
from aqua_simulator.timing.iteration import from_kernels
from aqua_simulator.timing.profiles import read_folder
from harness.bounds import HANG_S
from harness.command import run_here
from harness.profile_tables import (
    GPU,
    MODEL,
    write_kernel_tables,
    write_operator_tables,
    write_recording,
)

PNG = b"\x89PNG"


def program(*arguments: str | Path) -> Any:  # noqa: ANN401 - JSON
    """The JSON that a command prints as a program."""
    command = [Path(sys.executable).with_name("aqua-sim"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return json.loads(done.stdout)


def aqua_sim(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command and check how it ended."""
    done = run_here(app, "aqua-sim", *arguments)
    assert done.returncode == code, done.stderr or done.stdout
    return done


def document(*arguments: str | Path) -> Any:  # noqa: ANN401 - JSON
    """The JSON that a command prints."""
    return json.loads(aqua_sim(*arguments, "--json").stdout)


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    write_operator_tables(folder)
    return folder


def test_fit_evaluate_and_run_follow_each_other(profiles: Path, tmp_path: Path) -> None:
    fit = tmp_path / "fit.json.gz"
    curves = tmp_path / "curves.png"
    made = program("fit", profiles, "-o", fit, "--hold-out", "4", "--plot", curves)
    assert curves.read_bytes().startswith(PNG)
    assert made["functions"]["a100/decode_attention"]["row_count"] == 68
    plot = tmp_path / "errors.png"
    scored = program("evaluate", "--fit", fit, "--profiles", profiles, "--plot", plot)
    assert scored["overall_mape_percent"]["linear"] < 2.0
    assert plot.read_bytes().startswith(PNG)

    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n100,20\n900,5\n30,60\n")
    poisson = ["--process", "poisson", "--rate", "5", "--requests", "60", "--engines", "2"]
    served = tmp_path / "served.png"
    first = program("run", "--fit", fit, "--trace", trace, *poisson, "--plot", served)
    assert first["request_count"] == 60
    assert [one["name"] for one in first["engines"]] == ["engine-0", "engine-1"]
    assert served.read_bytes().startswith(PNG)
    assert document("run", "--fit", fit, "--trace", trace, *poisson) == first
    other = document("run", "--fit", fit, "--trace", trace, *poisson, "--seed", "1")
    assert other["makespan_s"] != first["makespan_s"]


def test_replay_finds_the_host_overhead_of_a_recorded_run(tmp_path: Path) -> None:
    write_kernel_tables(tmp_path)
    model = DECODERS["Llama-3-8B"]
    time_of = from_kernels(fit_samples(read_folder(tmp_path)), GPU, MODEL, model)
    settings = EngineSettings(512, 64, kv_bytes_per_token=model.kv_bytes_per_token)
    arrivals = [Arrival(str(index), index * 0.4, 200 + index, 30) for index in range(40)]
    overhead_s = 0.004
    slow = type(time_of)("slow", time_of.linear, time_of.attention, time_of.head, overhead_s)
    recorded = Engine("e", settings, slow, PagedMemory(400, 16)).run(arrivals)
    write_recording(
        tmp_path,
        [
            (
                row.request_id,
                row.prompt_tokens,
                row.output_tokens,
                100.0 + row.arrival_s,
                100.0 + row.scheduled_s,
                100.0 + row.first_token_s,
                100.0 + row.last_token_s,
            )
            for row in recorded
        ],
        blocks=400,
    )
    plot = tmp_path / "replay.png"
    calibrated = program("replay", tmp_path, "--plot", plot)["recordings"][0]
    assert calibrated["host_overhead_s"] == pytest.approx(overhead_s, rel=0.05)
    off = {row["name"]: row["difference_percent"] for row in calibrated["rows"]}
    assert all(abs(percent) < 2.0 for percent in off.values()), off
    assert plot.read_bytes().startswith(PNG)
    # The control: without the constant the replay is visibly too fast.
    bare = document("replay", tmp_path, "--calibrate", "0")["recordings"][0]
    tpot = next(row for row in bare["rows"] if row["name"] == "tpot_mean_s")
    assert tpot["difference_percent"] < -5.0


def test_paper_prints_ours_beside_the_published_numbers(tmp_path: Path) -> None:
    page = tmp_path / "papers.md"
    done = aqua_sim("paper", "figure5", "-o", page)
    assert "3.73" in done.stdout
    assert "| density of the left node | 3.73 | 3.72 |" in page.read_text()
    rows = program("paper", "figure5")["figures"][0]["rows"]
    assert all(abs(row["difference"]) < 0.02 * row["published"] for row in rows)


def test_a_small_figure_6_runs_the_real_policies_and_resumes(tmp_path: Path) -> None:
    kept, plots = tmp_path / "kept", tmp_path / "plots"
    options: list[str | Path] = [
        "paper",
        "figure7",
        "--requests",
        "1000",
        "--resume",
        kept,
        "--plots",
        plots,
    ]
    first = document(*options)
    names = [row["name"] for row in first["figures"][0]["rows"]]
    assert "Trace 1, blendserve, sharing of the optimum" in names
    assert (plots / "blendserve-figure7.png").read_bytes().startswith(PNG)
    stored = next(kept.iterdir())
    changed = json.loads(stored.read_text())
    changed["title"] = "read, not run"
    stored.write_text(json.dumps(changed))
    assert document(*options)["figures"][0]["title"] == "read, not run"


def test_a_blend_runs_under_any_policy_and_repeats_itself(tmp_path: Path) -> None:
    options: list[str | Path] = ["blend", "--requests", "3000", "--density", "1.2"]
    base = program(*options, "--policy", "dfs")
    plot = tmp_path / "usage.png"
    ours = document(*options, "--policy", "foresight", "--plot", plot)
    assert base["optimal_s"] == ours["optimal_s"] <= ours["makespan_s"]
    assert base["sharing_of_optimum"] == pytest.approx(1.0)
    assert plot.read_bytes().startswith(PNG)
    assert document(*options, "--policy", "foresight") == ours


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "nowhere", "-o", "fit.json"], "no folder"),
        (["evaluate", "--fit", "nowhere", "--profiles", "nowhere"], "is not a fit"),
        (["replay", "."], "no recorded run"),
        (["paper", "figure99"], "no figure named"),
        (["blend", "--policy", "best"], "no policy named"),
        (["blend", "--sharing", "0.99"], "no blend of"),
    ],
)
def test_expected_failures_end_with_a_sentence_and_code_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = aqua_sim(*arguments, code=2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("aqua-sim: ")
    # The sentence, and what to do about it.
    assert done.stderr.count("\n") <= 2


def test_fair_policies_shorten_the_wait_for_a_first_token_in_a_burst(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "300,200\n" * 10)
    burst = ["--process", "burst", "--rate", "3", "--requests", "120", "--burst-factor", "6"]
    burst += ["--burst-start-s", "5", "--burst-length-s", "10"]
    machine = ["--model", "Llama-3-8B", "--gpu", "A100-80GB", "--memory-share", "0.24"]
    runs = {
        policy: document(
            "run", "--trace", trace, *burst, *machine, "--policy", policy, "--page-to", "peer"
        )
        for policy in ("fcfs", "cfs", "best")
    }
    for fair in ("cfs", "best"):
        assert runs[fair]["ttft_max_s"] * 5 < runs["fcfs"]["ttft_max_s"]
        assert runs[fair]["engines"][0]["paged_out_tokens"] > 0
    assert runs["best"]["completion_mean_s"] < 1.25 * runs["fcfs"]["completion_mean_s"]
    assert runs["best"]["preemption_count"] < runs["cfs"]["preemption_count"] / 3
    error = aqua_sim("run", "--trace", trace, "--policy", "lifo", code=2).stderr
    assert "no policy named 'lifo'" in error
