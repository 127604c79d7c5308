"""BlendServe's traces and runs, from which its figures are made, and their sensitivity.

`Experiments` runs everything: it makes the blends, knows the cost and the memory of the paper's
machine (Llama-3.1-8B on an A100 80GB, 20 GB for weights and buffers), and remembers its runs, so
that figures of the same traces share them.

What the paper leaves open, and what we chose, is in `docs/simulation.md`, "Readings of BlendServe".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from aqua_protocol.decoders import DECODERS, DecoderModel
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS, GpuModel
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import Bound, OfflineResult, optimal, run
from aqua_simulator.offline.policies import OfflinePolicy, PlanSettings, policy_for
from aqua_simulator.offline.workload import OfflineWorkload
from aqua_simulator.workloads.blended import blend_counts, draw
from aqua_simulator.workloads.sources import BURSTGPT, Source

INTERFERENCE: Final = 0.4
"""Alpha, 0 to 1: chosen so that DFS stands where the paper's numbers put it. Doubled, overlap hides
only a fifth of the smaller resource."""

RESERVED_BYTES: Final = 20 * 10**9
"""Fixed by the paper (Figure 5): weights and temporary buffers."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A blend by its targets."""

    name: str
    density: float
    sharing: float
    source: Source = BURSTGPT


TRACES: Final = (
    Trace("Trace 1", 1.4, 0.35),
    Trace("Trace 2", 0.9, 0.35),
    Trace("Trace 3", 1.4, 0.05),
    Trace("Trace 4", 0.9, 0.05),
)
"""Table 2."""


@dataclass(frozen=True, slots=True)
class TraceRun:
    """A policy on a trace, and what no policy can beat; not the workload, which is large."""

    optimal_sharing: float
    bound: Bound
    result: OfflineResult

    @property
    def optimal_share(self) -> float:
        """T_o over the makespan."""
        return self.bound.optimal_s / self.result.makespan_s

    @property
    def sharing_share(self) -> float:
        """Prefix sharing reached, of the optimum."""
        return self.result.sharing / self.optimal_sharing


@dataclass
class Experiments:
    """Runs blends under policies, each once.

    Args:
        request_count: Requests per trace.
        seed: Of the draw and of the sample.
        data: Folder with recorded lengths, for the figures that can use them.
        progress: Told what is about to run.
    """

    request_count: int = 400_000
    seed: int = 1
    model: DecoderModel = DECODERS["Llama-3-8B"]
    gpu: GpuModel = GPUS["A100-80GB"]
    interference: float = INTERFERENCE
    data: Path | None = None
    progress: Callable[[str], None] = field(default=lambda _message: None, repr=False)
    _runs: dict[tuple[object, ...], TraceRun] = field(default_factory=dict, init=False, repr=False)
    _drawn: dict[tuple[Trace, int], OfflineWorkload] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def cost(self) -> StepCost:
        """The paper's cost model with our interference."""
        return StepCost.from_paper(self.model, self.gpu, interference=self.interference)

    @cached_property
    def capacity_tokens(self) -> int:
        """KV tokens in what weights and buffers leave."""
        return int((self.gpu.hbm_bytes - RESERVED_BYTES) // self.model.kv_bytes_per_token)

    @cached_property
    def plan(self) -> PlanSettings:
        """What planners know and may use, unless a run says otherwise."""
        return PlanSettings(self.capacity_tokens, seed=self.seed)

    def workload(self, trace: Trace, request_count: int) -> OfflineWorkload:
        """The blend; only the last one is kept, it is large."""
        key = (trace, request_count)
        if key not in self._drawn:
            counts = blend_counts(
                trace.source,
                density=trace.density,
                sharing=trace.sharing,
                request_count=request_count,
                cost=self.cost,
            )
            self._drawn = {key: draw(counts, seed=self.seed)}
        return self._drawn[key]

    def run(
        self,
        trace: Trace,
        policy: OfflinePolicy,
        *,
        request_count: int | None = None,
        cost: StepCost | None = None,
        settings: PlanSettings | None = None,
    ) -> TraceRun:
        """Run a policy on a trace."""
        count = request_count or self.request_count
        cost = cost or self.cost
        settings = settings or self.plan
        key = (trace, policy, count, cost, settings)
        if key not in self._runs:
            self.progress(f"{trace.name}, {policy}, {count:,} requests")
            workload = self.workload(trace, count)
            result = run(
                workload,
                policy_for(policy, workload, cost, settings),
                cost,
                capacity_tokens=settings.capacity_tokens,
                usage_stride=max(1, count // 400),
            )
            self._runs[key] = TraceRun(workload.optimal_sharing, optimal(workload, cost), result)
        return self._runs[key]


def gain(ours: TraceRun, base: TraceRun) -> float:
    """Throughput gain in percent."""
    return (base.result.makespan_s / ours.result.makespan_s - 1.0) * 100.0


def grid(source: Source) -> list[Trace]:
    """Blends of Figures 9 to 12: density 0.80 to 1.40 by 0.05, sharing 0.05 to 0.45 by 0.10."""
    densities = np.round(np.arange(0.80, 1.41, 0.05), 2)
    sharings = np.round(np.arange(0.05, 0.46, 0.10), 2)
    return [
        Trace(f"{source.name} ({density:.2f}, {sharing:.2f})", density, sharing, source)
        for sharing in sharings.tolist()
        for density in densities.tolist()
    ]


SENSITIVITY_REQUESTS: Final = 50_000
"""Requests of a trial, an eighth of the paper's; the first row of the table shows what that moves.
Doubled, the table takes twice as long."""

DENSE_STEPS: Final = (128, 256, 320, 448, 512)
"""Least dense batches tried beside the chosen one."""

INTERFERENCES: Final = (0.2, 0.3, 0.5, 0.6)
"""Alphas tried beside the chosen one."""


def sensitivity(experiments: Experiments) -> dict[str, float]:
    """What the constants that the paper does not give do to its gains over DFS, in percent.

    All cases are on Trace 2; `constants_moved` has the means of four traces.
    """
    count = min(SENSITIVITY_REQUESTS, experiments.request_count)
    values: dict[str, float] = {}
    for label, changes in _cases(experiments, count):
        base = experiments.run(TRACES[1], OfflinePolicy.DFS, request_count=count, **changes)
        for name in (OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT):
            run = experiments.run(TRACES[1], name, request_count=count, **changes)
            values[f"{name}, {label}"] = gain(run, base)
    return values


def _cases(experiments: Experiments, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and what it changes among the arguments of `Experiments.run`."""
    cost, plan = experiments.cost, experiments.plan
    yield f"Trace 2 with {count:,} requests, all else as above", {}
    for alpha in INTERFERENCES:
        yield f"interference {alpha}", {"cost": cost._replace(interference=alpha)}
    for tokens in DENSE_STEPS:
        label = f"dense steps from {tokens} tokens on"
        yield label, {"settings": replace(plan, dense_tokens=tokens)}
    plans: dict[str, dict[str, Any]] = {
        "all lengths known": {"all_known": True},
        "media lengths sampled too": {"media_known": False},
        "10 % of lengths sampled": {"sample_probability": 0.1},
        "half the memory": {"capacity_tokens": plan.capacity_tokens // 2},
    }
    for label, change in plans.items():
        yield label, {"settings": replace(plan, **change)}
    yield "5 ms of host time per step", {"cost": cost._replace(overhead_s=0.005)}
    floor_s = experiments.model.weight_bytes / experiments.gpu.hbm_bytes_per_s
    label = f"weights read every step (floor {floor_s * 1e3:.1f} ms, exponent 1.28)"
    yield label, {"cost": cost._replace(linear_floor_s=floor_s, linear_exponent=1.28)}


def constants_moved(
    experiments: Experiments, traces: Sequence[Trace]
) -> dict[str, dict[str, list[float]]]:
    """Means over traces with other values of the constants that were chosen knowing the result.

    Returns:
        By row of Figure 6 and by constant, a mean for each value tried, on `SENSITIVITY_REQUESTS`.
        Traces of which no blend exists are left out.
    """
    count = min(SENSITIVITY_REQUESTS, experiments.request_count)
    means: dict[str, dict[str, list[float]]] = {
        "mean gain of blendserve over DFS": {"interference": [], "least dense batch": []},
        "mean share of T_o, blendserve": {"interference": [], "least dense batch": []},
        "mean share of T_o, DFS": {"interference": []},
    }

    def measure(constant: str, *, is_cost: bool, **changes: Any) -> None:  # noqa: ANN401 - as run()
        pairs = []
        for trace in traces:
            try:
                base_changes = changes if is_cost else {}
                base = experiments.run(
                    trace, OfflinePolicy.DFS, request_count=count, **base_changes
                )
            except ConfigError:
                continue
            ours = experiments.run(trace, OfflinePolicy.PAPER, request_count=count, **changes)
            pairs.append((ours, base))
        found = {
            "mean gain of blendserve over DFS": [gain(ours, base) for ours, base in pairs],
            "mean share of T_o, blendserve": [ours.optimal_share * 100 for ours, _ in pairs],
            "mean share of T_o, DFS": [base.optimal_share * 100 for _, base in pairs],
        }
        for row, values in found.items():
            if constant in means[row]:
                means[row][constant].append(float(np.mean(values)))

    for alpha in INTERFERENCES:
        cost = experiments.cost._replace(interference=alpha)
        measure("interference", is_cost=True, cost=cost)
    for tokens in DENSE_STEPS:
        settings = replace(experiments.plan, dense_tokens=tokens)
        measure("least dense batch", is_cost=False, settings=settings)
    return means
