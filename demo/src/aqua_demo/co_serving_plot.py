"""The picture of a co-serving run: online requests above, what was filled into the gaps below.

Source: ConServe Figures 5 and 6, which show load and throughput of both classes over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_cli.figures import AMBER, BLUE, FAINT, TEAL, figure
from aqua_demo.co_serving_race import Run, ttft

BIN_S: Final = 1.0
"""Of token rates: some dozens of steps. Doubled, short gaps do not show."""


def draw(runs: Mapping[str, Run], path: Path, *, subtitle: str) -> None:
    """Write the plot of the four engines' runs, a .png or .svg file."""
    ours = runs["ours"]
    end_s = max(run["seconds"] for run in runs.values())
    with figure(path, width=11, height=7.6) as drawing:
        drawing.set_layout_engine("constrained", rect=(0, 0.035, 1, 0.955))
        above, middle, below = drawing.subplots(3, 1, sharex=True)
        for name, label, colour in (
            ("online", "online requests alone", FAINT),
            ("ours", "with offline work beside", BLUE),
        ):
            rows = runs[name]["online"]
            at_s = [row["arrival_s"] for row in rows]
            above.plot(at_s, [1000 * ttft(row) for row in rows], ".", color=colour, label=label)
        above.set_ylabel("time to first token (ms)")
        above.set_ylim(bottom=0)
        for axis, kind, colour in ((middle, "online", BLUE), (below, "offline", TEAL)):
            edges, rates = token_rates(ours[kind], end_s)
            axis.stairs(rates, edges, fill=True, color=colour, alpha=0.6, label="co-serving")
            edges, rates = token_rates(runs[kind][kind], end_s)
            axis.stairs(rates, edges, color=AMBER, label=f"{kind} requests alone")
            axis.set_ylabel(f"{kind}: tokens / s")
        for axis in (above, middle, below):
            axis.legend(loc="upper right", ncols=2)
        below.set_xlabel("seconds of each engine")
        below.set_xlim(0, end_s)
        title = "One engine: people's requests as if alone, an offline file in the gaps"
        drawing.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        drawing.text(0.01, 0.008, subtitle, color=FAINT, fontsize=8.5, ha="left")


def token_rates(
    rows: Iterable[Run], end_s: float
) -> tuple[Float64[np.ndarray, " edges"], Float64[np.ndarray, " bins"]]:
    """Edges of bins, in seconds, and new tokens a second in each."""
    edges = np.arange(0.0, end_s + BIN_S, BIN_S)
    counts, _ = np.histogram([at_s for row in rows for at_s in row["token_s"]], edges)
    return edges, counts / BIN_S
