"""Reports: differences, ranges, Markdown, and reading back what was kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aqua_schedulers.admission import AdmissionPolicy, BatchView, StepPlan
from aqua_simulator.offline.engine import OfflineResult
from aqua_simulator.offline.policies import OfflinePolicy, policy_for
from aqua_simulator.papers import blendserve, blendserve_figures
from aqua_simulator.papers.blendserve import TRACES, Experiments, Trace, gain, grid
from aqua_simulator.papers.figures import FIGURES, published_figures, reproduce
from aqua_simulator.papers.report import FigureRow, FittedConstant, Reproduction, page
from aqua_simulator.workloads.sources import AZURE, BURSTGPT, WILDCHAT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experiments() -> Experiments:
    """A few hundred requests a trace; it remembers its runs, which figures share."""
    return Experiments(request_count=300)


def row(ours: float, name: str = "n", **printed: Any) -> FigureRow:  # noqa: ANN401 - fields
    return FigureRow(name=name, ours=ours, **printed)


@pytest.mark.parametrize(
    ("one", "difference", "text"),
    [
        (row(3.0, published=2.5), 0.5, "2.5"),
        (row(20.0, low=19.0, high=23.0), 0.0, "19 to 23"),
        (row(25.0, low=19.0, high=23.0), 2.0, "19 to 23"),
        (row(18.0, low=19.0, high=23.0), -1.0, "19 to 23"),
        (row(5.0, high=30.0), -25.0, "up to 30"),
        (row(5.0, low=30.0), -25.0, "at least 30"),
        (row(40.0, low=30.0), 10.0, "at least 30"),
        (row(5.0), None, "not printed"),
    ],
)
def test_a_difference_is_to_the_number_to_the_extreme_or_to_the_range(
    one: FigureRow, difference: float | None, text: str
) -> None:
    assert one.difference == difference
    assert one.published_text == text


@pytest.mark.parametrize(
    ("one", "text", "is_missed"),
    [
        # 1.27 x where the paper says up to 1.44 x is a miss, and reads as one.
        (row(1.27, high=1.44), "-0.17 (-11.8%)", True),
        (row(100.0, low=97.0), "+3 (+3.1%)", False),
        (row(88.0, high=30.0), "+58 (+193.3%)", True),
        (row(20.0, low=19.0, high=23.0), "inside", False),
        (row(2.0, published=2.0), "as published", False),
        (row(2.0, low=2.0), "as published", False),
        (row(2.1, published=2.0, fitted=True), "+0.1 (+5.0%), fitted", False),
        (row(2.4, published=2.0, held=True), "+0.4 (+20.0%), held", True),
        (row(0.004, published=0.0, digit=0.01), "+0.004", False),
        (row(0.4, published=0.0, digit=0.01), "+0.4", True),
        (row(7.0), "", False),
        (row(1.0, high=1.05, bound=True), "inside", False),
        (row(1.06, high=1.05, bound=True), "+0.01 (+1.0%)", True),
        (row(106.0, low=95.0, bound=True), "inside", False),
    ],
)
def test_a_miss_reads_as_one(one: FigureRow, text: str, is_missed: bool) -> None:
    assert one.difference_text == text
    assert one.is_missed == is_missed


def test_no_table_of_the_page_shows_a_bare_zero() -> None:
    page = Path(__file__).parents[3] / "docs" / "measurements" / "papers.md"
    cells = [line.split("|")[4].strip() for line in page.read_text().splitlines() if "| " in line]
    assert cells
    assert not {"+0", "-0", "0"} & set(cells)


def test_misses_stand_at_the_head_of_the_page() -> None:
    rows = [row(1.27, "speedup", high=1.44), row(100.0, "sharing", low=97.0), row(3.0, "picture")]
    made = Reproduction(key="key", title="Figure 6: x", source="Source", rows=rows)
    text = page([made], {})
    head = text[: text.index("## Figure 6")]
    assert "1 of 2 printed numbers are off by more than 10%." in head
    assert "| Figure 6 | speedup | up to 1.44 | 1.27 | -0.17 (-11.8%) |" in head
    assert "sharing" not in head


def test_the_page_counts_what_it_has_to_meet() -> None:
    rows = [
        row(2951.0, "scheduler", published=2951.0, held=True),
        row(4000.0, "prefetch", published=3000.0, held=True),
        row(5.0, "tail", published=1.0),
    ]
    made = Reproduction(key="key", title="Figure 8: x", source="Source", rows=rows)
    text = page([made], {})
    assert 'other figures agree with ("held"), 1 are within 10%.' in text
    assert "| Figure 8 | prefetch | 3000 | 4000 | +1e+03 (+33.3%), held |" in text
    assert "held" not in page([made.model_copy(update={"rows": rows[2:]})], {})


def test_chosen_constants_stand_beside_the_number_they_move() -> None:
    made = Reproduction(
        key="key",
        title="Title",
        source="Source",
        rows=[row(20.0, "gain", published=21.0, moved={"alpha": (12.0, 28.2)}), row(1.0, "other")],
        chosen=[FittedConstant(name="alpha", value="0.4", why="It fits.", tried="0.2 to 0.6")],
    )
    text = made.to_markdown()
    assert "- alpha, 0.4: It fits. Tried: 0.2 to 0.6." in text
    assert text.index("- alpha") < text.index("| gain |")
    assert "| gain | 21 | 20 | -1 (-4.8%) |  | 12 to 28.2 (alpha) |" in text
    assert "| other | not printed | 1 |  |  |  |" in text


def test_a_reproduction_reads_back_from_its_json() -> None:
    made = Reproduction(
        key="key",
        title="Title",
        source="Source",
        rows=[row(1.0, "one", published=2.0, unit="%"), row(3.0, "two", low=1.0)],
        surrogates=["a stand-in"],
        sensitivity=[row(4.0, "case")],
        remarks=["why"],
        draw=lambda _figure: None,
    )
    again = Reproduction.model_validate_json(made.model_dump_json())
    assert again.model_dump_json() == made.model_dump_json()
    assert again.to_markdown() == made.to_markdown()
    assert '"difference":-1.0' in made.model_dump_json()


def test_a_page_shows_numbers_surrogates_and_sensitivity() -> None:
    made = Reproduction(
        key="key",
        title="Title",
        source="Source",
        rows=[row(12_345.6, "one", published=2.0, unit="%")],
        surrogates=["a stand-in"],
        sensitivity=[row(4.0, "case", unit="")],
    )
    text = page([made], {"key": "images/key.png"})
    assert "| one | 2 | 12,346 | +1.23e+04 (+617180.0%) | % |" in text
    assert "![Title](images/key.png)" in text
    for words in ("Surrogates:", "- a stand-in", "Sensitivity:", "| case | 4 |"):
        assert words in text


def test_numbers_keep_four_digits() -> None:
    assert [row(value).ours_text for value in (0.012345, 3.14159, 123456.7)] == [
        "0.01235",
        "3.142",
        "123,457",
    ]


def test_the_partition_example_is_within_two_percent_of_the_paper() -> None:
    for one in reproduce("figure5", Experiments()).rows:
        assert one.published is not None
        assert one.ours == pytest.approx(one.published, rel=0.02), one.name


def test_figure_3_tells_compute_bound_from_memory_bound_requests() -> None:
    chat, video, longest = (one.ours for one in reproduce("figure3", Experiments()).rows)
    assert chat > 1.0 > video
    # With short prompts the paper's "beyond 4K" comes out as beyond 6K: said, not hidden.
    assert 1.0 < longest < 1.5


def test_the_grid_has_65_blends() -> None:
    assert len(grid(BURSTGPT)) == 65
    assert len(set(grid(BURSTGPT))) == 65


def test_every_figure_of_the_paper_has_a_name() -> None:
    wanted = {"table3", "figure2", "figure3", *(f"figure{number}" for number in range(5, 13))}
    assert wanted <= set(FIGURES)
    assert list(published_figures()) == list(FIGURES)


def test_what_the_paper_prints_is_found_behind_the_name_of_a_trace(
    experiments: Experiments,
) -> None:
    made = reproduce("figure7", experiments)
    printed = {one.name: (one.low, one.high, one.unit) for one in made.rows}
    assert printed["least of the four traces, blendserve"] == (97.0, None, "%")
    assert printed["greatest of the four traces, random"] == (None, 30.0, "%")
    assert printed["Trace 4, foresight, sharing of the optimum"] == (None, None, "%")


def test_figure_6_moves_what_was_chosen_and_compares_balance(
    experiments: Experiments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blendserve, "INTERFERENCES", (0.2, 0.6))
    monkeypatch.setattr(blendserve, "DENSE_STEPS", (128,))
    made = reproduce("figure6", experiments)
    rows = {one.name: one for one in made.rows}
    mean = rows["mean gain of blendserve over DFS"]
    assert set(mean.moved) == {"interference", "least dense batch"}
    for low, high in mean.moved.values():
        assert low <= mean.ours <= high
    assert set(rows["Trace 2, gain of foresight over DFS"].moved) == {
        constant.name for constant in made.chosen
    }
    speedups = [one.ours for one in made.rows if one.name.endswith("over no overlap")][:-1]
    greatest = rows["greatest speedup of blendserve over no overlap"]
    assert greatest.ours == max(speedups)
    assert (greatest.high, greatest.unit) == (1.44, "x")
    balance = rows["mean speedup of blendserve over Balance on Traces 1 and 2"]
    assert balance.ours == pytest.approx(
        sum(rows[f"Trace {n}, speedup of blendserve over Balance"].ours for n in (1, 2)) / 2
    )


def test_figure_2_tells_chats_from_videos() -> None:
    rows = {one.name: one.ours for one in reproduce("figure2", Experiments()).rows}
    assert all(rows[f"{name}, outputs below 1K"] > 90 for name in ("WildChat", "BurstGPT"))
    assert rows["OpenVid, outputs above 5K"] > 75


def test_a_grid_has_both_policies_and_counts_blends_that_do_not_exist(
    experiments: Experiments, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        Trace("one", 0.9, 0.35, WILDCHAT),
        Trace("none", 1.4, 0.05, WILDCHAT),
    ]
    monkeypatch.setattr(blendserve_figures, "grid", lambda _source: wanted)
    monkeypatch.setattr(blendserve, "INTERFERENCES", (0.2,))
    monkeypatch.setattr(blendserve, "DENSE_STEPS", (128,))
    made = reproduce("figure12", experiments)
    rows = {one.name: one for one in made.rows}
    assert rows["traces"].difference == 1 - 65
    assert {"blendserve, least gain", "foresight, greatest gain"} < set(rows)
    assert rows["blendserve, mean gain over DFS"].moved
    assert any("1 blends do not exist" in remark for remark in made.remarks)


class EachStep:
    """A policy that is asked at each step, whatever it may leave out."""

    calls = 0

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy

    def plan(self, view: BatchView) -> StepPlan:
        EachStep.calls += 1
        return replace(self.policy.plan(view), until_event=False)


def test_a_grid_is_the_same_bit_by_bit_where_a_policy_is_asked_at_each_step(
    experiments: Experiments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with memory so short, and lengths so unknown, that requests are thrown out."""
    plan = experiments.plan
    short = replace(plan, capacity_tokens=plan.capacity_tokens // 3, media_known=False)
    wanted = [
        (trace, policy, settings)
        for trace, settings in ((grid(WILDCHAT)[30], plan), (grid(AZURE)[0], short))
        for policy in (OfflinePolicy.DFS, OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT)
    ]

    def runs() -> list[OfflineResult]:
        fresh = Experiments(request_count=1000)
        return [fresh.run(*each[:2], settings=each[2]).result for each in wanted]

    ours = runs()
    monkeypatch.setattr(blendserve, "policy_for", lambda *given: EachStep(policy_for(*given)))
    stepwise = runs()
    assert EachStep.calls == sum(each.end.step for each in ours)
    for one, other in zip(ours, stepwise, strict=True):
        assert one.end == other.end
        np.testing.assert_array_equal(one.finish_s, other.finish_s)
        np.testing.assert_array_equal(one.usage, other.usage)
    assert any(each.end.retraction_count for each in ours)


def test_blending_beats_depth_first_order_on_a_small_trace_and_is_run_once() -> None:
    told: list[str] = []
    experiments = Experiments(request_count=4000, progress=told.append)
    base = experiments.run(TRACES[1], OfflinePolicy.DFS)
    ours = experiments.run(TRACES[1], OfflinePolicy.FORESIGHT)
    assert gain(ours, base) > 5.0
    assert ours.optimal_share > base.optimal_share
    assert ours.sharing_share > 0.97
    assert experiments.run(TRACES[1], OfflinePolicy.DFS) is base
    assert len(told) == 2


def test_a_plot_is_the_same_bytes_twice(tmp_path: Path) -> None:
    made = reproduce("figure3", Experiments())
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert made.save_plot(one)
    assert made.save_plot(two)
    assert one.read_bytes() == two.read_bytes()
    assert not reproduce("figure5", Experiments()).save_plot(tmp_path / "none.png")
