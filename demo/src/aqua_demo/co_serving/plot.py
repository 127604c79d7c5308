"""The picture of a co-serving run: online requests above, what was filled into the gaps below.

Source: ConServe Figures 5 and 6, which show load and throughput of both classes over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_cli.figures import AMBER, BLUE, TEAL
from aqua_demo.engines.plot import draw_first_tokens
from aqua_demo.engines.race import Run
from aqua_demo.panels import panels

BIN_S: Final = 1.0
"""Of token rates: some dozens of steps. Doubled, short gaps do not show."""


def draw(runs: Mapping[str, Run], path: Path, *, subtitle: str) -> None:
    """Write the plot of the four engines' runs, a .png or .svg file."""
    ours = runs["ours"]
    end_s = max(run["seconds"] for run in runs.values())
    title = "One engine: people's requests as if alone, an offline file in the gaps"
    with panels(path, title, subtitle) as (above, middle, below):
        draw_first_tokens(above, runs["online"], ours)
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


def token_rates(
    rows: Iterable[Run], end_s: float
) -> tuple[Float64[np.ndarray, " edges"], Float64[np.ndarray, " bins"]]:
    """Edges of bins, in seconds, and new tokens a second in each."""
    edges = np.arange(0.0, end_s + BIN_S, BIN_S)
    counts, _ = np.histogram([at_s for row in rows for at_s in row["token_s"]], edges)
    return edges, counts / BIN_S
