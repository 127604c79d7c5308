"""BlendServe's table and figures as measurements; `FIGURES` lists them by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.paper import left_share
from aqua_simulator.offline.engine import optimal
from aqua_simulator.offline.policies import OfflinePolicy
from aqua_simulator.papers.blendserve import (
    RESERVED_BYTES,
    TRACES,
    Experiments,
    Trace,
    constants_moved,
    gain,
    grid,
    sensitivity,
)
from aqua_simulator.papers.report import FigureMeasurement
from aqua_simulator.plots import plot_groups, plot_usage
from aqua_simulator.workloads.blended import draw as draw_workload
from aqua_simulator.workloads.sources import AZURE, BURSTGPT, MMLU, SHAREGPT, SOURCES, WILDCHAT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from aqua_simulator.workloads.sources import Source

MMLU_REQUESTS: Final = 14_042
"""Fixed by the benchmark: its questions; Table 3 is about the traces as they are."""

TRACE_REQUESTS: Final = 40_000
"""Fixed by the paper (appendix A.1): requests of a single trace."""

GRID_REQUESTS: Final = 100_000
"""Requests per trace of the grids: a quarter of the paper's, because there are 65 of them; Figure 6
shows how little that moves. Doubled, the grids take twice as long."""


def table3(experiments: Experiments) -> FigureMeasurement:
    """Prefix sharing and compute density of the single traces."""
    values = {}
    for source in SOURCES.values():
        count = MMLU_REQUESTS if source is MMLU else TRACE_REQUESTS
        workload = draw_workload([(source, count)], seed=experiments.seed)
        values[f"{source.name}, prefix sharing"] = workload.optimal_sharing
        values[f"{source.name}, compute density"] = optimal(workload, experiments.cost).density
    return FigureMeasurement(values)


_CHATS: Final = ("ShareGPT", "WildChat", "BurstGPT")


def figure2(experiments: Experiments) -> FigureMeasurement:
    """Prompt and output lengths of the single traces."""
    generator = np.random.default_rng(experiments.seed)
    drawn = {name: each.lengths(TRACE_REQUESTS, generator) for name, each in SOURCES.items()}
    values: dict[str, float] = {}
    for name, (prompts, outputs) in drawn.items():
        values[f"{name}, median prompt"] = float(np.median(prompts))
        values[f"{name}, median output"] = float(np.median(outputs))
        values[f"{name}, 99th percentile of outputs"] = float(np.quantile(outputs, 0.99))
        if name in _CHATS:
            values[f"{name}, outputs below 1K"] = float(np.mean(outputs < 1024)) * 100  # noqa: PLR2004
    videos = drawn["OpenVid"][1]
    values["OpenVid, outputs above 5K"] = float(np.mean(videos > 5120)) * 100  # noqa: PLR2004

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        share = np.arange(1, TRACE_REQUESTS + 1) / TRACE_REQUESTS
        for name, lengths in drawn.items():
            for axes, each in zip(panels, lengths, strict=True):
                axes.plot(np.sort(each), share, label=name, linewidth=1)
        for axes, label in zip(panels, ("prompt tokens", "output tokens"), strict=True):
            axes.set(xscale="log", xlabel=label)
        panels[0].set_ylabel("share of requests")
        panels[0].legend(fontsize=7)

    return FigureMeasurement(values, draw=draw)


_FIGURE3_LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def figure3(_experiments: Experiments) -> FigureMeasurement:
    """Compute density over prompt and output lengths."""
    density = ResourceCost.of(DECODERS["Llama-3-70B"], GPUS["A100-80GB"].group(8)).density
    lengths = np.array(_FIGURE3_LENGTHS)
    table = np.asarray(density(lengths[:, None], lengths))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        image = axes.imshow(np.log10(table), cmap="coolwarm", origin="lower", vmin=-1.5, vmax=1.5)
        for (i, j), value in np.ndenumerate(table):
            axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7)
        names = [str(length) for length in _FIGURE3_LENGTHS]
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="output tokens", ylabel="prompt tokens")
        figure.colorbar(image, label="log10 of compute density")

    values = {
        "density, 512 in and 256 out": float(density(512, 256)),
        "density, 256 in and 16384 out": float(density(256, 16384)),
        "highest density with more than 4K output tokens (memory-bound: below 1)": max(
            float(density(prompt, 4097)) for prompt in (128, 512, 2048, 8192)
        ),
    }
    return FigureMeasurement(values, draw=draw)


def figure5(experiments: Experiments) -> FigureMeasurement:
    """The example of the memory partition."""
    density = ResourceCost.of(experiments.model, experiments.gpu).density
    left, right = float(density(512, 256)), float(density(256, 16384))
    share = left_share(left, right, 1.27)
    memory_gb = (experiments.gpu.hbm_bytes - RESERVED_BYTES) / 1e9
    return FigureMeasurement(
        {
            "density of the left node": left,
            "density of the right node": right,
            "memory of the left node": share * memory_gb,
            "memory of the right node": (1 - share) * memory_gb,
        }
    )


_RANDOM, _DFS = OfflinePolicy.RANDOM, OfflinePolicy.DFS
_PAPER, _FORESIGHT = OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT


def figure6(experiments: Experiments) -> FigureMeasurement:
    """End-to-end throughput of the four traces."""
    no_overlap = experiments.cost._replace(interference=1.0)
    values: dict[str, float] = {}
    throughput: dict[str, list[float]] = defaultdict(list)
    gains: dict[OfflinePolicy, list[float]] = defaultdict(list)
    shares: dict[OfflinePolicy, list[float]] = defaultdict(list)
    speedups: dict[str, list[float]] = defaultdict(list)
    for trace in TRACES:
        runs = {name: experiments.run(trace, name) for name in (_RANDOM, _DFS, _PAPER, _FORESIGHT)}
        sequential = experiments.run(trace, _DFS, cost=no_overlap)
        throughput["vLLM-DFS, SGLang-DFS (no overlap)"].append(sequential.result.tokens_per_s / 1e3)
        for name, run in runs.items():
            throughput[name].append(run.result.tokens_per_s / 1e3)
            gains[name].append(gain(run, runs[_DFS]))
            shares[name].append(run.optimal_share * 100)
        speedups["no overlap"].append(1.0 + gain(runs[_PAPER], sequential) / 100)
        speedups["Balance"].append(1.0 + gain(runs[_PAPER], runs[_RANDOM]) / 100)
        values |= {
            f"{trace.name}, gain of blendserve over DFS": gains[_PAPER][-1],
            f"{trace.name}, gain of foresight over DFS": gains[_FORESIGHT][-1],
            f"{trace.name}, gain of Balance over DFS": gains[_RANDOM][-1],
            f"{trace.name}, speedup of blendserve over no overlap": speedups["no overlap"][-1],
            f"{trace.name}, speedup of blendserve over Balance": speedups["Balance"][-1],
        }
    values |= {
        "least gain of blendserve over DFS": min(gains[_PAPER]),
        "greatest gain of blendserve over DFS": max(gains[_PAPER]),
        "greatest speedup of blendserve over no overlap": max(speedups["no overlap"]),
        "mean speedup of blendserve over Balance on Traces 1 and 2": fmean(speedups["Balance"][:2]),
        "mean gain of blendserve over DFS": fmean(gains[_PAPER]),
        "mean gain of foresight over DFS": fmean(gains[_FORESIGHT]),
        "mean share of T_o, blendserve": fmean(shares[_PAPER]),
        "mean share of T_o, DFS": fmean(shares[_DFS]),
        "mean share of T_o, foresight": fmean(shares[_FORESIGHT]),
        "least share of T_o, foresight": min(shares[_FORESIGHT]),
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        plot_groups(axes, [trace.name for trace in TRACES], throughput)
        axes.set_ylabel("thousand tokens per second")

    found = sensitivity(experiments)
    return FigureMeasurement(
        values, found, draw=draw, moved=_moved(found) | constants_moved(experiments, TRACES)
    )


def _moved(found: Mapping[str, float]) -> dict[str, dict[str, list[float]]]:
    """What each chosen constant makes of the gains on Trace 2, from the rows of the sensitivity."""
    labels = {
        "interference": "interference ",
        "least dense batch": "dense steps from",
        "known media lengths": "media lengths",
    }
    return {
        f"Trace 2, gain of {policy} over DFS": {
            constant: [ours for row, ours in found.items() if row.startswith(f"{policy}, {label}")]
            for constant, label in labels.items()
        }
        for policy in (_PAPER, _FORESIGHT)
    }


def figure7(experiments: Experiments) -> FigureMeasurement:
    """Prefix sharing of the four traces."""
    values: dict[str, float] = {}
    bars: dict[str, list[float]] = {"optimal": []}
    for trace in TRACES:
        for name in (_PAPER, _FORESIGHT, _RANDOM):
            run = experiments.run(trace, name)
            values[f"{trace.name}, {name}, sharing of the optimum"] = run.sharing_share * 100
            bars.setdefault(name.value, []).append(run.result.sharing * 100)
        bars["optimal"].append(run.optimal_sharing * 100)
    for name, extreme in ((_PAPER, min), (_FORESIGHT, min), (_RANDOM, max)):
        found = [ours for row, ours in values.items() if f", {name}," in row]
        label = "least" if extreme is min else "greatest"
        values[f"{label} of the four traces, {name}"] = extreme(found)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        plot_groups(axes, [trace.name for trace in TRACES], bars)
        axes.set_ylabel("tokens saved by prefix sharing, %")

    return FigureMeasurement(values, draw=draw)


def figure8(experiments: Experiments) -> FigureMeasurement:
    """Compute and memory time over the steps of Trace 2."""
    runs = {name: experiments.run(TRACES[1], name).result for name in (_DFS, _PAPER, _FORESIGHT)}
    values: dict[str, float] = {}
    for name, run in runs.items():
        steps = run.usage["step_count"]
        overlap_s = np.minimum(run.usage["compute_s"], run.usage["memory_s"]).sum()
        compute_s = run.usage["compute_s"] / steps
        mean_s = np.average(compute_s, weights=steps)
        deviation_s = np.sqrt(np.average((compute_s - mean_s) ** 2, weights=steps))
        hidden = overlap_s / min(run.end.compute_s, run.end.memory_s)
        variation = float(deviation_s / mean_s)
        values |= {
            f"{name}, share of the smaller resource that is hidden": float(hidden) * 100,
            f"{name}, variation of compute per step (deviation over mean)": variation,
            f"{name}, steps": float(run.end.step),
        }

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(runs), 1, sharex=False)
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            plot_usage(axes, run.usage)
            axes.set_ylabel(f"{name}\nms per step", fontsize=7)
            axes.legend(fontsize=6, loc="upper right")
        panels[-1].set_xlabel("thousand steps")

    return FigureMeasurement(values, draw=draw)


def gain_grid(experiments: Experiments, *, source: Source) -> FigureMeasurement:
    """Gains over DFS on all 65 blends of one source, of the published policy and of the default."""
    count = min(GRID_REQUESTS, experiments.request_count)
    wanted = grid(source)
    gains: dict[OfflinePolicy, dict[Trace, float]] = {_PAPER: {}, _FORESIGHT: {}}
    missing: list[Trace] = []
    for trace in wanted:
        try:
            base = experiments.run(trace, _DFS, request_count=count)
        except ConfigError:
            # No mixture of our sources has both; counted below.
            missing.append(trace)
            continue
        for policy, found in gains.items():
            found[trace] = gain(experiments.run(trace, policy, request_count=count), base)
    published = gains[_PAPER]
    values = {"traces": float(len(published))}
    for policy, found in gains.items():
        values |= {
            f"{policy}, mean gain over DFS": fmean(found.values()),
            f"{policy}, least gain": min(found.values()),
            f"{policy}, greatest gain": max(found.values()),
        }
    if source is BURSTGPT:
        values["density of the greatest gain"] = max(published, key=published.__getitem__).density
    remarks = []
    if missing:
        remarks.append(
            f"{len(missing)} blends do not exist with our {source.name}: its own "
            "sharing or density is beyond the target."
        )

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (policy, found) in zip(panels, gains.items(), strict=True):
            for sharing in sorted({trace.sharing for trace in found}):
                line = [(each.density, found[each]) for each in found if each.sharing == sharing]
                axes.plot(*zip(*line, strict=True), marker="o", label=f"sharing {sharing:.2f}")
            axes.set(xlabel="compute density", ylabel=f"gain of {policy} over DFS, %")
        panels[0].legend(fontsize=7)

    blends = [replace(trace, source=source) for trace in TRACES]
    moved = constants_moved(experiments, blends)["mean gain of blendserve over DFS"]
    return FigureMeasurement(
        values,
        facts={"grid_request_count": count},
        remarks=remarks,
        draw=draw,
        moved={f"{_PAPER}, mean gain over DFS": moved},
    )


def beyond(experiments: Experiments) -> FigureMeasurement:
    """The default policy on the paper's traces, with and without known media lengths."""
    unknown = replace(experiments.plan, media_known=False)
    values: dict[str, float] = {}
    for trace in TRACES:
        base = experiments.run(trace, _DFS)
        known = experiments.run(trace, _FORESIGHT)
        blind = experiments.run(trace, _FORESIGHT, settings=unknown)
        lost = (known.optimal_share - blind.optimal_share) * 100
        values |= {
            f"{trace.name}, gain over DFS": gain(known, base),
            f"{trace.name}, share of T_o": known.optimal_share * 100,
            f"{trace.name}, lost when media lengths are unknown": lost,
        }
    by_trace = list(values.values())
    values |= {
        "mean gain over DFS": fmean(by_trace[0::3]),
        "mean share of T_o": fmean(by_trace[1::3]),
        "mean loss when media lengths are unknown": fmean(by_trace[2::3]),
    }
    return FigureMeasurement(values)


FIGURES: Final[dict[str, Callable[[Experiments], FigureMeasurement]]] = {
    "table3": table3,
    "figure2": figure2,
    "figure3": figure3,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "figure8": figure8,
    "beyond": beyond,
    "figure9": partial(gain_grid, source=BURSTGPT),
    "figure10": partial(gain_grid, source=AZURE),
    "figure11": partial(gain_grid, source=SHAREGPT),
    "figure12": partial(gain_grid, source=WILDCHAT),
}
"""Names on the command line."""
