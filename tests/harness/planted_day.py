"""A recorded day whose savings are known, because it was made with them.

Two models on A100s with step times of their own, which the recording shows only through latencies:
`chat` is busy in some parts of the day and idle in others, `docs` has long prompts and little
memory. The engine that makes the day is the simulator's, with the planted step times; what is
planted beyond them (idle time, spare memory, superfluous engines) follows from the load's shape.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from aqua_protocol.decoders import DECODERS
from aqua_simulator.serving.engine import Engine, EngineSettings, serve_routed
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch

STEP_S: Final = 0.031
TOKEN_S: Final = 0.00021
CONTEXT_S: Final = 3.1e-7
FRONT_S: Final = 0.012
"""Planted, and unlike the data sheet: about three times as slow."""

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


def planted_steps(speed: float = 1.0) -> IterationTime:
    """The step times that the recording hides."""

    def attention(batch: ScheduledBatch) -> float:
        return CONTEXT_S * batch.decode_context_tokens / speed

    return IterationTime(
        "planted",
        lambda tokens: TOKEN_S * tokens / speed,
        attention,
        lambda _sampled: 0.0,
        STEP_S / speed,
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
    """

    span_s: float
    served: dict[str, list[Served]]
    busy_s: dict[str, float]

    @property
    def idle_gpu_hours(self) -> float:
        """Of the four GPUs."""
        return (4 * self.span_s - sum(self.busy_s.values())) / 3600.0


def planted_day(*, phase_s: float = 600.0, seed: int = 1) -> PlantedDay:
    """Four phases: quiet, chats, nothing but documents, chats."""
    loads = {
        "chat": arrivals_of((0.05, 0.8, 0.0, 0.5), phase_s, (50, 600), (10, 60), seed=seed),
        "docs": arrivals_of((0.1, 0.05, 0.3, 0.1), phase_s, (500, 3000), (50, 200), seed=seed + 1),
    }
    served, busy = {}, {}
    model = DECODERS["Llama-3.1-8B"]
    for name, count, tokens in (("chat", 3, 200_000), ("docs", 1, 6_000)):
        settings = EngineSettings(kv_bytes_per_token=model.kv_bytes_per_token)
        engines = [
            Engine(f"{name}-{index}", settings, planted_steps(), PagedMemory(tokens // 16))
            for index in range(count)
        ]
        served[name] = serve_routed(engines, loads[name])
        busy[name] = sum(each.busy_s for each in engines)
    return PlantedDay(4 * phase_s, served, busy)


def write_day(folder: Path, day: PlantedDay) -> tuple[Path, Path]:
    """The deployment list and the trace."""
    cluster, trace = folder / "cluster.yaml", folder / "trace.csv"
    cluster.write_text(CLUSTER)
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
                    f"{row.ttft_s + FRONT_S:.5f}",
                    f"{row.completion_s + FRONT_S:.5f}",
                )
            )
    return cluster, trace
