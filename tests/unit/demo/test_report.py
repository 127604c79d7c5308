"""The demo's verdict: every claim can fail, and what is shown can be drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aqua_demo.lending.phases import DemoPhase as Phase
from aqua_demo.lending.phases import Observation, goals
from aqua_demo.lending.plot import draw
from aqua_demo.lending.record import RunRecord
from aqua_demo.lending.report import DemoReport, make_report
from aqua_demo.lending.view import picture, summary
from aqua_demo.messages import ConsumerResult, ConsumerSample, ProducerSample, ReclaimMeasure
from aqua_demo.scale import QUICK
from aqua_demo.view import ConsoleView

STARTED_S = 1000.0
PHASES = {
    Phase.START: 0.0,
    Phase.PREFILL: 2.0,
    Phase.HARVEST: 5.0,
    Phase.BURST: 10.0,
    Phase.CALM: 14.0,
    Phase.AGAIN: 16.0,
    Phase.VERIFY: 20.0,
}
RECLAIM = ReclaimMeasure(bytes=400, first_slab_ms=2.5, total_ms=9.0)


def _timeline(**changes: Any) -> RunRecord:  # noqa: ANN401 - any field of the consumer's samples
    """Pages with the peer, from 10 s to 15 s in host memory, and back."""
    timeline = RunRecord(STARTED_S)
    for phase, since_s in PHASES.items():
        timeline.enter(phase, STARTED_S + since_s)
    for tenth in range(200):
        at_s = tenth / 10
        spilled = 10 <= at_s < 15
        timeline.producer.append(
            ProducerSample(
                at_s=STARTED_S + at_s,
                arrivals_per_s=20.0 if 10 <= at_s < 14 else 10.0,
                queue_length=tenth % 3,
                batch=1,
                images=tenth,
                memory_total_bytes=1000,
                memory_used_bytes=100,
                offered_bytes=0 if spilled else 400,
                leased_bytes=0 if spilled else 400,
                reclaims=[RECLAIM] if at_s >= 10 else [],
            )
        )
        if at_s < 4:
            continue
        timeline.consumer.append(
            ConsumerSample(
                at_s=STARTED_S + at_s,
                tokens=max(0, tenth - 50),
                device_bytes=50,
                peer_bytes=0 if spilled else 300,
                host_bytes=300 if spilled else 0,
                paged_out_bytes=300,
                paged_in_bytes=300 * tenth,
                spilled_bytes_peak=300 if at_s >= 10 else 0,
                returned_bytes=1000 if at_s >= 15 else 700,
            ).model_copy(update=changes)
        )
    timeline.close(STARTED_S + 25)
    return timeline


def _result(**changes: Any) -> ConsumerResult:  # noqa: ANN401 - any of its fields
    return ConsumerResult(
        answers=[[5, 6, 7], [8, 9]],
        logits_sha256="same",
        prefill_s=2.0,
        decode_s=4.0,
        peak_resident_bytes=60,
        budget_bytes=64,
        transport="memfd",
        link_bytes_per_s=12.5e9,
    ).model_copy(update=changes)


def _report(
    timeline: RunRecord | None = None,
    harvested: ConsumerResult | None = None,
    compared: ConsumerResult | None = None,
) -> DemoReport:
    return make_report(
        timeline or _timeline(),
        harvested or _result(),
        compared or _result(),
        kv_bytes=350,
        scale="quick",
        seed=0,
        checksum=False,
        prompt_tokens=100,
    )


def _failed(report: DemoReport) -> list[str]:
    assert report.succeeded == all(claim.holds for claim in report.claims)
    return [claim.text for claim in report.claims if not claim.holds]


def test_a_run_that_shows_everything_succeeds() -> None:
    report = _report()
    assert _failed(report) == []
    assert report.tokens == 5
    assert report.tokens_identical
    assert report.returned_bytes == 300, "what had returned before the burst does not count"
    assert report.reclaims == [RECLAIM]
    assert report.link_gb_per_s == 12.5
    assert report.reference_tokens_per_s == 1.0


@pytest.mark.parametrize(
    ("claim", "reason", "parts"),
    [
        (
            "tokens equal",
            "token 1 of answer 1 is 9, and was 4",
            {"compared": _result(answers=[[5, 6, 7], [8, 4]])},
        ),
        ("tokens equal", "[3, 2] tokens", {"compared": _result(answers=[[5, 6, 7]])}),
        ("so do all logits", "digests differ", {"compared": _result(logits_sha256="other")}),
        ("exceeded the budget", "peak 65 B", {"harvested": _result(peak_resident_bytes=65)}),
        ("exceeded the budget", "budget 400 B", {"harvested": _result(budget_bytes=400)}),
        ("paged out and in", "0 B out", {"timeline": _timeline(paged_out_bytes=0)}),
        ("taken back", "0 B spilled", {"timeline": _timeline(spilled_bytes_peak=0)}),
        ("lent again", "0 B returned", {"timeline": _timeline(returned_bytes=7)}),
        ("lent again", "300 B returned", {"timeline": _timeline(peer_bytes=0)}),
    ],
)
def test_a_claim_that_does_not_hold_fails_with_its_figures(
    claim: str, reason: str, parts: dict[str, Any]
) -> None:
    report = _report(**parts)
    assert not report.succeeded
    failed = [entry for entry in report.claims if not entry.holds]
    assert [entry for entry in failed if claim in entry.text and reason in entry.reason], failed


def test_a_further_reclaim_after_the_story_is_no_failure() -> None:
    timeline = _timeline()
    last = timeline.consumer.pop()
    timeline.consumer.append(last.model_copy(update={"peer_bytes": 0}))
    assert _failed(_report(timeline)) == []


def test_a_run_without_a_reclaim_fails() -> None:
    timeline = _timeline()
    last = timeline.producer.pop()
    timeline.producer.append(last.model_copy(update={"reclaims": []}))
    assert "memory was taken back mid-generation" in _failed(_report(timeline))


def test_a_report_survives_its_file() -> None:
    report = _report()
    assert DemoReport.model_validate_json(report.model_dump_json()) == report


def test_rates_are_those_of_the_samples() -> None:
    timeline = _timeline()
    for at_s, rates in (timeline.token_rates(), timeline.image_rates()):
        assert len(at_s) == len(rates)
        assert rates[-1] == pytest.approx(10.0)
    assert timeline.mean_tokens_per_s(timeline.spans[3]) == pytest.approx(10.0)
    assert timeline.mean_tokens_per_s(timeline.spans[6]) is None


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw(_timeline(), path, subtitle="a test")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_live_view_and_the_summary_fit_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    timeline = _timeline()
    for phase in Phase:
        seen = Observation(timeline.producer[-1], timeline.consumer[-1])
        console.print(picture(timeline, goals(phase, seen, QUICK)))
    console.print(picture(RunRecord(STARTED_S), []))
    ConsoleView(console).tell("producer", "offers 400 B", 1.0)
    console.print(summary(_report()))
    text = console.export_text()
    for expected in ("own device", "borrowed", "host memory", "tokens/s", "2.5 ms", "offers 400 B"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 80
