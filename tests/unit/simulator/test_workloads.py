"""Arrival processes, traces and blends."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import optimal
from aqua_simulator.papers.figures import published_figures
from aqua_simulator.workloads import arrivals
from aqua_simulator.workloads.arrivals import read_trace
from aqua_simulator.workloads.blended import blend_counts, draw
from aqua_simulator.workloads.sources import BURSTGPT, MMLU, OPENVID, SOURCES

COST = StepCost.from_paper(DECODERS["Llama-3-8B"], GPUS["A100-80GB"], interference=0.4)


def test_the_same_seed_gives_the_same_times_and_another_does_not() -> None:
    first = arrivals.gamma(100, rate_per_s=2.0, variation=3.0, seed=7)
    assert np.array_equal(first, arrivals.gamma(100, rate_per_s=2.0, variation=3.0, seed=7))
    assert not np.array_equal(first, arrivals.gamma(100, rate_per_s=2.0, variation=3.0, seed=8))


@pytest.mark.parametrize("variation", [0.2, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    times = arrivals.gamma(50_000, rate_per_s=4.0, variation=variation, seed=1)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08)


def test_nobody_arrives_in_an_off_phase() -> None:
    times = arrivals.on_off(5000, rate_per_s=10.0, on_s=5.0, off_s=3.0, seed=2)
    assert np.all(np.diff(times) >= 0.0)
    assert np.all(times % 8.0 <= 5.0 + 1e-9)


def test_a_burst_multiplies_the_rate_while_it_lasts_and_not_after() -> None:
    times = arrivals.burst(
        60_000, rate_per_s=100.0, factor=3.0, start_s=60.0, length_s=60.0, seed=3
    )
    assert np.all(np.diff(times) >= 0.0)
    counts = [np.count_nonzero((times >= at) & (times < at + 60.0)) for at in (0.0, 60.0, 120.0)]
    assert counts[0] == pytest.approx(6000, rel=0.05)
    assert counts[1] == pytest.approx(18_000, rel=0.05)
    assert counts[2] == pytest.approx(6000, rel=0.05)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_rate_that_is_not_positive_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError):
        arrivals.poisson(10, rate_per_s=bad, seed=0)


def test_traces_are_recognised_by_their_columns(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("t_s,prompt_tokens,output_tokens\n5.0,10,3\n7.5,20,0\n")
    assert [(row.arrival_s, row.output_tokens) for row in read_trace(azure)] == [(0, 3), (2.5, 1)]
    mooncake = tmp_path / "mooncake.csv.gz"
    with gzip.open(mooncake, "wt") as text:
        text.write("t_ms,prompt_tokens,output_tokens,hash_ids\n1000,1030,5,4 5 6\n")
    row = read_trace(mooncake)[0]
    assert (row.prefix, row.prefix_chunk_tokens) == ((4, 5, 6), 512)


def test_lengths_need_times_and_are_repeated_to_fill_them(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n10,3\n20,4\n")
    with pytest.raises(ConfigError, match="no times"):
        read_trace(path)
    rows = read_trace(path, times_s=np.array([0.0, 1.0, 2.0]))
    assert [row.prompt_tokens for row in rows] == [10, 20, 10]
    assert len({row.request_id for row in rows}) == 3


@pytest.mark.parametrize("line", ["5.0,ten,3", "5.0,10", "x,10,3", "5.0,0,3"])
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"t_s,prompt_tokens,output_tokens\n1.0,10,3\n{line}\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_trace(path)


@pytest.mark.parametrize(("density", "sharing"), [(1.4, 0.35), (0.9, 0.05), (1.1, 0.25)])
def test_a_blend_has_the_density_and_the_sharing_asked_for(density: float, sharing: float) -> None:
    counts = blend_counts(
        BURSTGPT, density=density, sharing=sharing, request_count=100_000, cost=COST
    )
    assert sum(count for _, count in counts) == pytest.approx(100_000, abs=2)
    load = draw(counts, seed=5)
    # Some eighty videos make the memory time, and the longest few of them most of it.
    assert optimal(load, COST).density == pytest.approx(density, rel=0.1)
    assert load.optimal_sharing == pytest.approx(sharing, rel=0.03)


def test_a_blend_that_cannot_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no blend of"):
        blend_counts(BURSTGPT, density=1.0, sharing=0.95, request_count=1000, cost=COST)


def test_a_draw_repeats_with_its_seed() -> None:
    counts = [(BURSTGPT, 500), (MMLU, 300), (OPENVID, 5)]
    one, same, other = draw(counts, seed=1), draw(counts, seed=1), draw(counts, seed=2)
    assert np.array_equal(one.output_tokens, same.output_tokens)
    assert np.array_equal(one.tree.parent, same.tree.parent)
    assert np.array_equal(one.tree.edge_tokens, same.tree.edge_tokens)
    assert not np.array_equal(one.output_tokens, other.output_tokens)


def test_only_media_state_their_length() -> None:
    load = draw([(BURSTGPT, 50), (OPENVID, 5)], seed=1)
    assert load.known_output.sum() == 5
    assert (
        load.output_tokens[load.known_output].min() > load.output_tokens[~load.known_output].mean()
    )


@pytest.mark.parametrize("name", ["BurstGPT", "MMLU", "OpenVid", "WildChat", "Azure-Trace"])
def test_single_traces_have_the_properties_of_table_3(name: str) -> None:
    source = SOURCES[name]
    load = draw([(source, 14_042)], seed=1)
    published = published_figures()["table3"].rows
    sharing, density = (
        published[f"{name}, {what}"].published for what in ("prefix sharing", "compute density")
    )
    assert load.optimal_sharing == pytest.approx(sharing, abs=0.02)
    assert optimal(load, COST).density == pytest.approx(density, rel=0.15)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1e308,10,5", "no time in seconds"),
        ("0,99999999999999999999,5", "tokens"),
        ("0,0,5", "line 2: request 0: lengths must be at least 1$"),
    ],
)
def test_a_line_that_no_trace_can_hold_is_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(f"t_s,prompt_tokens,output_tokens\n{line}\n")
    with pytest.raises(ConfigError) as told:
        read_trace(tmp_path / "a.csv")
    assert re.search(words, told.value.message)
