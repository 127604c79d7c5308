"""The simulations behind an answer, as jobs that run in any order and in several processes.

A job is a value: what to simulate of one common background (`SimulationInput`). Its result depends
on nothing else, so that any number of processes give the same. They are spawned, not forked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aqua_simulator.serving.request import Arrival
from aqua_simulator.whatif.cluster import Cluster
from aqua_simulator.whatif.fleet_day import serve_fleet
from aqua_simulator.whatif.members import Assumptions, ServingTerms
from aqua_simulator.whatif.offline import (
    CoServingSample,
    blended_gain,
    dedicated_tokens_per_s,
    fill_gaps,
)
from aqua_simulator.whatif.online import OnlineResult, serve_day
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad
from aqua_simulator.whatif.step_times import StepCoefficients

SLO_MARGIN: Final = 1.1
"""Of today's 99th percentiles, what counts as the same where a model has no target. Doubled, more
GPUs seem to be too many."""


PROBE_S: Final = 10.0
"""Seconds of a sample that tells what steps with offline work are like. Doubled, nothing changes.
"""


@dataclass(frozen=True, eq=False)
class SimulationInput:
    """What all jobs share.

    Attributes:
        times: Step times, by model.
        short: Models whose memory runs short without Aqua; known after the first simulation.
        today: What the first simulation showed, by model.
        is_exact: Every step is planned by itself, which is slow; else events (`fleet_day`).
        sample_count, sample_s: Of co-serving: pieces of the day, and their seconds.
        blends: What `blended` has found so far, by model and seed; each process has its own.
    """

    cluster: Cluster
    day: RecordedLoad
    times: Mapping[str, StepCoefficients]
    short: tuple[str, ...] = ()
    today: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sample_count: int = 6
    sample_s: float = 60.0
    is_exact: bool = False
    blends: dict[tuple[str, int], tuple[float, list[int]]] = field(default_factory=dict)

    def blended(self, model: str, seed: int) -> tuple[float, list[int]]:
        """Gain and order of the offline pool on an engine alone; found once."""
        key = model, seed
        if key not in self.blends:
            times = self.times[model]
            self.blends[key] = blended_gain(self.cluster, model, times, seed=seed)
        return self.blends[key]

    def load(self, seed: int, model: str) -> ModelLoad | None:
        """A model's requests of a day; None without any."""
        load = self.day.loads.get(model)
        return None if load is None else load.drawn(seed, self.day.span_s)

    def serve(
        self,
        cluster: Cluster,
        seed: int,
        terms: ServingTerms,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> OnlineResult:
        """A day of the online requests of a cluster's models."""
        loads = {
            name: load for name in cluster.engines if (load := self.load(seed, name)) is not None
        }
        span_s, assumed = self.day.span_s, terms.assumed
        if not self.is_exact:
            return serve_fleet(cluster, self.times, loads, span_s, terms, on_progress=on_progress)
        requests: dict[str, list[Arrival]] = {name: [] for name in cluster.engines}
        for name, load in loads.items():
            requests[name] = load.arrivals(load=assumed.load, outputs=assumed.outputs)
        return serve_day(cluster, self.times, requests, span_s, terms)


@dataclass(frozen=True, slots=True)
class OnlineJob:
    """A day of online requests."""

    seed: int
    is_harvesting: bool = False
    is_fair: bool = False
    is_replaced: bool = False
    assumed: Assumptions = field(default_factory=Assumptions)

    def run(
        self,
        background: SimulationInput,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> OnlineResult:
        """Serve it."""
        cluster = on_one_server(background.cluster) if self.is_replaced else background.cluster
        terms = ServingTerms(self.is_harvesting, self.is_fair, background.short, self.assumed)
        return background.serve(cluster, self.seed, terms, on_progress)


@dataclass(frozen=True, slots=True)
class GapJob:
    """Samples of a model's day with offline work in the gaps.

    Attributes:
        deviations: Step times are so many standard errors longer, in what these steps take.
    """

    seed: int
    model: str
    is_peer: bool = False
    is_fair: bool = False
    is_blended: bool = False
    assumed: Assumptions = field(default_factory=Assumptions)
    deviations: float = 0.0

    def run(self, background: SimulationInput) -> CoServingSample:
        """Co-serve them."""
        times = background.times[self.model]
        if not self.deviations:
            return self._filled(background, times, background.sample_count, background.sample_s)
        steps = self._filled(background, times, 1, PROBE_S).counts
        times = times.off_by(self.deviations, steps)
        return self._filled(background, times, background.sample_count, background.sample_s)

    def _filled(
        self,
        background: SimulationInput,
        times: StepCoefficients,
        sample_count: int,
        sample_s: float,
    ) -> CoServingSample:
        """Co-serve so many samples with these step times."""
        order = None
        if self.is_blended:
            _, order = background.blended(self.model, self.seed)
        return fill_gaps(
            background.cluster,
            self.model,
            times,
            background.load(self.seed, self.model),
            background.day.span_s,
            online=background.today.get(self.model, {}),
            is_peer=self.is_peer,
            is_fair=self.is_fair,
            order=order,
            sample_count=sample_count,
            sample_s=sample_s,
            seed=self.seed,
            assumed=self.assumed,
        )


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """An engine with the pool and nothing else: tokens per second, and the gain of its order."""

    seed: int
    model: str

    def run(self, background: SimulationInput) -> tuple[float, float]:
        """Run the pool."""
        times = background.times[self.model]
        gain, _ = background.blended(self.model, self.seed)
        rate = dedicated_tokens_per_s(
            background.cluster, self.model, times, sample_s=background.sample_s, seed=self.seed
        )
        return rate, gain


@dataclass(frozen=True, slots=True)
class CapacityJob:
    """The fewest engines of a model that keep its targets."""

    seed: int
    model: str
    has_aqua: bool

    def run(self, background: SimulationInput) -> int:
        """Halve the span between an engine too few and enough; a target kept is kept by more."""
        enough = background.cluster.engines[self.model].deployed.replicas
        if background.load(self.seed, self.model) is None:
            return enough
        too_few, step = 0, 1
        while enough - too_few > 1:
            # From above in steps that double: mostly few are superfluous.
            count = max(too_few + 1, enough - step) if too_few == 0 else (too_few + enough) // 2
            if self._keeps_targets(background, count):
                enough, step = count, 2 * step
            else:
                too_few = count
        return enough

    def _keeps_targets(self, background: SimulationInput, count: int) -> bool:
        """Whether so many engines do."""
        shape = background.cluster.engines[self.model]
        fewer = replace(shape, deployed=shape.deployed.model_copy(update={"replicas": count}))
        # Without Aqua models do not meet; the one is enough.
        others = background.cluster.engines if self.has_aqua else {}
        cluster = replace(background.cluster, engines={**others, self.model: fewer})
        short = (*background.short, self.model) if self.has_aqua else ()
        terms = ServingTerms(is_harvesting=self.has_aqua, is_fair=self.has_aqua, short=short)
        return keeps_targets(background, self.model, background.serve(cluster, self.seed, terms))


def targets(background: SimulationInput, model: str) -> tuple[float, float]:
    """Promised seconds to the first token and per further token, at the 99th percentile."""
    slo, today = background.cluster.engines[model].deployed.slo, background.today.get(model, {})
    ttft_s = slo.ttft_s or SLO_MARGIN * float(today.get("ttft_p99_s") or 0.0)
    tpot_s = slo.tpot_s or SLO_MARGIN * float(today.get("tpot_p99_s") or 0.0)
    return ttft_s, tpot_s


def keeps_targets(background: SimulationInput, model: str, day: OnlineResult) -> bool:
    """Whether 99 of 100 requests were within both."""
    ttft_s, tpot_s = targets(background, model)
    seen = day.by_model[model]
    # A drawn day may lack requests of a model: there is no latency then, and no target is missed.
    return (
        not day.unserved.get(model)
        and (seen.get("ttft_p99_s") or 0.0) <= ttft_s
        and (seen.get("tpot_p99_s") or 0.0) <= tpot_s
    )


def on_one_server(cluster: Cluster) -> Cluster:
    """The cluster with all consumers beside all producers: what re-placement could give at most."""
    engines = {
        name: replace(shape, deployed=shape.deployed.model_copy(update={"server": ""}))
        for name, shape in cluster.engines.items()
    }
    lenders = [each.model_copy(update={"server": ""}) for each in cluster.listed.lenders]
    listed = cluster.listed.model_copy(update={"lenders": lenders})
    return replace(cluster, listed=listed, engines=engines, pairs=None)


Job = OnlineJob | GapJob | OfflineJob | CapacityJob

_background: SimulationInput | None = None


def _begin(background: SimulationInput) -> None:
    global _background  # noqa: PLW0603 - once in the life of a worker process
    _background = background


def _work(job: Job) -> Any:  # noqa: ANN401 - each job has its own
    assert _background is not None, "the worker was begun"
    return job.run(_background)


def run_all(
    background: SimulationInput,
    jobs: Sequence[Job],
    *,
    processes: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> dict[Job, Any]:
    """Results by job, whatever the number of processes."""
    results: dict[Job, Any] = {}
    if processes == 1 or len(jobs) == 1:
        for job in jobs:
            results[job] = job.run(background)
            on_done(len(results))
        return results
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _begin, (background,)) as pool:
        for job, result in zip(jobs, pool.imap(_work, jobs), strict=True):
            results[job] = result
            on_done(len(results))
    return results
