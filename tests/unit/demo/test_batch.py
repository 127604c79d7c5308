"""The batch demo's claims and figures, on runs made up for them; no engine runs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from aqua_demo.batch.plot import draw
from aqua_demo.batch.report import (
    DRAINED,
    BatchEvents,
    BatchReport,
    figures_of,
    judge,
    make_report,
)
from aqua_demo.batch.view import picture, summary
from aqua_demo.engines.api_server import flags_of, metric_sums
from aqua_demo.engines.online_load import read_offline_file, write_offline_file
from aqua_demo.engines.race import Run
from aqua_demo.engines.report import PREEMPTIONS, VICTIMS
from aqua_demo.messages import ProducerSample, ReclaimMeasure

Spoil = Callable[[dict[str, Run], BatchEvents], object]
NAMES = [f"offline-{number}" for number in range(4)]


def person(arrival_s: float, first_s: float) -> Run:
    return {
        "arrival_s": arrival_s,
        "prompt_tokens": 2,
        "output_tokens": 3,
        "tokens": [1, 2, 3],
        "token_s": [first_s, first_s + 0.1, first_s + 0.2],
        "end_s": first_s + 0.2,
    }


def run(first_s: float, *progress: tuple[float, int]) -> Run:
    """A run in which people's first tokens come so late, and the batch goes on so."""
    return {
        "online": [person(at_s, at_s + first_s) for at_s in (0.0, 3.0)],
        "seconds": 4.0,
        "offline": [{"name": name, "tokens": [at, at + 1]} for at, name in enumerate(NAMES)],
        "errors": [],
        "status": "completed",
        "progress": [(0.0, 0), *progress],
    }


@pytest.fixture
def runs() -> dict[str, Run]:
    """Order brings a quarter; both engines are twice as fast until one dies."""
    return {
        "stock": run(1.0, (5.0, 2), (10.0, 4)),
        "ordered": run(1.0, (4.0, 2), (8.0, 4)),
        "ours": run(1.5, (2.0, 2), (9.0, 4)),
    }


@pytest.fixture
def done() -> BatchEvents:
    return BatchEvents(
        burst_s=1.0,
        reclaims=[ReclaimMeasure(bytes=1 << 20, first_slab_ms=1.0, total_ms=2.0)],
        reclaimed_s=1.5,
        dispatcher_s=2.5,
        dispatcher_held=2,
        engine_s=3.0,
        engine_held=1,
        counted={DRAINED: 4096.0, PREEMPTIONS: 3.0, VICTIMS: 0.0},
    )


def report(runs: dict[str, Run], done: BatchEvents) -> BatchReport:
    objectives = {"ttft_s": 1.0, "tpot_s": 0.1, "service_s": 2.0}
    return make_report(runs, done, NAMES, objectives=objectives, scale="quick", seed=0, took_s=1.0)


def test_all_claims_hold_of_a_run_that_lost_nothing(
    runs: dict[str, Run], done: BatchEvents
) -> None:
    claims = judge(runs, done, NAMES)
    assert [claim.reason for claim in claims if not claim.holds] == []
    assert len(claims) == 8


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (lambda runs, _: runs["ours"]["offline"].pop(), ["1 are missing"]),
        (
            lambda runs, _: runs["ours"]["offline"].append(runs["ours"]["offline"][0]),
            ["1 came twice"],
        ),
        (lambda runs, _: runs["ours"]["errors"].append({}), ["1 failed"]),
        (
            lambda runs, _: runs["ours"]["offline"][2]["tokens"].append(7),
            ["1 of 4 differ, ['offline-2'] first"],
        ),
        (lambda runs, _: runs["stock"].update(offline=[]), ["4 of 4 differ"]),
        (
            lambda runs, _: runs["ours"]["online"][1]["tokens"].__setitem__(0, 7),
            ["1 differ, 0 are short"],
        ),
        (lambda runs, _: runs["ours"]["online"][1]["tokens"].pop(), ["0 differ, 1 are short"]),
        (lambda _, done: done.reclaims.clear(), ["0 B taken back"]),
        (lambda _, done: done.counted.pop(DRAINED), ["0 B moved"]),
        (lambda _, done: setattr(done, "dispatcher_held", 0), ["it had 0 requests"]),
        (lambda _, done: setattr(done, "engine_held", 0), ["it had 0 requests"]),
        (
            lambda runs, _: runs["ours"].update(status="expired"),
            ["it had 2 requests; the batch is expired", "it had 1 requests"],
        ),
        (lambda _, done: done.counted.update({PREEMPTIONS: 0.0}), ["never wanted"]),
        (lambda _, done: done.counted.update({VICTIMS: 2.0}), ["2 did"]),
    ],
)
def test_what_goes_wrong_fails_its_claims_and_no_other(
    runs: dict[str, Run], done: BatchEvents, spoil: Spoil, reasons: list[str]
) -> None:
    spoil(runs, done)
    failed = [claim.reason for claim in judge(runs, done, NAMES) if not claim.holds]
    assert len(failed) == len(reasons)
    assert all(reason in found for reason, found in zip(reasons, failed, strict=True))


def test_each_figure_compares_runs_that_differ_in_one_thing(
    runs: dict[str, Run], done: BatchEvents
) -> None:
    found = figures_of(runs, done)
    assert found.ttft_p99_ratio == pytest.approx(1.5)
    assert found.control_ttft_p99_ratio == pytest.approx(1.0)
    assert found.order_gain == pytest.approx(10 / 8)
    # Before the first kill there were two answers, which took 2 s instead of 4.
    assert found.undisturbed_answers == 2
    assert found.co_serving_gain == pytest.approx(2.0)
    assert found.co_serving_s == 9.0


def test_a_report_survives_its_file_and_fits_a_terminal_and_a_plot(
    runs: dict[str, Run], done: BatchEvents, tmp_path: Path
) -> None:
    made = report(runs, done)
    assert BatchReport.model_validate_json(made.model_dump_json()) == made
    console = Console(width=100, record=True, file=io.StringIO())
    drawn = picture("a run", online=(1, 2), offline=(3, 4), memory=(0, 1 << 20), dead=["engine"])
    console.print(drawn)
    console.print(summary(made))
    text = console.export_text()
    for expected in ("3 of 4", "engine was killed", "1.25 x", "the first 2 answers 2.00 x"):
        assert expected in text
    moments = [
        ProducerSample(at_s=at_s, offered_bytes=1 << 20, leased_bytes=1 << 19)
        for at_s in (0.0, 9.0)
    ]
    draw(runs, done, moments, tmp_path / "plot.png", subtitle="a test")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_one_topic_begin_alike_and_differ_then(tmp_path: Path) -> None:
    body = {"model": "tiny"}
    write_offline_file(tmp_path / "in.jsonl", 12, 3, 64, topics=3, body=body)
    bodies = [line["body"] for line in read_offline_file(tmp_path / "in.jsonl")]
    assert {tuple(each["prompt"][:32]) for each in bodies[::3]} == {tuple(bodies[0]["prompt"][:32])}
    assert len({tuple(each["prompt"][:32]) for each in bodies}) == 3
    assert len({tuple(each["prompt"]) for each in bodies}) == 12
    assert max(len(each["prompt"]) for each in bodies) == 64
    assert {each["model"] for each in bodies} == {"tiny"}


def test_metrics_are_sums_over_labels() -> None:
    text = '# HELP a of\na{engine="0"} 1.5\na{engine="1"} 2.0\nb 3.0\n\n'
    assert metric_sums(text) == {"a": 3.5, "b": 3.0}


def test_options_are_flags_as_vllm_calls_them() -> None:
    options = {"max_model_len": 8, "enforce_eager": True, "enable_prefix_caching": False}
    expected = ["--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching"]
    assert flags_of(options) == expected
