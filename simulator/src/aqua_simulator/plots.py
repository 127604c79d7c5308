"""Plots of the commands: errors of a fit, latencies of a run, a replay beside its recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped

from aqua_simulator.serving.request import Served
from aqua_simulator.timing.evaluation import Score
from aqua_simulator.timing.fit import Fit, Fitted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(path: Path, draw: Callable[[Figure], None]) -> None:
    """Write a PNG; the same drawing gives the same bytes."""
    # Not pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_fit(fit: Fit, path: Path) -> None:
    """Linear operators of one layer against tokens, a line for each device, model and width."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        tokens = np.unique(np.geomspace(1, 4096, 120).round())
        groups: dict[str, list[Fitted]] = defaultdict(list)
        for key, function in fit.functions.items():
            if function.kind == "tokens":
                groups[key.rpartition("/")[0]].append(function)
        for prefix, parts in sorted(groups.items()):
            layer = np.sum([one(tokens[:, None]) for one in parts], axis=0)
            axes.plot(tokens, layer * 1e3, label=prefix, linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tokens of a step")
        axes.set_ylabel("linear operators of a layer, ms")
        if groups:
            axes.legend(fontsize=5, ncols=2)

    save(path, draw)


def draw_scores(scores: Sequence[Score], path: Path) -> None:
    """Errors by level, every function a point."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        levels = ("operator", "linear", "composite")
        for place, level in enumerate(levels):
            errors = [score.mape for score in scores if score.level == level]
            spread = (
                np.linspace(-0.3, 0.3, len(errors)) if len(errors) > 1 else np.zeros(len(errors))
            )
            axes.plot(place + spread, errors, ".", label=f"{level} ({len(errors)})")
        axes.set_xticks(range(len(levels)), levels)
        axes.set_yscale("log")
        axes.set_ylabel("MAPE on unseen rows, %")
        axes.legend()

    save(path, draw)


def draw_served(served: Sequence[Served], path: Path) -> None:
    """Distributions of time to first token and time per output token."""

    def draw(figure: Figure) -> None:
        first, per_token = figure.subplots(1, 2)
        _cumulative(first, [row.ttft_s for row in served], "served")
        first.set_xlabel("time to first token, s")
        _cumulative(per_token, [row.tpot_s for row in served if row.output_tokens > 1], "served")
        per_token.set_xlabel("time per output token, s")
        first.set_ylabel("share of requests")

    save(path, draw)


def draw_replay(recorded: Sequence[Served], simulated: Sequence[Served], path: Path) -> None:
    """Recorded and simulated distributions in one picture."""

    def draw(figure: Figure) -> None:
        first, per_token = figure.subplots(1, 2)
        for label, rows in (("recorded", recorded), ("simulated", simulated)):
            _cumulative(first, [row.ttft_s for row in rows], label)
            _cumulative(per_token, [row.tpot_s for row in rows if row.output_tokens > 1], label)
        first.set_xlabel("time to first token, s")
        per_token.set_xlabel("time per output token, s")
        first.set_ylabel("share of requests")
        first.legend()

    save(path, draw)


def draw_usage(usage: Shaped[np.ndarray, " bins"], path: Path) -> None:
    """Compute and memory time per step over the steps of an offline run."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        steps = usage["step_count"]
        at = np.cumsum(steps) / 1e3
        axes.plot(at, usage["compute_s"] / steps * 1e3, label="compute")
        axes.plot(at, usage["memory_s"] / steps * 1e3, label="memory")
        axes.set_xlabel("thousand steps")
        axes.set_ylabel("ms per step")
        axes.legend()

    save(path, draw)


def _cumulative(axes: object, values: Sequence[float], label: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    ordered = np.sort(np.asarray(values))
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), label=label)
