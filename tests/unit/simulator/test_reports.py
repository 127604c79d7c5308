"""Reports: differences, ranges, Markdown, and reading back what was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqua_simulator.offline.policies import DENSE_TOKENS, OfflinePolicy, dense_tokens
from aqua_simulator.papers.blendserve import TRACES, Experiments, gain, grid
from aqua_simulator.papers.blendserve_figures import FIGURES, figure3, figure5
from aqua_simulator.papers.report import Reproduction, Row, page
from aqua_simulator.workloads.sources import BURSTGPT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("row", "difference", "text"),
    [
        (Row("n", 3.0, 2.5), 0.5, "2.5"),
        (Row("n", 20.0, low=19.0, high=23.0), 0.0, "19 to 23"),
        (Row("n", 25.0, low=19.0, high=23.0), 2.0, "19 to 23"),
        (Row("n", 18.0, low=19.0, high=23.0), -1.0, "19 to 23"),
        (Row("n", 5.0, high=30.0), 0.0, "up to 30"),
        (Row("n", 5.0, low=30.0), -25.0, "at least 30"),
        (Row("n", 5.0), None, "not printed"),
    ],
)
def test_a_difference_is_to_the_number_or_to_the_range(
    row: Row, difference: float | None, text: str
) -> None:
    assert row.difference == difference
    assert row.published_text == text


def test_a_reproduction_reads_back_from_its_json() -> None:
    made = Reproduction(
        "key",
        "Title",
        "Source",
        [Row("one", 1.0, 2.0, "%"), Row("two", 3.0, low=1.0)],
        surrogates=["a stand-in"],
        sensitivity=[Row("case", 4.0)],
        remarks=["why"],
    )
    again = Reproduction.from_json(made.to_json())
    assert again.to_json() == made.to_json()
    assert again.to_markdown() == made.to_markdown()


def test_a_page_shows_numbers_surrogates_and_sensitivity() -> None:
    made = Reproduction(
        "key",
        "Title",
        "Source",
        [Row("one", 12_345.6, 2.0, "%")],
        surrogates=["a stand-in"],
        sensitivity=[Row("case", 4.0)],
    )
    text = page([made], {"key": "images/key.png"})
    assert "| one | 2 | 12,346 | +1.23e+04 | % |" in text
    assert "![Title](images/key.png)" in text
    for words in ("Surrogates:", "- a stand-in", "Sensitivity:", "| case | 4 |"):
        assert words in text


def test_numbers_keep_four_digits() -> None:
    assert [Row("n", value).ours_text for value in (0.012345, 3.14159, 123456.7)] == [
        "0.01235",
        "3.142",
        "123,457",
    ]


def test_the_partition_example_is_within_two_percent_of_the_paper() -> None:
    for row in figure5(Experiments()).rows:
        assert row.published is not None
        assert row.ours == pytest.approx(row.published, rel=0.02), row.name


def test_figure_3_tells_compute_bound_from_memory_bound_requests() -> None:
    chat, video, longest = (row.ours for row in figure3(Experiments()).rows)
    assert chat > 1.0 > video
    # With short prompts the paper's "beyond 4K" comes out as beyond 6K: said, not hidden.
    assert 1.0 < longest < 1.5


def test_the_grid_has_65_blends() -> None:
    assert len(grid(BURSTGPT)) == 65
    assert len(set(grid(BURSTGPT))) == 65
    assert {trace.sharing for trace in grid(BURSTGPT, every=3)} == {0.05, 0.25, 0.45}


def test_every_figure_of_the_paper_has_a_name() -> None:
    wanted = {"table3", "figure3", *(f"figure{number}" for number in range(5, 13))}
    assert wanted <= set(FIGURES)


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
    made = figure3(Experiments())
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert made.save_plot(one)
    assert made.save_plot(two)
    assert one.read_bytes() == two.read_bytes()
    assert not figure5(Experiments()).save_plot(tmp_path / "none.png")


def test_dense_steps_are_whole_tiles_at_the_wanted_efficiency() -> None:
    linear = {"floor_s": 9.09e-3, "s_per_token": 67.7e-6, "exponent": 1.28}
    assert dense_tokens(**linear) == DENSE_TOKENS == 384
    assert [dense_tokens(**linear, efficiency=share) for share in (0.7, 0.76, 0.83, 0.9)] == [
        256,
        384,
        384,
        640,
    ]
