"""Offline work on the cluster: in the gaps of online engines, and on a GPU of its own.

Co-serving runs the engine of `co_serving` on a sample of the day's times, some of each model's
engines in turn: full steps fill every gap, so that a whole day would take as long as the day has
steps. What it brings is compared with online requests alone on the same sample, and with what a GPU
of its own would do with the same work.

Blended batches order the pool: requests come in as BlendServe's policy would admit them on an
engine of their own. A stock engine overlaps nothing (`interference` 1), so the gain is that of
density and shared prefixes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import isnan
from types import MappingProxyType
from typing import Final

import numpy as np

from aqua_protocol.errors import ConfigError
from aqua_schedulers.admission import AdmissionPolicy, BatchView, StepPlan
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_schedulers.cfs import PolicyName, policy_named
from aqua_schedulers.conserve import (
    ConserveSettings,
    CoServingPolicyName,
    Objectives,
    ServiceClass,
    co_serving_policy,
    fitted_profile,
)
from aqua_simulator.co_serving.engine import CoServingEngine
from aqua_simulator.co_serving.job import CoServingRun
from aqua_simulator.co_serving.spec import CoServingEngineSpec
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import OfflineResult, run
from aqua_simulator.offline.policies import OfflinePolicy, PlanSettings, policy_for
from aqua_simulator.offline.workload import OfflineWorkload
from aqua_simulator.papers.conserve import EVENT_S, steps_of
from aqua_simulator.serving.request import Arrival
from aqua_simulator.serving.setup import BLOCK_TOKENS
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch
from aqua_simulator.whatif.cluster import Cluster, OfflineWork
from aqua_simulator.whatif.members import Assumptions
from aqua_simulator.whatif.recorded_day import ModelLoad
from aqua_simulator.whatif.step_times import StepCoefficients, sheet_coefficients
from aqua_simulator.workloads.arrivals import read_lengths
from aqua_simulator.workloads.blended import draw
from aqua_simulator.workloads.sources import CO_SERVED, SOURCES

POOL_REQUESTS: Final = 400
"""Of a pool that is ordered, and begun again at its end. Doubled, the order has more to choose from
and takes twice as long to find."""

WARM_S: Final = 30.0
"""Seconds before a sample that are simulated and not counted: requests are inside, and the first
rush of offline prompts is over. Doubled, samples are closer to the middle of a day."""

SLACK: Final = 1.2
"""Of the latencies without offline work, what the objectives of co-serving allow where a model has
no target; ConServe's setting of objectives. Doubled, more offline work fits and users wait more."""


@dataclass(frozen=True, slots=True)
class CoServingSample:
    """What co-serving did on a model's engines, over their samples.

    Attributes:
        offline_tokens_per_s: Of one engine, prompts and answers.
        busy_share, online_busy_share: With offline work, and without.
        ttft_ratio, tpot_ratio: Mean latencies of online requests to those without; 1 for none.
        counts: Steps, tokens, contexts and token pairs of all steps with offline work.
    """

    offline_tokens_per_s: float
    busy_share: float
    online_busy_share: float
    ttft_ratio: float
    tpot_ratio: float
    counts: tuple[float, ...] = ()


def pool_of(work: OfflineWork, *, longest: int, seed: int) -> OfflineWorkload:
    """A pool of the offline work, cut to what the engine can hold.

    Raises:
        ConfigError: No such source or file.
    """
    generator = np.random.default_rng([seed, 5])
    if work.lengths is not None:
        rows = read_lengths(work.lengths)
        rows = rows[generator.integers(0, len(rows), POOL_REQUESTS)]
        alone, prompts = np.full(len(rows), -1), np.minimum(rows[:, 0], longest // 2)
        return OfflineWorkload(
            PrefixTree.from_segments(alone, prompts, np.arange(len(rows))),
            output_tokens=np.minimum(rows[:, 1], longest // 2),
            known_output=np.zeros(len(rows), dtype=bool),
        )
    known = {**SOURCES, **CO_SERVED}
    if work.source not in known:
        raise ConfigError(
            f"no offline source named {work.source!r}", remedy=f"Known: {', '.join(known)}."
        )
    drawn = draw([(known[work.source], POOL_REQUESTS)], seed=seed + 1)
    return replace(
        drawn,
        tree=replace(drawn.tree, edge_tokens=np.minimum(drawn.tree.edge_tokens, longest // 4)),
        output_tokens=np.minimum(drawn.output_tokens, longest // 4),
    )


class _Admissions:
    """A policy that notes in which order it admits."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self.order: dict[int, None] = {}

    def plan(self, view: BatchView) -> StepPlan:
        """The policy's plan."""
        plan = self._policy.plan(view)
        self.order.update(dict.fromkeys(np.asarray(plan.admit).tolist()))
        return plan


def ordered(
    workload: OfflineWorkload, name: OfflinePolicy, cost: StepCost, *, capacity_tokens: int
) -> tuple[OfflineResult, list[int]]:
    """Run a pool on an engine of its own; also the order of its admissions."""
    policy = policy_for(name, workload, cost, PlanSettings(capacity_tokens, max_step_tokens=2048))
    noted = _Admissions(policy)
    result = run(workload, noted, cost, capacity_tokens=capacity_tokens)
    return result, list(noted.order)


def blended_gain(
    cluster: Cluster, name: str, coefficients: StepCoefficients, *, seed: int
) -> tuple[float, list[int]]:
    """Throughput of the blended order to that of arrivals on an engine alone, and the order.

    Where a fit found a token or its context to cost nothing, because no recorded step shows it, the
    data sheet tells what it costs: requests differ in what they take of both.
    """
    shape = cluster.engines[name]
    capacity = shape.block_count * BLOCK_TOKENS
    sheet = sheet_coefficients(shape)
    known = coefficients if coefficients.is_fitted else sheet
    cost = StepCost(
        known.token_s or sheet.token_s,
        known.pair_s / 2.0,
        known.context_s or sheet.context_s,
        interference=1.0,
        overhead_s=known.step_s,
    )
    workload = pool_of(cluster.listed.offline, longest=capacity, seed=seed)
    plain, _ = ordered(workload, OfflinePolicy.FCFS, cost, capacity_tokens=capacity)
    blended, order = ordered(workload, OfflinePolicy.FORESIGHT, cost, capacity_tokens=capacity)
    return plain.makespan_s / blended.makespan_s, order


def _endless(workload: OfflineWorkload, order: Sequence[int]) -> Iterator[Arrival]:
    """The pool in that order, again and again."""
    prompts, outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
    for round_ in count():
        for index in order:
            yield Arrival(f"offline-{round_}-{index}", 0.0, prompts[index], outputs[index])


def fill_gaps(  # noqa: PLR0913 - a question is that wide
    cluster: Cluster,
    name: str,
    coefficients: StepCoefficients,
    load: ModelLoad | None,
    span_s: float,
    *,
    online: Mapping[str, float],
    is_peer: bool,
    is_fair: bool,
    order: Sequence[int] | None,
    sample_count: int,
    sample_s: float,
    seed: int,
    assumed: Assumptions = Assumptions(),  # noqa: B008 - frozen
) -> CoServingSample:
    """Co-serve the samples of a model's day.

    Args:
        load: Its online requests; None for none.
        online: Latencies without offline work, by the names of `serving.request.summary`.
        is_peer: Checkpoints go to a peer, else to the host.
        order: Of the pool; None as it comes.
    """
    span_s /= assumed.load
    shape = cluster.engines[name]
    replicas = shape.deployed.replicas
    longest = assumed.block_count(shape) * BLOCK_TOKENS
    length_s = min(sample_s, span_s)
    # One in each of as many equal parts of the day, at the same place in each.
    part_s = span_s / sample_count
    offset = np.random.default_rng([seed, 6]).random() * max(0.0, part_s - length_s)
    starts = [index * part_s + offset for index in range(sample_count)]
    if sample_count * length_s >= span_s:
        starts, length_s = [0.0], span_s
    engine = partial(
        _engine,
        cluster,
        name,
        coefficients,
        online=online,
        is_peer=is_peer,
        is_fair=is_fair,
        order=order,
        seed=seed,
        assumed=assumed,
    )
    counts = np.zeros(4)
    both: list[tuple[CoServingRun, float]] = []
    alone: list[tuple[CoServingRun, float]] = []
    for index, start_s in enumerate(starts):
        begin_s = max(0.0, start_s - WARM_S)
        warm_s = start_s - begin_s
        mine: list[Arrival] = []
        if load is not None:
            rows = np.arange(index % replicas, len(load), replicas)
            times_s = load.arrival_s[rows] / assumed.load
            rows = rows[(begin_s <= times_s) & (times_s < start_s + length_s)]
            mine = [
                replace(each, arrival_s=each.arrival_s - begin_s)
                for each in load.arrivals(rows, load=assumed.load, outputs=assumed.outputs)
                # No engine could ever hold the others; an answer names how many there are.
                if each.prompt_tokens + each.output_tokens <= longest
            ]
        for has_offline, runs in ((True, both), (False, alone)):
            counted = counts if has_offline else None
            serving = engine(has_offline=has_offline, counts=counted)
            runs.append((serving.run(mine, warm_s + length_s), warm_s))

    def mean(runs: Sequence[tuple[CoServingRun, float]], of: str) -> float:
        rows = [
            getattr(row, of)
            for each, warm_s in runs
            for row in each.served
            if row.arrival_s >= warm_s
        ]
        known = [value for value in rows if not isnan(value)]
        return float(np.mean(known)) if known else 0.0

    def busy(runs: Sequence[tuple[CoServingRun, float]]) -> float:
        return float(np.mean([each.busy_share(warm, warm + length_s) for each, warm in runs]))

    tokens = [each.tokens_per_s(warm, warm + length_s, ServiceClass.OFFLINE) for each, warm in both]
    ttft, tpot = (
        mean(both, of) / mean(alone, of) if mean(alone, of) else 1.0 for of in ("ttft_s", "tpot_s")
    )
    return CoServingSample(
        float(np.mean(tokens)), busy(both), busy(alone), ttft, tpot, tuple(counts.tolist())
    )


def dedicated_tokens_per_s(
    cluster: Cluster, name: str, coefficients: StepCoefficients, *, sample_s: float, seed: int
) -> float:
    """What an engine of that kind does with the pool and nothing else, in plain order.

    Over as long as the samples last: both begin with an empty engine.
    """
    engine = _engine(cluster, name, coefficients, seed=seed)
    found = engine.run((), WARM_S + sample_s)
    return found.tokens_per_s(WARM_S, WARM_S + sample_s, ServiceClass.OFFLINE)


def _engine(  # noqa: PLR0913 - private
    cluster: Cluster,
    name: str,
    coefficients: StepCoefficients,
    *,
    seed: int,
    online: Mapping[str, float] = MappingProxyType({}),
    is_peer: bool = False,
    is_fair: bool = False,
    order: Sequence[int] | None = None,
    has_offline: bool = True,
    counts: np.ndarray | None = None,
    assumed: Assumptions = Assumptions(),  # noqa: B008 - frozen
) -> CoServingEngine:
    """An engine with the pool; adds steps, tokens, contexts and pairs to `counts`."""
    shape = cluster.engines[name]
    deployed, model = shape.deployed, shape.model
    blocks = assumed.block_count(shape)
    times = replace(coefficients, speed=coefficients.speed * assumed.speed)
    time_of = times.iteration_time(shape)
    rate = cluster.link_bytes_per_s(name, is_peer=is_peer) * deployed.tp * assumed.link
    spec = CoServingEngineSpec(
        block_count=blocks,
        kv_bytes_per_token=model.kv_bytes_per_token,
        layer_count=model.layer_count,
        link_bytes_per_s=rate,
        swap_bytes_per_s=rate,
        hbm_bytes_per_s=shape.gpu.hbm_bytes_per_s * deployed.tp,
        store_blocks=int(cluster.listed.host_gb * 1e9 // (BLOCK_TOKENS * model.kv_bytes_per_token)),
        max_tokens=deployed.max_num_batched_tokens,
        max_running=deployed.max_num_seqs,
        safepoint_layers=1,
        safepoint_s=EVENT_S,
        safepoint_lag=1,
    )
    target = deployed.slo
    objectives = Objectives(
        target.ttft_s or SLACK * max(online.get("ttft_p99_s") or 0.0, 0.1),
        target.tpot_s or SLACK * max(online.get("tpot_p99_s") or 0.0, 0.01),
    )
    profile = fitted_profile(
        steps_of(time_of), model=model.name, engine="simulated", gpu=shape.gpu.name
    )
    pool: Iterator[Arrival] = iter(())
    if has_offline:
        workload = pool_of(cluster.listed.offline, longest=blocks * BLOCK_TOKENS, seed=seed)
        pool = _endless(workload, order or range(workload.request_count))
    return CoServingEngine(
        spec,
        time_of if counts is None else _counting(time_of, counts),
        co_serving_policy(
            CoServingPolicyName.best(),
            objectives,
            profile,
            ConserveSettings(safepoints=model.layer_count),
        ),
        pool,
        policy_named(PolicyName.best() if is_fair else PolicyName.FCFS),
    )


def _counting(time_of: IterationTime, counts: np.ndarray) -> IterationTime:
    """The step times, which add up what the steps have."""

    def attention(batch: ScheduledBatch) -> float:
        counts[:] += 1.0, batch.tokens, batch.decode_context_tokens, batch.token_pairs
        return time_of.attention(batch)

    return replace(time_of, attention=attention)
