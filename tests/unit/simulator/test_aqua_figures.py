"""Aqua's bursts: the experiment, and what its outcomes must show."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from jaxtyping import Int64

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS
from aqua_schedulers.cfs import PagingTier, PolicyName
from aqua_simulator.papers import aqua_figures, producer_figures
from aqua_simulator.papers.aqua import (
    NOTICE_S,
    STABLE_SHARE,
    BurstExperiment,
    cached_prefix_run,
    outcomes,
    piecewise_bytes_per_s,
    recorded_lengths,
)
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.figures import FIGURES, reproduce
from aqua_simulator.papers.producer_figures import copying_share, lending
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.iteration import IterationTime

pytestmark = pytest.mark.slow


def chats(
    count: int, generator: np.random.Generator
) -> tuple[Int64[np.ndarray, " count"], Int64[np.ndarray, " count"]]:
    return generator.integers(100, 500, count), generator.integers(20, 300, count)


@pytest.fixture
def burst() -> BurstExperiment:
    return BurstExperiment(
        DECODERS["Llama-3-8B"], GPUS["A100-80GB"], 1, chats, 4000, 32e9, 300e9, length_s=20.0
    )


def test_a_burst_has_its_calm_its_rush_and_its_calm_again(burst: BurstExperiment) -> None:
    times = [each.arrival_s for each in burst.arrivals(2.0, seed=3)]
    start = times[burst.before_count - 1]
    rush = [time for time in times if start < time <= start + burst.length_s]
    assert len(rush) == pytest.approx(2.0 * burst.factor * burst.length_s, rel=0.3)
    assert len(times) == burst.before_count + len(rush) + burst.after_count
    assert burst.arrivals(2.0, seed=3) == burst.arrivals(2.0, seed=3)


def test_the_stable_rate_is_a_share_of_what_is_finished_with_everything_there(
    burst: BurstExperiment,
) -> None:
    rate = burst.stable_rate_per_s()
    assert replace(burst, stable_share=1.0).stable_rate_per_s() == pytest.approx(1.5 * rate)
    crowd = [replace(each, arrival_s=0.0) for each in burst.steady(1.0)]
    served = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE).run(crowd)
    finished_per_s = len(served) / max(row.last_token_s for row in served)
    assert rate == pytest.approx(STABLE_SHARE * finished_per_s)


@pytest.fixture
def benchmark_bursts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/_bursts.py`, which a real vLLM is measured with."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("_bursts")


def test_the_benchmark_of_a_real_engine_draws_the_same_burst(
    burst: BurstExperiment, benchmark_bursts: ModuleType
) -> None:
    theirs = benchmark_bursts
    assert theirs.STABLE_SHARE == STABLE_SHARE
    assert theirs.CALM_COUNT == burst.before_count == burst.after_count
    minute = replace(burst, length_s=60.0)
    assert minute.length_s * theirs.NOTICE == NOTICE_S
    service_s = minute.length_s / theirs.BURST_SERVICE_TIMES
    rate_per_s = 0.5

    def phases(times: list[float]) -> list[int]:
        """How many come in the burst, until redirection, and while requests are redirected."""
        rise_s = times[burst.before_count - 1]
        end_s = rise_s + minute.length_s
        marks = (rise_s, end_s, end_s + NOTICE_S, end_s + NOTICE_S + 40.0)
        return [sum(low < time <= high for time in times) for low, high in pairwise(marks)]

    seeds = range(60)
    ours = [phases([row.arrival_s for row in minute.arrivals(rate_per_s, seed)]) for seed in seeds]
    real = [
        phases([row[0] for row in theirs.paper_burst(rate_per_s, service_s, seed)])
        for seed in seeds
    ]
    assert np.mean(ours, axis=0) == pytest.approx(np.mean(real, axis=0), rel=0.15, abs=1.0)
    assert np.mean(ours, axis=0)[2] < 4.0  # of 20 that would have come


def test_turns_shorten_the_wait_and_links_tell_in_the_time_per_token(
    burst: BurstExperiment,
) -> None:
    slow = replace(burst, dram_bytes_per_s=piecewise_bytes_per_s(burst.dram_bytes_per_s))
    fcfs, dram, peer, _, least_served, ours = outcomes(slow, [1, 2]).values()
    assert fcfs.ttft_max_s > 5 * peer.ttft_max_s
    assert dram.tpot_mean_s > 1.5 * peer.tpot_mean_s
    assert ours.preemption_count < peer.preemption_count / 2
    assert ours.preemption_count < least_served.preemption_count / 3
    assert ours.completion_mean_s < 1.25 * fcfs.completion_mean_s


def test_small_copies_reach_a_small_share_of_a_link() -> None:
    assert piecewise_bytes_per_s(50e9) == pytest.approx(3.07e9, rel=0.01)


def test_a_stored_prefix_is_copied_and_not_computed() -> None:
    time_of = IterationTime("tokens", float, lambda _b: 0.0, lambda _c: 0.0)
    store = PageStore("peer", 0, 100.0, is_overlapped=False)
    engine = Engine(
        "e",
        EngineSettings(64, kv_bytes_per_token=1, steps_in_flight=1),
        time_of,
        PagedMemory(100),
        store,
    )
    (served,) = engine.run([Arrival("a", 0.0, 1010, 1, stored_tokens=1000)])
    # 1,000 tokens at 100 a second, and 10 computed.
    assert served.ttft_s == pytest.approx(20.0)
    assert store.paged_in_tokens == 1000
    assert store.used_tokens == 0


def test_a_hit_waits_for_its_link(burst: BurstExperiment) -> None:
    large = replace(burst, kv_tokens=40_000)
    waits = {}
    for location in (PagingTier.HOST, PagingTier.PEER):
        run = cached_prefix_run(
            large, location, prefix_tokens=20_000, every=5, count=10, rate_per_s=0.2, seed=1
        )
        waits[location] = max(row.ttft_s for row in run if row.prompt_tokens > 20_000)
    copied = 20_000 * burst.model.kv_bytes_per_token
    gap_s = copied / burst.dram_bytes_per_s - copied / burst.peer_bytes_per_s
    assert waits[PagingTier.HOST] - waits[PagingTier.PEER] > 0.9 * gap_s


def test_a_burst_holds_as_many_swapped_tokens_as_its_store_ever_had(
    burst: BurstExperiment,
) -> None:
    line = ("", PolicyName.CFS, PagingTier.PEER)
    (calm,), (full,) = (
        outcomes(replace(burst, factor=factor), [1], [line]).values() for factor in (1.0, 3.0)
    )
    assert full.swap_tokens > calm.swap_tokens >= 0
    assert PageStore("peer", 10, 1.0).peak_tokens == 0


def test_recorded_lengths_are_rows_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "lengths").mkdir()
    path = tmp_path / "lengths" / "arxiv_summarization_small.csv"
    path.write_text("prompt_tokens,output_tokens\n7000,200\n900,40\n")
    prompts, outputs = recorded_lengths(tmp_path, "arxiv")(50, np.random.default_rng(1))
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(7000, 200), (900, 40)}
    with pytest.raises(ConfigError, match=r"no sharegpt\*\.csv"):
        recorded_lengths(tmp_path, "sharegpt")
    path.write_text("prompt_tokens,output_tokens\n7000,many\n")
    with pytest.raises(ConfigError, match="line 2"):
        recorded_lengths(tmp_path, "arxiv")


def test_lent_blocks_are_gone_until_they_are_taken_back() -> None:
    memory = PagedMemory(10)
    assert not memory.lend(11)
    assert memory.lend(4)
    assert (memory.block_count, memory.free_count) == (6, 6)
    memory.take_back(4)
    assert (memory.block_count, memory.free_count) == (10, 10)


def test_copies_slow_a_producer_by_their_share_of_its_bandwidth() -> None:
    gpu = GPUS["H100-80GB"]
    assert lending(gpu, 0.0) == gpu
    rest = lending(gpu, 1.0).hbm_bytes_per_s
    assert 0.7 * gpu.hbm_bytes_per_s < rest < gpu.hbm_bytes_per_s
    assert 0.5 < copying_share(gpu) < 0.7


def test_a_producer_takes_its_memory_back_in_the_burst_and_lends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_figures, "PHASES", ((60.0, 1.0), (30.0, 3.0), (90.0, 1.0)))
    rows = {each.name: each.ours for each in reproduce("aqua-figure12", Experiments()).rows}
    assert 0.0 < rows["taken back after the traffic doubled"] < 30.0
    assert rows["lent again after the traffic fell"] < 90.0
    fast, slow = rows["OPT-30B while memory is lent"], rows["OPT-30B while it is not"]
    assert slow < rows["mean of OPT-30B"] < fast


def test_figure_13_is_whole_without_recorded_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aqua_figures, "SEED_COUNT", 1)
    monkeypatch.setattr(aqua_figures, "SENSITIVITY_SEED_COUNT", 1)
    made = reproduce("aqua-figure13", Experiments())
    rows = {each.name: each for each in made.rows}
    sizes = [rows[f"swap space for {factor} times the stable rate"].ours for factor in (1.5, 2, 3)]
    assert sizes == sorted(sizes)
    advantage = rows["time per output token, CFS over DRAM to over NVLink"]
    assert set(advantage.moved) == {constant.name for constant in made.chosen}
    assert f"{advantage.ours:.2f} x" in made.remarks[0]


def test_aquas_figures_have_names() -> None:
    assert {f"aqua-figure{number}" for number in range(8, 14)} < set(FIGURES)
