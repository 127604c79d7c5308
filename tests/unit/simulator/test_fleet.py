"""A fleet by events does what its engines do step by step, the fair policy's turns included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from aqua_schedulers.cfs.ranking import LONG_SLICE_FACTOR
from aqua_schedulers.cfs.registry import FairSettings
from aqua_simulator.fleet.fair import LONG_SLICE_STEPS, PATIENCE_SLICES, SLICE_STEPS
from aqua_simulator.fleet.waiting_list import STINT_TOKENS
from aqua_simulator.timing.iteration import Chunk, ScheduledBatch
from aqua_simulator.whatif.cluster import Cluster, DeploymentList, cluster_of
from aqua_simulator.whatif.fleet_day import serve_fleet
from aqua_simulator.whatif.members import ServingTerms
from aqua_simulator.whatif.online import OnlineResult, serve_day
from aqua_simulator.whatif.recorded_day import ModelLoad
from aqua_simulator.whatif.step_times import StepCoefficients

# The first test compiles all kernels where none are cached: half a minute of a processor.
pytestmark = pytest.mark.timeout(1800)

TIMES = StepCoefficients(0.012, 1e-4, 3.1e-7, 1e-9, 0.01, is_fitted=True)
SPAN_S = 24.0


def cluster(chat_tokens: int, docs_tokens: int, *, sharing: int = 1) -> Cluster:
    """Three chats and two documents; of `sharing` 2 and more, all borrow of the same chat."""
    common = {"model": "Llama-3.1-8B", "gpu": "A100-80GB", "server": "a"}
    chats = {"name": "chat", "replicas": 3, "kv_tokens": chat_tokens, **common}
    if sharing > 1:
        # One engine of two GPUs, whose collectives meet the copies.
        chats |= {"replicas": 1, "tp": 2}
    listed = DeploymentList.model_validate(
        {
            "models": [
                chats,
                {"name": "docs", "replicas": 2, "kv_tokens": docs_tokens, **common},
            ],
            "consumers_per_producer": sharing,
            "links": {"peer_gb_per_s": 250, "host_gb_per_s": 25},
            "host_gb": 2,
        }
    )
    return cluster_of(listed, "test")[0]


def load(
    per_s: Sequence[float], prompts: tuple[int, int], outputs: tuple[int, int], seed: int
) -> ModelLoad:
    """One rate after the other, Poisson; lengths uniform."""
    generator = np.random.default_rng(seed)
    phase_s = SPAN_S / len(per_s)
    arrival_s = np.concatenate(
        [
            phase_s * (phase + np.sort(generator.random(generator.poisson(rate * phase_s))))
            for phase, rate in enumerate(per_s)
        ]
    )
    count = len(arrival_s)
    unknown = np.full(count, np.nan)
    lengths = [generator.integers(*each, count) for each in (prompts, outputs)]
    return ModelLoad(arrival_s, lengths[0], lengths[1], unknown, unknown)


LOADS = {
    "chat": load((2.0, 9.0, 1.0), (50, 900), (20, 300), seed=1),
    "docs": load((1.0, 2.0, 0.2), (500, 3000), (50, 300), seed=2),
}


def both(
    where: Cluster, times: StepCoefficients, *, has_aqua: bool
) -> tuple[OnlineResult, OnlineResult]:
    """A day step by step, and by events."""
    known = dict.fromkeys(LOADS, times)
    requests = {name: each.arrivals() for name, each in LOADS.items()}
    terms = ServingTerms(is_harvesting=has_aqua, is_fair=has_aqua, short=("docs",))
    exact = serve_day(where, known, requests, SPAN_S, terms)
    return exact, serve_fleet(where, known, LOADS, SPAN_S, terms)


@pytest.mark.parametrize(
    ("where", "is_fitted", "has_aqua"),
    [
        pytest.param(cluster(2_400, 4_000), False, False, id="memory short, data sheet"),
        pytest.param(
            replace(cluster(40_000, 8_000), interference=None), True, True, id="lent and sliced"
        ),
        pytest.param(
            cluster(40_000, 4_000, sharing=2), True, True, id="lent to two, in contention"
        ),
    ],
)
def test_events_give_what_steps_give(where: Cluster, *, is_fitted: bool, has_aqua: bool) -> None:
    exact, ours = both(where, replace(TIMES, is_fitted=is_fitted), has_aqua=has_aqua)
    assert sum(each["preemption_count"] for each in exact.by_model.values()) > 0
    for name, seen in exact.by_model.items():
        found = ours.by_model[name]
        for key in ("request_count", "preemption_count"):
            assert found[key] == pytest.approx(seen[key], rel=0.02), (name, key)
        for key in (
            "output_tokens_per_s",
            "ttft_mean_s",
            "ttft_p99_s",
            "tpot_mean_s",
            "tpot_p99_s",
            "busy_s",
        ):
            assert found[key] == pytest.approx(seen[key], rel=0.001), (name, key)
            assert found["unfitted"].get(key, 0) == pytest.approx(
                seen["unfitted"].get(key, 0), rel=0.001
            )
    assert ours.producers == exact.producers
    for of in ("offered_gb_s", "used_gb_s", "reclaim_count", "reclaim_s"):
        seen, found = getattr(exact.lending, of), getattr(ours.lending, of)
        assert found == pytest.approx(seen, rel=0.01), of
    assert (exact.lending.offered_gb_s > 0) == has_aqua
    assert ours.links.keys() == exact.links.keys()
    for name, use in exact.links.items():
        assert asdict(ours.links[name]) == pytest.approx(asdict(use), rel=0.01), name


def test_a_fleet_repeats_itself() -> None:
    where, times = cluster(40_000, 8_000), dict.fromkeys(LOADS, TIMES)
    runs = [serve_fleet(where, times, LOADS, SPAN_S, ServingTerms(is_fair=True)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_that_no_engine_holds_is_counted() -> None:
    where, times = cluster(40_000, 160), dict.fromkeys(LOADS, TIMES)
    result = serve_fleet(where, times, LOADS, SPAN_S, ServingTerms())
    assert result.unserved == {"docs": len(LOADS["docs"])}
    assert result.by_model["docs"]["request_count"] == 0


def test_the_constants_of_the_compiled_policy_are_the_policys_defaults() -> None:
    defaults = FairSettings()
    assert defaults.slice_iterations == SLICE_STEPS
    assert defaults.patience_turns == PATIENCE_SLICES
    assert defaults.stint_tokens == STINT_TOKENS
    assert LONG_SLICE_STEPS == SLICE_STEPS * LONG_SLICE_FACTOR


@pytest.mark.parametrize("is_fitted", [True, False])
def test_step_times_in_numbers_are_those_of_the_engine(*, is_fitted: bool) -> None:
    shape = cluster(40_000, 8_000).engines["chat"]
    times = replace(TIMES, is_fitted=is_fitted, speed=1.25)
    law, time_of = times.law(shape), times.iteration_time(shape)
    for batch in (
        ScheduledBatch((), 7, 9000, 7),
        ScheduledBatch((Chunk(512, 1024), Chunk(100, 0)), 3, 700, 4),
        ScheduledBatch((Chunk(2048, 0),), 0, 0, 0),
    ):
        floor_s, token_s = law.floor_s, law.token_s * batch.tokens
        linear_s = (floor_s**law.power + token_s**law.power) ** (1.0 / law.power)
        pairs = sum(each.tokens * (each.context + each.tokens / 2) for each in batch.chunks)
        reads = sum(each.context for each in batch.chunks)
        ours = linear_s + law.context_s * batch.decode_context_tokens
        ours += law.chunk_context_s * reads + law.pair_s * pairs
        ours += law.head_s if batch.sampled_count else 0.0
        assert ours == pytest.approx(time_of(batch), rel=1e-9)
