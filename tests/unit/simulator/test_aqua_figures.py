"""Aqua's bursts: the experiment, and what its outcomes must show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jaxtyping import Int64

from aqua_protocol.decoders import DECODERS
from aqua_protocol.hardware import GPUS
from aqua_schedulers.cfs import PagingTier, PolicyName
from aqua_simulator.papers.aqua import (
    BurstExperiment,
    cached_prefix_run,
    outcomes,
    piecewise_bytes_per_s,
)
from aqua_simulator.papers.figures import FIGURES
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


def test_the_stable_rate_is_the_last_that_meets_the_service_level(burst: BurstExperiment) -> None:
    rate = burst.stable_rate_per_s()

    def wait_s(rate_per_s: float) -> float:
        engine = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE)
        served = engine.run(burst.steady(rate_per_s))
        return float(np.mean([row.scheduled_s - row.arrival_s for row in served]))

    assert wait_s(rate) < burst.stable_wait_s <= wait_s(rate * 1.02)


def test_turns_shorten_the_wait_and_links_tell_in_the_time_per_token(
    burst: BurstExperiment,
) -> None:
    slow = replace(burst, dram_bytes_per_s=piecewise_bytes_per_s(burst.dram_bytes_per_s))
    fcfs, dram, peer, ours = outcomes(slow, [1, 2]).values()
    assert fcfs.ttft_max_s > 5 * peer.ttft_max_s
    assert dram.tpot_mean_s > 1.5 * peer.tpot_mean_s
    assert ours.preemption_count < peer.preemption_count / 2
    (least_served,) = outcomes(
        slow, [1, 2], [("", PolicyName.LEAST_SERVED, PagingTier.PEER)]
    ).values()
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


def test_aquas_figures_have_names() -> None:
    assert {"aqua-figure8", "aqua-figure9", "aqua-figure13"} < set(FIGURES)
