"""How a demo is watched: a line for each thing that happens, a live picture, the verdict.

The picture is below the lines, and on a terminal only. Everything goes to standard error: standard
output is for the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aqua_demo.claims import Claim

REDRAW_S: Final = 0.125
"""Seconds from one picture to the next, few enough to look alive. Doubled, it looks jerky."""

BAR_WIDTH: Final = 40
"""Characters; with names and sizes it fits a terminal of 80, and doubled no longer would."""

FIGURES_REMARK: Final = "Figures are of this machine and its neighbours; claims hold on any."


class ConsoleView:
    """Shows a run on a console; a quiet one shows nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._begun_s = time.monotonic()
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, draw: Callable[[], RenderableType]) -> None:
        """Redraw the picture, if the last one is old enough to have been seen."""
        now_s = time.monotonic()
        if self._console.is_terminal and now_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = now_s
            self._live.update(draw(), refresh=True)

    def tell(self, source: str, text: str, at_s: float | None = None) -> None:
        """Print a line on something that happened `at_s` seconds after the start, or now."""
        at_s = time.monotonic() - self._begun_s if at_s is None else at_s
        line = f"[{at_s:6.1f} s] {source}: {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def verdict(claims: Iterable[Claim], table: Table, remark: str) -> RenderableType:
    """Draw claims, figures and a remark on these."""
    lines = [
        Text.assemble(("  ✓ ", "green"), claim.text)
        if claim.holds
        else Text.assemble(("  ✗ ", "red"), f"{claim.text}: {claim.reason}")
        for claim in claims
    ]
    return Group(Text("What the run showed", "bold"), *lines, table, Text(remark))
