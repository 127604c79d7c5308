"""A recorded day whose savings are known, because it was made with them.

Two models on A100s with step times of their own, which the recording shows only through latencies:
`chat` is busy in some parts of the day and idle in others, `docs` has long prompts and little
memory. The engine that makes the day is the simulator's, with the planted step times; what is
planted beyond them (idle time, spare memory, superfluous engines) follows from the load's shape.
`planted_day` is one such day, `drawn_day` draws step times, rates and lengths by a seed, and
`shaped_day` days of other shapes: calm, in bursts, on and off, of two kinds of model, with long
prompts, nearly full.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import yaml

from aqua_protocol.decoders import DECODERS
from aqua_simulator.serving.engine import Engine, EngineSettings, serve_routed
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch
from aqua_simulator.whatif.cluster import DeploymentList, EngineShape, cluster_of
from aqua_simulator.whatif.jobs import GapJob, OnlineJob, SimulationInput
from aqua_simulator.whatif.members import RESERVE_SHARE
from aqua_simulator.whatif.online import CALM_S
from aqua_simulator.whatif.step_times import StepCoefficients

PLANTED: Final = StepCoefficients(
    step_s=0.031, token_s=0.00021, context_s=3.1e-7, pair_s=6e-9, front_s=0.012, is_fitted=True
)
"""Unlike the data sheet: about three times as slow."""

EPSILON_S: Final = 1e-9
"""Less than any step, more than what sums of steps are off by."""

CHAT_ENGINES: Final = 3
CHAT_TOKENS: Final = 200_000

CLUSTER: Final = """
version: 1
models:
  - {name: chat, model: Llama-3.1-8B, gpu: A100-80GB, replicas: 3, server: a, kv_tokens: 200000,
     slo: {ttft_s: 0.8, tpot_s: 0.06}}
  - {name: docs, model: Llama-3.1-8B, gpu: A100-80GB, replicas: 1, server: a, kv_tokens: 6000,
     slo: {ttft_s: 30, tpot_s: 0.2}}
links: {peer_gb_per_s: 250, host_gb_per_s: 25}
offline: {source: ShareGPT}
gpu_hour: {A100-80GB: 2.0}
"""


TWO_KINDS: Final = CLUSTER.replace(
    "{name: docs, model: Llama-3.1-8B, gpu: A100-80GB, replicas: 1, server: a, kv_tokens: 6000",
    "{name: docs, model: Mistral-7B, gpu: H100-80GB, replicas: 2, server: a, kv_tokens: 20000",
)
"""The same with documents on two engines of another kind."""


def planted_steps(times: StepCoefficients) -> IterationTime:
    """The step times that the recording hides."""

    def attention(batch: ScheduledBatch) -> float:
        pairs = sum(chunk.tokens * (chunk.context + chunk.tokens / 2) for chunk in batch.chunks)
        return times.context_s * batch.decode_context_tokens + times.pair_s * pairs

    return IterationTime(
        "planted",
        lambda tokens: times.token_s * tokens,
        attention,
        lambda _sampled: 0.0,
        times.step_s,
    )


def arrivals_of(
    rates_per_s: Sequence[float],
    phase_s: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    *,
    seed: int,
) -> list[Arrival]:
    """Poisson at one rate after the other; lengths uniform."""
    generator = np.random.default_rng(seed)
    found: list[Arrival] = []
    for phase, rate_per_s in enumerate(rates_per_s):
        times = np.sort(generator.random(generator.poisson(rate_per_s * phase_s))) * phase_s
        for time_s in times:
            found.append(
                Arrival(
                    str(len(found)),
                    float(phase * phase_s + time_s),
                    int(generator.integers(*prompts)),
                    int(generator.integers(*outputs)),
                )
            )
    return found


@dataclass(frozen=True, eq=False)
class PlantedDay:
    """What is known of the day.

    Attributes:
        served: By model, as its users saw it.
        busy_s: Of all engines of a model.
        steps: Of all engines of a model: when each ended, and its tokens.
        gaps: Of all tokens but the first of requests: when each came, and how long after the last.
        times: What was planted; of `chat`, where `docs_times` are others.
        cluster: The deployment list.
    """

    times: StepCoefficients
    span_s: float
    served: dict[str, list[Served]]
    busy_s: dict[str, float]
    steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    gaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    docs_times: StepCoefficients | None = None
    cluster: str = CLUSTER

    @property
    def times_by_model(self) -> dict[str, StepCoefficients]:
        """What was planted of each."""
        return {"chat": self.times, "docs": self.docs_times or self.times}

    @property
    def engine_count(self) -> int:
        """One GPU each."""
        return CHAT_ENGINES + (2 if self.cluster == TWO_KINDS else 1)

    @property
    def idle_gpu_hours(self) -> float:
        """Of all GPUs."""
        return (self.engine_count * self.span_s - sum(self.busy_s.values())) / 3600.0

    @property
    def spare_gb_hours(self) -> float:
        """What as many chat engines as there are of documents, which borrow, may lend.

        They never need what is kept back.
        """
        lenders = self.engine_count - CHAT_ENGINES
        gb = CHAT_TOKENS * DECODERS["Llama-3.1-8B"].kv_bytes_per_token / 1e9
        return lenders * gb * (1.0 - RESERVE_SHARE) * (self.span_s - CALM_S) / 3600.0


def planted_day(*, phase_s: float = 600.0, seed: int = 1) -> PlantedDay:
    """Four phases: quiet, chats, nothing but documents, chats."""
    loads = {
        "chat": arrivals_of((0.05, 0.8, 0.0, 0.5), phase_s, (50, 600), (10, 60), seed=seed),
        "docs": arrivals_of((0.1, 0.05, 0.3, 0.1), phase_s, (500, 3000), (50, 200), seed=seed + 1),
    }
    return _served(loads, PLANTED, 4 * phase_s)


def drawn_day(seed: int, *, phase_s: float) -> PlantedDay:
    """Such a day with step times, order of phases, rates and lengths of its own."""
    generator = np.random.default_rng([seed, 11])
    times = _drawn_times(generator)
    chats = generator.permutation((0.05, 0.8, 0.0, 0.5)) * generator.uniform(0.6, 1.2)
    docs = generator.permutation((0.1, 0.05, 0.3, 0.1)) * generator.uniform(1.0, 1.3)
    prompts, outputs = int(generator.uniform(200, 900)), int(generator.uniform(40, 100))
    loads = {
        "chat": arrivals_of(chats.tolist(), phase_s, (50, prompts), (10, outputs), seed=seed),
        "docs": arrivals_of(docs.tolist(), phase_s, (500, 3000), (50, 200), seed=seed + 1),
    }
    return _served(loads, times, 4 * phase_s)


class DayShape(StrEnum):
    """How a day's requests come, and what they are like."""

    CALM = "calm"
    BURSTY = "bursty"
    ON_OFF = "on and off"
    TWO_KINDS = "two kinds of model"
    LONG_PROMPTS = "long prompts"
    BUSY = "busy"


def shaped_day(shape: DayShape, seed: int, *, span_s: float) -> PlantedDay:
    """A day of that shape with step times, moments and lengths of its own."""
    generator = np.random.default_rng([seed, 77])
    times, others = _drawn_times(generator), _drawn_times(generator)
    prompts, outputs = {"chat": (50, 600), "docs": (500, 3000)}, {"chat": (10, 60)}
    outputs["docs"] = (50, 200)
    # Requests a second of both models, and squared ratio of deviation to mean of what is between.
    rates, variation = (0.5, 0.12), 1.0
    match shape:
        case DayShape.CALM:
            rates = (0.05, 0.03)
        case DayShape.BURSTY:
            variation = generator.uniform(2.0, 4.0) ** 2
        case DayShape.ON_OFF:
            rates, outputs["chat"] = (1.5, 0.3), (20, 200)
        case DayShape.TWO_KINDS:
            rates = (0.6, 0.2)
        case DayShape.LONG_PROMPTS:
            rates, prompts["chat"], outputs["chat"] = (0.25, 0.08), (1000, 8000), (20, 300)
        case DayShape.BUSY:
            rates, outputs["chat"] = (1.2, 0.15), (50, 400)
    loads = {}
    for name, rate_per_s in zip(("chat", "docs"), rates, strict=True):
        gaps_s = generator.gamma(
            1 / variation, variation / rate_per_s, int(3 * rate_per_s * span_s)
        )
        at_s = np.cumsum(gaps_s)
        if shape is DayShape.ON_OFF:
            # 40 seconds of requests, 80 of none, on average.
            is_last = generator.random(len(at_s)) * 40.0 < gaps_s
            at_s += np.cumsum(is_last * generator.exponential(80.0, len(at_s)))
        at_s = at_s[at_s < span_s]
        loads[name] = [
            Arrival(
                str(index),
                float(time_s),
                _length(generator, *prompts[name]),
                _length(generator, *outputs[name]),
            )
            for index, time_s in enumerate(at_s)
        ]
    if shape is DayShape.TWO_KINDS:
        others = replace(others, front_s=times.front_s)
        return _served(loads, times, span_s, docs_times=others, cluster=TWO_KINDS)
    return _served(loads, times, span_s)


def _length(generator: np.random.Generator, low: int, high: int) -> int:
    """Log-normal, mostly between these; a day has no request that no engine could hold."""
    middle, spread = np.log(low * high) / 2, np.log(high / low) / 4
    return int(np.clip(generator.lognormal(middle, spread), 2, 1.5 * high))


def _drawn_times(generator: np.random.Generator) -> StepCoefficients:
    return replace(
        PLANTED,
        step_s=generator.uniform(0.018, 0.045),
        token_s=generator.uniform(1e-4, 3e-4),
        context_s=generator.uniform(1e-7, 5e-7),
        pair_s=generator.uniform(2e-9, 1e-8),
        front_s=generator.uniform(0.0, 0.03),
    )


def _served(
    loads: Mapping[str, list[Arrival]],
    times: StepCoefficients,
    span_s: float,
    *,
    docs_times: StepCoefficients | None = None,
    cluster: str = CLUSTER,
) -> PlantedDay:
    day = PlantedDay(times, span_s, {}, {}, docs_times=docs_times, cluster=cluster)
    for name, shape in _shapes(cluster).items():
        settings = EngineSettings(kv_bytes_per_token=shape.model.kv_bytes_per_token)
        engines = [
            Engine(
                f"{name}-{index}",
                settings,
                planted_steps(day.times_by_model[name]),
                PagedMemory(shape.block_count),
            )
            for index in range(shape.deployed.replicas)
        ]
        logs = [_LoggedTimes.of(engine) for engine in engines]
        day.served[name] = serve_routed(engines, loads[name])
        day.steps[name] = [step for log in logs for step in log.steps]
        day.gaps[name] = [
            gap
            for log in logs
            for row in log.engine.finished
            for gap in _gaps(row, np.array([end_s for end_s, _ in log.steps]))
        ]
        day.busy_s[name] = sum(each.busy_s for each in engines)
    return day


def _shapes(cluster: str) -> dict[str, EngineShape]:
    listed = DeploymentList.model_validate(yaml.safe_load(cluster))
    return cluster_of(listed, "planted")[0].engines


@dataclass(frozen=True)
class _LoggedTimes(IterationTime):
    """An engine's step times, which note when each step ends, and its tokens."""

    engine: Engine = field(kw_only=True)
    steps: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Have an engine go by its step times and note them."""
        known = engine.time_of
        parts = (known.name, known.linear, known.attention, known.head, known.overhead_s)
        engine.time_of = logged = cls(*parts, engine=engine)
        return logged

    def __call__(self, batch: ScheduledBatch) -> float:
        spent_s = super().__call__(batch)
        # It is planned while the step before is under way.
        begin_s = max(self.engine.now_s, self.steps[-1][0] if self.steps else 0.0)
        self.steps.append((begin_s + spent_s, batch.tokens))
        return spent_s


def _gaps(row: Served, ends_s: np.ndarray) -> Iterator[tuple[float, float]]:
    """When the tokens of a request came after its first, and how long after the one before."""
    first, last = np.searchsorted(
        ends_s, [row.first_token_s - EPSILON_S, row.last_token_s + EPSILON_S]
    )
    came_s = ends_s[first:last]
    if len(came_s) != row.output_tokens:  # It was preempted in between: evenly, then.
        came_s = np.linspace(row.first_token_s, row.last_token_s, row.output_tokens)
    return zip(came_s[1:].tolist(), np.diff(came_s).tolist(), strict=True)


def write_day(folder: Path, day: PlantedDay) -> tuple[Path, Path]:
    """The deployment list and the trace."""
    cluster, trace = folder / "cluster.yaml", folder / "trace.csv"
    cluster.write_text(day.cluster)
    rows = sorted(
        ((row.arrival_s, name, row) for name in day.served for row in day.served[name]),
        key=lambda item: item[:2],
    )
    with trace.open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(("t_s", "model", "prompt_tokens", "output_tokens", "ttft_s", "latency_s"))
        for arrival_s, name, row in rows:
            writer.writerow(
                (
                    f"{arrival_s:.4f}",
                    name,
                    row.prompt_tokens,
                    row.output_tokens,
                    f"{row.ttft_s + day.times.front_s:.5f}",
                    f"{row.completion_s + day.times.front_s:.5f}",
                )
            )
    return cluster, trace


BOUNDS: Final = {
    "vllm:time_to_first_token_seconds": (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
    "vllm:inter_token_latency_seconds": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
    "vllm:request_time_per_output_token_seconds": (0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
    "vllm:iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "vllm:request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    "vllm:request_generation_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
}
"""Bounds of vLLM's histograms, as its exporter has them."""


def _samples(day: PlantedDay, name: str, metric: str) -> tuple[list[float], list[float]]:
    """When the engines of a model counted something, and what."""
    rows = day.served[name]
    many, front_s = [row for row in rows if row.output_tokens > 1], day.times.front_s
    match metric:
        case "vllm:time_to_first_token_seconds":
            return [row.first_token_s for row in rows], [row.ttft_s + front_s for row in rows]
        case "vllm:request_prompt_tokens":
            return [row.last_token_s for row in rows], [float(row.prompt_tokens) for row in rows]
        case "vllm:request_generation_tokens":
            return [row.last_token_s for row in rows], [float(row.output_tokens) for row in rows]
        case "vllm:request_time_per_output_token_seconds":
            return [row.last_token_s for row in many], [row.tpot_s for row in many]
        case "vllm:iteration_tokens_total":
            steps = day.steps[name]
            return [at_s for at_s, _ in steps], [float(tokens) for _, tokens in steps]
    return [at_s for at_s, _ in day.gaps[name]], [gap_s for _, gap_s in day.gaps[name]]


def openmetrics(
    day: PlantedDay,
    start_s: float,
    *,
    every_s: float = 15.0,
    reset_s: float | None = None,
    silent_s: tuple[float, float] = (0.0, 0.0),
) -> str:
    """What a Prometheus scraped of the engines, in the text format that promtool backfills from.

    Args:
        start_s: Unix time of the day's start.
        reset_s: When the engines began anew, and their counters with them.
        silent_s: Without scrapes from then to then.
    """
    scrapes = np.arange(0.0, day.span_s + 4 * every_s, every_s)
    kept = (scrapes < silent_s[0]) | (scrapes >= silent_s[1])
    lines = []
    for metric, bounds in BOUNDS.items():
        lines.append(f"# TYPE {metric} histogram")
        for name in day.served:
            times, values = (np.array(each) for each in _samples(day, name, metric))
            order = np.argsort(times)
            times, values = times[order], values[order]

            def counted(weights: np.ndarray, times: np.ndarray = times) -> np.ndarray:
                sums = np.append(0.0, np.cumsum(weights))
                total: np.ndarray = sums[np.searchsorted(times, scrapes, side="right")]
                if reset_s is not None:
                    before = sums[np.searchsorted(times, reset_s, side="right")]
                    total = np.where(scrapes > reset_s, total - before, total)
                return total

            one = np.ones(len(values))
            parts = [
                (f'_bucket{{model_name="{name}",le="{bound:g}"}}', one * (values <= bound))
                for bound in bounds
            ]
            parts += [
                (f'_bucket{{model_name="{name}",le="+Inf"}}', one),
                (f'_sum{{model_name="{name}"}}', values),
                (f'_count{{model_name="{name}"}}', one),
            ]
            for text, weights in parts:
                series = counted(weights)
                lines += [
                    f"{metric}{text} {value:.6f} {start_s + at_s:.3f}"
                    for at_s, value, is_kept in zip(scrapes, series, kept, strict=True)
                    if is_kept
                ]
    return "\n".join([*lines, "# EOF", ""])


class RecoveredShares(NamedTuple):
    """What was found of savings, over what was planted."""

    idle_time: float
    spare_memory: float
    offline_work: float


def recovered(day: PlantedDay, background: SimulationInput) -> RecoveredShares:
    """What simulations of a recorded day, with the step times found in it, bring of its savings.

    Offline work is that of all engines, beside the requests as they were recorded.
    """
    today = OnlineJob(0).run(background).by_model
    idle_s = day.engine_count * day.span_s - sum(each["busy_s"] for each in today.values())
    background = replace(background, short=("docs",), today=today)
    lent = OnlineJob(0, is_harvesting=True).run(background).lending
    planted = replace(background, times=day.times_by_model, blends={})
    return RecoveredShares(
        idle_s / 3600.0 / day.idle_gpu_hours,
        lent.offered_gb_s / 3600.0 / day.spare_gb_hours,
        _offline_tokens_per_s(background) / _offline_tokens_per_s(planted),
    )


def _offline_tokens_per_s(background: SimulationInput) -> float:
    """Of all engines, beside their requests."""
    return sum(
        shape.deployed.replicas * GapJob(0, name).run(background).offline_tokens_per_s
        for name, shape in background.cluster.engines.items()
    )
