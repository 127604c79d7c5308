"""Plots of the commands: errors of a fit, latencies of a run, a replay beside its recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped

from aqua_cli.figures import figure
from aqua_simulator.serving.request import Served
from aqua_simulator.timing.evaluation import Score
from aqua_simulator.timing.fit import Fit, Fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_fit(fit: Fit, path: Path) -> None:
    """Linear operators of one layer against tokens, a line for each device, model and width."""
    with figure(path) as drawing:
        axes = drawing.add_subplot()
        tokens = np.unique(np.geomspace(1, 4096, 120).round())
        groups: dict[str, list[Fitted]] = defaultdict(list)
        for key, function in fit.functions.items():
            if function.kind == "tokens":
                groups[key.rpartition("/")[0]].append(function)
        for prefix, parts in sorted(groups.items()):
            layer = np.sum([one(tokens[:, None]) for one in parts], axis=0)
            axes.plot(tokens, layer * 1e3, label=prefix, linewidth=1)
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="tokens of a step", ylabel="linear operators of a layer, ms")
        if groups:
            axes.legend(fontsize=5, ncols=2)


def draw_scores(scores: Sequence[Score], path: Path) -> None:
    """Errors by level, every function a point."""
    with figure(path) as drawing:
        axes = drawing.add_subplot()
        levels = ("operator", "linear", "composite")
        for place, level in enumerate(levels):
            errors = [score.mape_percent for score in scores if score.level == level]
            spread = (
                np.linspace(-0.3, 0.3, len(errors)) if len(errors) > 1 else np.zeros(len(errors))
            )
            axes.plot(place + spread, errors, ".", label=f"{level} ({len(errors)})")
        axes.set_xticks(range(len(levels)), levels)
        axes.set(yscale="log", ylabel="MAPE on unseen rows, %")
        axes.legend()


def draw_latencies(runs: Mapping[str, Sequence[Served]], path: Path) -> None:
    """Distributions of time to first token and time per output token, a line for each run."""
    with figure(path) as drawing:
        panels = drawing.subplots(1, 2)
        for label, rows in runs.items():
            first = [row.ttft_s for row in rows]
            per_token = [row.tpot_s for row in rows if row.output_tokens > 1]
            for axes, values in zip(panels, (first, per_token), strict=True):
                share = np.arange(1, len(values) + 1) / max(1, len(values))
                axes.plot(np.sort(values), share, label=label)
        panels[0].set(xlabel="time to first token, s", ylabel="share of requests")
        panels[1].set(xlabel="time per output token, s")
        panels[0].legend()


def draw_usage(usage: Shaped[np.ndarray, " bins"], path: Path) -> None:
    """Compute and memory time per step over the steps of an offline run."""
    with figure(path) as drawing:
        axes = drawing.add_subplot()
        plot_usage(axes, usage)
        axes.set(xlabel="thousand steps", ylabel="ms per step")
        axes.legend()


def plot_usage(axes: Axes, usage: Shaped[np.ndarray, " bins"]) -> None:
    """Draw the two times of `OfflineResult.usage`, in milliseconds per step."""
    at = np.cumsum(usage["step_count"]) / 1e3
    for name in ("compute", "memory"):
        axes.plot(at, usage[f"{name}_s"] / usage["step_count"] * 1e3, label=name)


def plot_groups(axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    """Draw bars in groups, one of each label in a group."""
    width = 0.8 / len(values)
    for index, (label, heights) in enumerate(values.items()):
        axes.bar(np.arange(len(groups)) + index * width, heights, width, label=label)
    axes.set_xticks(np.arange(len(groups)) + 0.4, list(groups))
    axes.legend(fontsize=7)
