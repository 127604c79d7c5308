"""The frame of every plot of a demo: three panels over one time, a title, and what ran on what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aqua_cli.figures import FAINT, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def panels(
    path: Path,
    title: str,
    subtitle: str,
    *,
    height: float = 7.6,
    ratios: Sequence[float] = (1, 1, 1),
) -> Iterator[Sequence[Axes]]:
    """Three panels, from above, written to `path`, a .png or .svg file, when the block ends well.

    Args:
        path: The file.
        title: What it shows.
        subtitle: What ran, on what.
        height: Of all of it, inches.
        ratios: Of the panels' heights.
    """
    with figure(path, width=11, height=height) as drawing:
        # Room for the title and the last line.
        drawing.set_layout_engine("constrained", rect=(0, 0.035, 1, 0.96))
        yield drawing.subplots(3, 1, sharex=True, height_ratios=ratios)
        drawing.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        drawing.text(0.01, 0.008, subtitle, color=FAINT, fontsize=8.5, ha="left")
