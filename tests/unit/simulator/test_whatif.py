"""What Aqua would save, asked of a day whose savings are known because it was made with them."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aqua_protocol.errors import ConfigError
from aqua_protocol.plan import Plan
from aqua_simulator.whatif.answer import SENSITIVITIES, ask
from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import (
    Cluster,
    DeploymentList,
    cluster_of,
    read_cluster,
    read_plan,
)
from aqua_simulator.whatif.fleet_day import recording_of
from aqua_simulator.whatif.html_report import write_report
from aqua_simulator.whatif.jobs import GapJob, OnlineJob, SimulationInput, run_all
from aqua_simulator.whatif.members import Assumptions
from aqua_simulator.whatif.offline import blended_gain
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad, read_day
from aqua_simulator.whatif.report import SavingsReport
from aqua_simulator.whatif.step_fit import StepObservations
from aqua_simulator.whatif.step_times import (
    COEFFICIENTS,
    StepCoefficients,
    fitted,
    sheet_coefficients,
)
from harness.planted_day import (
    PLANTED,
    PlantedDay,
    planted_day,
    write_day,
)

PHASE_S = 100.0


@pytest.fixture(scope="module")
def day() -> PlantedDay:
    return planted_day(phase_s=PHASE_S)


@pytest.fixture(scope="module")
def question(
    day: PlantedDay, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Cluster, RecordedLoad]:
    cluster_path, trace = write_day(tmp_path_factory.mktemp("planted"), day)
    cluster, findings = read_cluster(cluster_path)
    assert not findings
    recorded = read_day([trace], list(cluster.engines), hours=day.span_s / 3600.0)
    assert not recorded.findings
    return cluster, recorded


@pytest.fixture(scope="module")
def answer(question: tuple[Cluster, RecordedLoad]) -> SavingsReport:
    cluster, recorded = question
    return ask(
        cluster,
        recorded,
        [],
        seeds=0,
        sample_count=1,
        sample_s=10.0,
        sensitivities=SENSITIVITIES[:1],
    )


def numbers(answer: SavingsReport, scenario: str) -> dict[str, float]:
    outlook = next(each for each in answer.outlooks if each.scenario == scenario)
    return {key: each.value for key, each in outlook.numbers.items()}


@pytest.mark.slow
def test_step_times_that_a_recording_hides_are_found_again(
    question: tuple[Cluster, RecordedLoad],
) -> None:
    cluster, recorded = question
    found = fitted(recorded.loads, cluster.engines)["chat"]
    assert found.is_fitted
    assert found.step_s == pytest.approx(PLANTED.step_s, rel=0.05)
    assert found.token_s == pytest.approx(PLANTED.token_s, rel=0.1)
    assert found.front_s == pytest.approx(PLANTED.front_s, rel=0.5)


def test_what_no_step_shows_is_as_far_off_the_data_sheet_as_what_is_of_its_kind() -> None:
    listed = {"name": "a", "model": "Mistral-7B", "gpu": "A100-80GB", "replicas": 1}
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": [listed]}), "test")
    sheet = sheet_coefficients(cluster.engines["a"])
    tokens = np.linspace(1.0, 500.0, 40)
    rows = np.column_stack([np.ones(40), tokens, np.zeros((40, 5))])
    seconds = 3.0 * sheet.step_s + 2.0 * sheet.token_s * tokens
    seen = StepObservations(rows, seconds, np.zeros_like(rows), np.ones(40))
    none, unknown = np.zeros(0, np.int64), np.zeros(0)
    load = ModelLoad(unknown, none, none, unknown, unknown, {}, seen)
    found = fitted({"a": load}, cluster.engines)["a"]
    assert found.context_s == pytest.approx(3.0 * sheet.context_s, rel=0.01)
    assert found.pair_s == pytest.approx(2.0 * sheet.pair_s, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_engines_that_are_busy_all_day_take_what_those_beside_them_saw(seed: int) -> None:
    listed = {"name": "a", "model": "Llama-2-7B", "gpu": "H100-80GB", "replicas": 4}
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": [listed]}), "test")
    planted = StepCoefficients(0.01, 5e-5, 4e-7, 3e-9, 0.02, is_fitted=True)
    generator, count, span_s = np.random.default_rng(seed), 15_000, 300.0
    prompts, outputs = (generator.integers(2, most, count) for most in (600, 100))
    unknown = np.full(count, np.nan)
    load = ModelLoad(np.sort(generator.random(count)) * span_s, prompts, outputs, unknown, unknown)
    shown = recording_of(cluster, {"a": planted}, {"a": load}, span_s)
    found = fitted(shown, cluster.engines)["a"]
    assert found.token_s == pytest.approx(planted.token_s, rel=0.2)
    assert found.step_s == pytest.approx(planted.step_s, rel=0.2)


@pytest.mark.slow
def test_what_a_fit_gets_wrong_by_itself_is_taken_off() -> None:
    listed = {"name": "a", "model": "Mistral-7B", "gpu": "A100-80GB", "replicas": 2}
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": [listed]}), "test")
    planted = StepCoefficients(0.02, 2e-4, 1e-7, 1e-9, 0.01, is_fitted=True)
    generator, count, span_s = np.random.default_rng(5), 4000, 800.0
    lengths = [
        np.clip(generator.lognormal(np.log(median), 0.7, count), 1, 20_000).astype(int)
        for median in (1000, 100)
    ]
    unknown = np.full(count, np.nan)
    arrival_s = np.sort(generator.random(count)) * span_s
    load = ModelLoad(arrival_s, lengths[0], lengths[1], unknown, unknown)
    shown = recording_of(cluster, {"a": planted}, {"a": load}, span_s)
    by_fit = fitted(shown, cluster.engines)["a"]
    assert by_fit.token_s != pytest.approx(planted.token_s, rel=0.03)
    assert by_fit.context_s > 1.5 * planted.context_s
    found = calibrated(cluster, RecordedLoad(span_s, shown, []))["a"]
    assert found.token_s == pytest.approx(planted.token_s, rel=0.03)
    assert found.context_s == pytest.approx(planted.context_s, rel=0.3)


@pytest.mark.parametrize(("token_s", "context_s"), [(0.0, 1e-7), (2e-4, 0.0)])
def test_blending_goes_by_the_data_sheet_for_what_no_recorded_step_shows(
    token_s: float, context_s: float
) -> None:
    listed = {"name": "a", "model": "Mistral-7B", "gpu": "A100-80GB", "replicas": 1}
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": [listed]}), "test")
    found = StepCoefficients(0.02, token_s, context_s, 1e-9, 0.01, is_fitted=True)
    gain, order = blended_gain(cluster, "a", found, seed=1)
    assert gain > 0.9
    assert sorted(order) == list(range(len(order)))


@pytest.mark.slow
def test_the_day_without_aqua_is_the_recorded_one(answer: SavingsReport) -> None:
    assert {row.model for row in answer.checks} == {"chat", "docs"}
    for row in answer.checks:
        assert abs(row.error_percent) < (10.0 if "p99" in row.name else 5.0), row


@pytest.mark.slow
def test_contention_is_told_with_the_curve_that_was_assumed(answer: SavingsReport) -> None:
    assert "not measured" in (answer.interference or "")
    rows = {(each.scenario, each.name): each for each in answer.contention}
    assert {name for _, name in rows} == {"chat", "docs"}
    assert rows["harvesting", "docs"].copying_percent > 0.0
    assert rows["harvesting", "chat"].kernels_percent > 0.0
    assert rows["fair slices", "chat"].kernels_percent == 0.0


@pytest.mark.slow
def test_planted_idle_time_is_recovered_within_five_percent(
    answer: SavingsReport, day: PlantedDay
) -> None:
    assert answer.idle_gpu_hours.value == pytest.approx(day.idle_gpu_hours, rel=0.05)


@pytest.mark.slow
def test_planted_spare_memory_is_recovered_within_five_percent(
    answer: SavingsReport, day: PlantedDay
) -> None:
    lent = numbers(answer, "harvesting")["memory_gb_hours"]
    assert lent == pytest.approx(day.spare_gb_hours, rel=0.05)
    assert numbers(answer, "harvesting")["reclaims"] == 0


@pytest.mark.slow
def test_planted_offline_work_is_recovered_within_five_percent(
    question: tuple[Cluster, RecordedLoad],
) -> None:
    cluster, recorded = question
    known, found = (
        GapJob(0, "chat").run(
            SimulationInput(cluster, recorded, {"chat": times}, sample_count=1, sample_s=100.0)
        )
        for times in (PLANTED, calibrated(cluster, recorded)["chat"])
    )
    assert found.offline_tokens_per_s == pytest.approx(known.offline_tokens_per_s, rel=0.05)
    assert known.online_busy_share < 0.8 < known.busy_share


def test_a_request_that_no_engine_could_hold_takes_nothing_from_offline_work() -> None:
    listed = {"name": "a", "model": "Mistral-7B", "gpu": "A100-80GB", "replicas": 1}
    listed |= {"kv_tokens": 4000}
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": [listed]}), "test")

    def background_of(load: ModelLoad) -> SimulationInput:
        day = RecordedLoad(20.0, {"a": load}, [])
        return SimulationInput(cluster, day, {"a": PLANTED}, sample_count=1, sample_s=20.0)

    for fitting, longest in ((2, 4001), (3, 3700)):  # The last fits, but in nine tenths.
        arrival_s, prompts = np.array([1.0, 2.0, 3.0]), np.array([1000, 2000, longest])
        load = ModelLoad(arrival_s, prompts, np.full(3, 10), *np.full((2, 3), np.nan))
        for memory, count in ((1.0, fitting), (0.9, 2)):
            found = [
                GapJob(0, "a", assumed=Assumptions(memory=memory)).run(background_of(each))
                for each in (load, load.known(np.arange(count)))
            ]
            assert found[0] == found[1]
            assert found[0].offline_tokens_per_s > 0.0


def test_step_times_are_off_by_what_their_fit_leaves_open() -> None:
    # Contexts are hardly known, and come with too short a step.
    known = StepCoefficients(0.02, 2e-4, 1e-7, 1e-9, is_fitted=True)
    factor = ((1e-4, 0.0, 0.0, 0.0), (0.0, 1e-6, 0.0, 0.0), (-3e-8, 0.0, 4e-8, 0.0), (0.0,) * 4)
    found = replace(known, errors=factor)
    steps = (1.0, 100.0, 50_000.0, 0.0)
    longer, shorter = (found.off_by(off, steps) for off in (2.0, -2.0))
    assert longer.context_s > known.context_s > shorter.context_s > 0.0
    assert longer.step_s < known.step_s < shorter.step_s
    taken = [
        sum(count * getattr(each, key) for count, key in zip(steps, COEFFICIENTS, strict=True))
        for each in (shorter, known, longer)
    ]
    variance = sum(
        sum(count * row[column] for count, row in zip(steps, factor, strict=True)) ** 2
        for column in range(4)
    )
    assert taken[2] - taken[1] == pytest.approx(2.0 * variance**0.5)
    assert taken == sorted(taken)
    assert known.off_by(2.0, steps) == known
    assert found.document()["context_s_error"] == pytest.approx(5e-8)


@pytest.mark.slow
def test_an_interval_of_offline_work_reaches_over_what_step_times_leave_open(
    question: tuple[Cluster, RecordedLoad],
) -> None:
    cluster, recorded = question
    factor = ((0.0,) * 4, (0.0,) * 4, (0.0, 0.0, 1e-7, 0.0), (0.0,) * 4)
    times = {name: replace(PLANTED, errors=factor) for name in cluster.engines}
    background = SimulationInput(cluster, recorded, times, sample_count=1, sample_s=60.0)
    jobs = [GapJob(0, "chat", deviations=off) for off in (2.0, 0.0, -2.0)]
    found = [each.offline_tokens_per_s for each in run_all(background, jobs, processes=1).values()]
    assert found[0] < found[1] < found[2]


@pytest.mark.slow
def test_an_answer_without_drawn_days_says_what_step_times_leave_open(
    answer: SavingsReport,
) -> None:
    outlook = next(each for each in answer.outlooks if each.scenario == "co-serving")
    for key in ("offline_tokens", "offline_gpu_hours"):
        found = outlook.numbers[key]
        assert 0.0 <= found.low < found.value < found.high
    assert answer.step_times["chat"]["context_s_error"] > 0.0


@pytest.mark.slow
def test_superfluous_engines_are_found(answer: SavingsReport) -> None:
    # One chat engine keeps 0.8 requests a second within the targets; the documents need theirs.
    assert numbers(answer, "without Aqua")["gpus_fewer"] == 2
    assert numbers(answer, "together")["money_per_day"] >= 2 * 24 * 2.0


@pytest.mark.slow
def test_fair_slices_shorten_the_longest_waits_for_memory(answer: SavingsReport) -> None:
    waits = {each.scenario: each.latencies["docs"]["ttft_p99_s"].value for each in answer.outlooks}
    assert waits["together"] < waits["without Aqua"] / 2
    assert waits["harvesting"] <= waits["without Aqua"] * 1.01


@pytest.mark.slow
def test_an_answer_is_a_document_and_repeats_itself(
    answer: SavingsReport, question: tuple[Cluster, RecordedLoad]
) -> None:
    document = json.loads(json.dumps(answer.document(), allow_nan=False))
    assert document["checks"][0].keys() >= {"model", "recorded", "simulated", "error_percent"}
    shares = [each["share"] for each in document["swings"]]
    assert shares == sorted(shares, reverse=True)
    cluster, recorded = question
    again = recorded.loads["chat"].drawn(3, recorded.span_s)
    assert np.array_equal(
        again.arrival_s, recorded.loads["chat"].drawn(3, recorded.span_s).arrival_s
    )
    assert not np.array_equal(again.arrival_s, recorded.loads["chat"].arrival_s)
    assert abs(len(again) - len(recorded.loads["chat"])) < 0.5 * len(recorded.loads["chat"])
    assert cluster.gpu_count("chat") == 3


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same(
    question: tuple[Cluster, RecordedLoad],
) -> None:
    cluster, recorded = question
    background = SimulationInput(cluster, recorded, fitted(recorded.loads, cluster.engines))
    jobs = [OnlineJob(0), OnlineJob(1, is_fair=True)]
    assert run_all(background, jobs, processes=2) == run_all(background, jobs, processes=1)


@pytest.mark.slow
def test_the_html_report_stands_alone_and_repeats_itself(
    answer: SavingsReport, tmp_path: Path
) -> None:
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    for page in pages:
        write_report(page, answer)
    text = pages[0].read_text()
    assert text == pages[1].read_text()
    assert text.index("off the recording") < text.index("What Aqua would bring")
    assert text.count("<svg") == 3
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    # Nothing is loaded from elsewhere: URLs in it are names of XML namespaces.
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:href", "href"))
    assert "<script" not in text
    assert "@import" not in text


# --- Bad input ------------------------------------------------------------------------------

HEAD = "t_s,model,prompt_tokens,output_tokens,ttft_s,latency_s\n"


def kinds(recorded: RecordedLoad) -> set[str]:
    return {finding.kind for finding in recorded.findings}


def read(tmp_path: Path, text: str, *models: str) -> RecordedLoad:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_day([path], models)


def test_a_gap_of_all_models_is_named_and_neither_idle_nor_busy(tmp_path: Path) -> None:
    lines = [f"{time},a,10,5,0.1,0.2\n" for time in [*range(0, 600, 10), *range(9000, 9600, 10)]]
    recorded = read(tmp_path, HEAD + "".join(lines), "a")
    assert kinds(recorded) == {"gap"}
    assert recorded.span_s == pytest.approx(1190, abs=30)


def test_a_clock_that_was_set_back_is_named(tmp_path: Path) -> None:
    times = [*range(0, 600, 2), *range(300, 900, 2)]
    recorded = read(tmp_path, HEAD + "".join(f"{time},a,10,5,0.1,0.2\n" for time in times), "a")
    assert kinds(recorded) == {"clock step"}


def test_rows_that_cannot_be_are_left_out_and_named(tmp_path: Path) -> None:
    rows = (
        "0,a,10,5,0.1,0.2\n1,a,x,5,0.1,0.2\n2,a,10,5,0.5,0.2\n3,a,0,5,,\n4,b,10,5,,\n5,a,10,5,,\n"
    )
    recorded = read(tmp_path, HEAD + rows, "a", "c")
    assert kinds(recorded) == {"broken line", "unknown model", "missing metric", "no requests"}
    assert len(recorded.loads["a"]) == 2


def test_a_recording_without_times_or_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no time"):
        read(tmp_path, "prompt_tokens,output_tokens\n1,2\n", "a")


def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    lines = "".join(f"{time},a,10,5,0.1,0.2\n" for time in range(70_000))
    whole = gzip.compress((HEAD + lines).encode())
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(whole[: len(whole) * 3 // 4])
    recorded = read_day([path], ["a"])
    assert kinds(recorded) == {"broken file"}
    assert 30_000 < len(recorded.loads["a"]) < 70_000
    path.write_bytes(b"\x1f\x8bno gzip")
    with pytest.raises(ConfigError, match="no usable request"):
        read_day([path], ["a"])


@pytest.mark.parametrize(
    ("head", "missing"),
    [
        ("t_s;prompt_tokens;output_tokens", "no time"),
        ("t_s,output_tokens", "no prompt length"),
        ("t_s,prompt_tokens,answer", "no output length"),
        ("", "no time"),
    ],
)
def test_a_column_that_is_missing_is_named(tmp_path: Path, head: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        read(tmp_path, f"{head}\n0,1,2\n", "a")


def test_what_a_spreadsheet_saves_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\ufefft_s, prompt_tokens , output_tokens\r\n0,10,5\r\n\r\n9,10,5,\r\n")
    assert len(read_day([path], ["a"]).loads["a"]) == 2


def test_lines_are_told_by_their_numbers_wherever_they_are(tmp_path: Path) -> None:
    # Beyond the first of the pieces in which a file is read, and with a blank line before.
    lines = [f"{time},a,10,5,0.1,0.2\n" for time in range(40_000)]
    lines[20_000] = "\n"
    lines[39_000], lines[39_500] = "39000,a,10,five,,\n", "38000,a,10,5,0.1,0.2\n"
    lines[39_600] = "39600,a,200000000,5,,\n"
    recorded = read(tmp_path, HEAD + "".join(lines), "a")
    told = {each.kind: each.message for each in recorded.findings}
    assert told["broken line"].startswith("line 39002: no output length") or told[
        "broken line"
    ].startswith("line 39002: could not convert")
    assert "line 39602: " in told["broken line"]
    assert told["clock step"].startswith("line 39502: 1499.0 s back")
    assert len(recorded.loads["a"]) == 39_997


def test_a_silence_that_counts_as_idle_is_told(tmp_path: Path) -> None:
    busy = [*range(600), *range(900, 4000)]
    lines = "".join(f"{time},a,10,5,0.1,0.2\n" for time in busy)
    recorded = read(tmp_path, HEAD + lines, "a")
    assert [each.kind for each in recorded.findings] == ["silence"]
    assert recorded.span_s == pytest.approx(3999.2)
    # One model falls silent while another goes on.
    other = "".join(f"{time},b,10,5,0.1,0.2\n" for time in (*range(99), 3000))
    recorded = read(tmp_path, HEAD + lines.replace("900,", "899,") + other, "a", "b")
    assert ("silence", "b") in {(each.kind, each.where) for each in recorded.findings}


def test_a_recording_that_covers_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cover no time"):
        read(tmp_path, "t_s,prompt_tokens,output_tokens\n5,10,5\n", "a")


def test_without_latencies_the_data_sheet_counts(tmp_path: Path) -> None:
    recorded = read(tmp_path, "t_s,prompt_tokens,output_tokens\n0,10,5\n9,10,5\n", "chat")
    cluster, _ = read_cluster(write_day(tmp_path, PlantedDay(PLANTED, 1.0, {}, {}))[0])
    assert not fitted(recorded.loads, cluster.engines)["chat"].is_fitted


def test_an_unknown_model_is_left_out_and_a_broken_list_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    known = "{name: a, model: meta-llama/Llama-3.1-8B-Instruct, gpu: H100-80GB}"
    path.write_text(f"models: [{known}, {{name: b, model: Foo-1B, gpu: H100-80GB}}]\n")
    cluster, findings = read_cluster(path)
    assert list(cluster.engines) == ["a"]
    assert [each.kind for each in findings] == ["unknown model"]
    path.write_text("models: [{name: a, model: Llama-3.1-8B, gpus: H100-80GB}]\n")
    with pytest.raises(ConfigError, match=r"models\.0"):
        read_cluster(path)
    with pytest.raises(ConfigError, match="no plan"):
        read_plan(path, gpu="H100-80GB")


def test_a_plan_says_who_lends_and_names_that_are_unknown_are_told(tmp_path: Path) -> None:
    listed, path = tmp_path / "cluster.json", tmp_path / "plan.json"
    models = {"a": "Llama-3.1-8B", "b": "Llama-3.1-8B", "c": "Foo-1B"}
    entries = [{"name": name, "model": each, "gpu": "H100-80GB"} for name, each in models.items()]
    listed.write_text(json.dumps({"models": entries}))
    fields = Plan.model_fields.items()
    numbers = [name for name, field in fields if field.annotation in {int, float}]
    fixed = {"problem_hash": "", "solver": "", "proven": True, "assignments": [], "unmatched": []}
    matches = [
        {"consumer": "a/1", "producer": producer, "server": "s", "reason": ""}
        | dict.fromkeys(("consumer_shard", "producer_shard", "covered_gb"), 0)
        for producer in ("b/0", "images/0")
    ]
    modes = {"objective": "coverage", "matching": "exact"}
    path.write_text(json.dumps({**dict.fromkeys(numbers, 1), **fixed, **modes, "matches": matches}))
    cluster, findings = read_cluster(listed)
    assert [each.kind for each in findings] == ["unknown model"]
    planned, of_plan = read_plan(path, gpu=None, cluster=cluster)
    assert planned.pairs == (("a", "b"), ("a", "images"))
    assert planned.engines == cluster.engines
    assert [(each.kind, each.where) for each in of_plan] == [("unknown name", f"{path}: images")]
