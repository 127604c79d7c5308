"""ConServe's figures: the experiment, its loads, and what a verdict on ours must say."""

from __future__ import annotations

import numpy as np
import pytest

from aqua_protocol.errors import ConfigError
from aqua_schedulers.conserve import Objectives, ServiceClass
from aqua_simulator.co_serving.job import CoServingRun, StepRecord
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.conserve import (
    CHECKPOINTS,
    CONSERVE,
    FIXED_LENGTHS,
    GUARDED,
    MAX_CONTEXT_TOKENS,
    ONLINE_ONLY,
    PRIORITIES,
    SCHEDULER,
    SHAPE_BY_MINUTE,
    CoServingExperiment,
    fixed_lengths,
    highest_rate,
    trace,
)
from aqua_simulator.papers.conserve_beyond import FRESH, LoadVerdict, TrialLoad, headline
from aqua_simulator.papers.conserve_beyond import judged as judgement
from aqua_simulator.papers.conserve_figures import READINGS
from aqua_simulator.papers.figures import FIGURES, PAPERS, named, published_figures, reproduce
from aqua_simulator.papers.report import FigureRow
from aqua_simulator.workloads.arrivals import gamma

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def setup() -> CoServingExperiment:
    return CoServingExperiment(offline=FIXED_LENGTHS)


def test_the_policies_profile_is_close_to_the_clock(setup: CoServingExperiment) -> None:
    assert setup.profile.relative_error < 0.05
    assert setup.profile.max_tokens >= setup.max_tokens


def test_the_machine_has_the_memory_that_is_left_beside_the_weights(
    setup: CoServingExperiment,
) -> None:
    assert 40_000 < 16 * setup.block_count < 50_000


def test_a_trace_follows_the_minutes_that_are_asked_for(setup: CoServingExperiment) -> None:
    calm, burst = 6, 10
    arrivals = trace(setup, 10.0, (calm, burst))
    first = sum(each.arrival_s < 60.0 for each in arrivals)
    for count, minute in ((first, calm), (len(arrivals) - first, burst)):
        mean = 600.0 * SHAPE_BY_MINUTE[minute]
        assert abs(count - mean) < 4.0 * np.sqrt(mean)
    assert max(each.prompt_tokens + each.output_tokens for each in arrivals) <= MAX_CONTEXT_TOKENS
    assert trace(setup, 10.0, (calm, burst)) == arrivals


def test_the_highest_rate_keeps_to_the_objectives_and_a_higher_one_does_not(
    setup: CoServingExperiment,
) -> None:
    def load(rate: float) -> list[float]:
        return [index / rate for index in range(int(20 * rate))]

    found = highest_rate(setup, lambda rate: fixed_lengths(load(rate)))

    def is_kept(rate: float) -> bool:
        run = setup.run(ONLINE_ONLY, fixed_lengths(load(rate)), 0.0)
        goal = setup.objectives
        return run.ttft_p99_s <= goal.ttft_s and run.tpot_p99_s <= goal.tpot_s

    assert is_kept(found)
    assert not is_kept(1.1 * found)


def test_each_mechanism_brings_what_figure_8_says_of_it(setup: CoServingExperiment) -> None:
    arrivals = fixed_lengths(gamma(60, rate_per_s=2.0, variation=1.0, seed=5))
    until_s = arrivals[-1].arrival_s
    lines = (PRIORITIES, SCHEDULER, CHECKPOINTS, CONSERVE, GUARDED)
    stock, scheduler, checkpoints, paper, ours = (
        setup.run(line, arrivals, until_s) for line in lines
    )
    alone = setup.run(ONLINE_ONLY, arrivals, until_s)
    assert stock.ttft_p99_s > 2.0 * paper.ttft_p99_s
    assert paper.tpot_p99_s <= 1.05 * setup.objectives.tpot_s
    assert ours.tpot_p99_s <= 1.02 * alone.tpot_p99_s
    offline = [
        run.tokens_per_s(0.0, until_s, ServiceClass.OFFLINE)
        for run in (scheduler, checkpoints, paper)
    ]
    assert offline == sorted(offline)
    assert alone.tokens_per_s(0.0, until_s, ServiceClass.OFFLINE) == 0.0


def test_a_run_counts_tokens_and_busy_time_within_an_interval() -> None:
    run = CoServingRun(steps=[StepRecord(0.0, 1.0, 10, 0), StepRecord(3.0, 5.0, 4, 6)])
    assert run.tokens_per_s(0.0, 5.0) == 4.0
    assert run.tokens_per_s(1.0, 5.0, ServiceClass.OFFLINE) == 1.5
    assert run.busy_share(0.5, 4.5) == pytest.approx(0.5)
    starts, rates = run.series(2.0, ServiceClass.ONLINE)
    assert starts.tolist() == [0.0, 2.0, 4.0]
    assert rates.tolist() == [5.0, 0.0, 2.0]


def test_safepoints_stop_a_step_and_the_figure_says_how_its_readings_were_chosen() -> None:
    made = reproduce("conserve-safepoints", Experiments())
    ours = {row.name: row.ours for row in made.rows}
    # A safepoint after each layer, one more passes: two layers of 32.
    assert ours["ours, abort within, longest"] < ours["ours, mean offline step"] / 4
    assert ours["ours, most aborts by one online request"] == 1.0
    assert READINGS in made.source


def test_every_figure_of_conserve_states_its_readings() -> None:
    printed = published_figures()
    for key in set(PAPERS["conserve"]) - {"conserve-beyond"}:
        assert "{readings}" in printed[key].source


def test_each_throughput_that_conserve_prints_is_held_or_its_figure_says_why_not() -> None:
    held = set()
    for key in PAPERS["conserve"]:
        figure = published_figures()[key]
        reasons = " ".join(text for text in figure.remarks if text.startswith("Not held: "))
        for name, row in figure.rows.items():
            unit = figure.unit if row.unit is None else row.unit
            number = FigureRow(name=name, ours=0.0, **row.model_dump()).published_text
            is_printed = number != "not printed" and not row.bound
            if row.held:
                held.add(number)
            elif is_printed and (
                unit == "tokens/s"
                or any(word in name for word in ("throughput", "gain", "overall"))
            ):
                assert number in reasons, (key, name)
    assert held == {"5868", "2951", "3364", "3818"}


def test_tails_in_a_sensitivity_have_the_unit_of_times() -> None:
    burst, ablation = (published_figures()[f"conserve-figure{number}"] for number in (7, 8))
    names = (
        "no host time: CV 2, TTFT p99 of ConServe to ideal",
        "no host time: CV 2, TTFT p99 of vLLM++",
        "no host time: CV 2, offline throughput of ConServe to vLLM++",
    )
    assert [burst.unit_of_case(name) for name in names] == ["x", "ms", "%"]
    assert ablation.unit_of_case("no host time: scheduler, TTFT p99") == "ms"
    assert ablation.unit_of_case("no host time: scheduler, offline throughput") == "tokens/s"


def test_figures_are_named_one_by_one_or_by_their_paper() -> None:
    assert named(["conserve"]) == [key for key in FIGURES if key.startswith("conserve-")]
    assert named(["conserve-figure8", "conserve", "conserve"])[0] == "conserve-figure8"
    assert named(["aqua", "conserve", "blendserve", "all"]) != named(["all"])
    assert sorted(named(["aqua", "conserve", "blendserve"])) == sorted(FIGURES)
    with pytest.raises(ConfigError, match="figure99") as caught:
        named(["figure99"])
    assert "blendserve, aqua, conserve, " in str(caught.value.remedy)


def test_ours_is_judged_on_loads_that_no_setting_was_chosen_on() -> None:
    chosen_on = {(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, 2.0)}
    assert not {(load.rate_per_s, load.variation) for load in FRESH.values()} & chosen_on
    assert len(FRESH) >= 5


def test_a_verdict_compares_with_engines_of_their_own() -> None:
    one = judgement(TrialLoad(3.0, on_s=5.0, off_s=15.0), seed=3, count=40)
    assert one.ttft_ratio == pytest.approx(1.0, abs=0.05)
    assert one.tpot_ratio < 1.02
    assert one.offline_share is not None
    assert one.offline_share > 0.9


def test_time_that_is_not_left_is_no_measure() -> None:
    steady = TrialLoad(4.0, 0.1)
    assert judgement(steady, seed=3, count=40).offline_share is None


def test_the_headline_is_the_median_and_the_worst_load() -> None:
    verdicts = [
        LoadVerdict(1.0, 1.01, 100.0, 0.99),
        LoadVerdict(1.2, 1.00, 300.0, None),
        LoadVerdict(0.9, 1.05, 200.0, 0.90),
    ]
    values = headline(verdicts)
    assert values["median load, TTFT p99 to Online-Only"] == 1.0
    assert values["worst load, TTFT p99 to Online-Only"] == 1.2
    assert values["worst load, TPOT p99 to Online-Only"] == 1.05
    assert values["worst load, offline to the time left"] == 90.0


def test_the_settings_of_a_case_reach_its_engine() -> None:
    engine = CoServingExperiment(safepoint_layers=16, objectives=Objectives(1.0, 0.1)).engine(
        CONSERVE
    )
    assert engine.spec.safepoint_layers == 16
