"""How far a simulation is off real engines that served the same loads by turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from aqua_cli import print_table

CONTROL: Final = "control"
"""An engine like the one that others are measured by: what equal engines differ by."""
TITLES: Final = {
    "ttft_mean": "mean TTFT",
    "completion_mean": "mean completion",
    "offline_tokens_per_s": "offline tokens",
}
"""Of figures; the first two are those whose changes have a direction."""
DIRECTED: Final = ("ttft_mean", "completion_mean")

Figures = dict[str, float]
Engines = dict[str, Figures]
"""Figures by the name of an engine."""


def summarize(pairs: Sequence[tuple[Engines, Engines]], baseline: str) -> dict[str, Any]:
    """Errors of each simulated engine, what equal engines differ by, and directions.

    Args:
        pairs: Real and simulated figures of each load.
        baseline: The engine that `CONTROL` is like, and that others are compared with.
    """
    found: dict[str, Any] = {}
    spread = {
        figure: statistics.median(
            abs(real[CONTROL][figure] / real[baseline][figure] - 1) for real, _ in pairs
        )
        for figure in DIRECTED
    }
    for name, figures in pairs[0][1].items():
        found[name] = {}
        for figure in figures:
            errors = [model[name][figure] / real[name][figure] - 1 for real, model in pairs]
            found[name][f"{figure}_error"] = statistics.median(errors)
            found[name][f"{figure}_worst"] = max(errors, key=abs)
    sides = [
        (real[name][figure] < real[baseline][figure])
        == (model[name][figure] < model[baseline][figure])
        for real, model in pairs
        for name in model
        for figure in DIRECTED
        if name != baseline
        and abs(real[name][figure] / real[baseline][figure] - 1) > spread[figure]
    ]
    return found | {"spread": spread, "directions": len(sides), "directions_right": sum(sides)}


def show(found: dict[str, Any], names: Sequence[str]) -> None:
    """A row for each of these engines."""
    figures = [each for each in TITLES if any(f"{each}_error" in found[name] for name in names)]
    keys = [f"{figure}_{which}" for figure in figures for which in ("error", "worst")]
    rows = [
        [name, *(f"{found[name][key]:+.1%}" if key in found[name] else "" for key in keys)]
        for name in names
    ]
    spread = found["spread"]
    shown = (f"±{spread[each]:.1%}" if each in spread else "" for each in figures)
    rows.append(["equal engines", *(cell for text in shown for cell in (text, ""))])
    columns = [text for figure in figures for text in (TITLES[figure], "worst")]
    print_table("simulated to real", ["", *columns], rows)
    print(f"directions: {found['directions_right']} of {found['directions']} right")
