"""How long online requests waited for their first tokens, drawn as all demos on vLLM do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqua_cli.figures import BLUE, FAINT
from aqua_demo.engines.race import Run, ttft

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_first_tokens(axis: Axes, alone: Run, ours: Run) -> None:
    """How long each online request waited, without offline work and beside it."""
    for run, label, colour in (
        (alone, "online requests alone", FAINT),
        (ours, "with offline work beside", BLUE),
    ):
        at_s = [row["arrival_s"] for row in run["online"]]
        axis.plot(at_s, [1000 * ttft(row) for row in run["online"]], ".", color=colour, label=label)
    axis.set_ylabel("time to first token (ms)")
    axis.set_ylim(bottom=0)
