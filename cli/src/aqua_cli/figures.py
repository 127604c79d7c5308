"""One style for every picture of Aqua, and one way to a file.

    with figure(path, width=9) as drawing:
        axes = drawing.subplots()
        axes.plot(steps, ours, label="ours")
        axes.legend()

The same drawing gives the same bytes, and the file appears whole or not at
all. Drawn by matplotlib's Agg without pyplot: no display, no figures left open.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aqua_cli.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK: Final = "#1f2933"
FAINT: Final = "#7b8794"
GRID: Final = "#e4e7eb"
BLUE: Final = "#0b6e99"
TEAL: Final = "#3fb8af"
AMBER: Final = "#f2a541"
VIOLET: Final = "#5a4fcf"
RED: Final = "#c0392b"
GREEN: Final = "#4d8b31"
PALETTE: Final = (BLUE, AMBER, TEAL, RED, VIOLET, GREEN, FAINT)
"""Colours of lines in order; apart in lightness, so that they survive a grey print."""

STYLE: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 140,
    # The same picture, the same bytes; and text stays text.
    "svg.hashsalt": "aqua",
    "svg.fonttype": "none",
}
FORMATS: Final = {".png": {"Software": None}, ".svg": {"Date": None}}
"""Formats by ending, with the metadata that would differ between two runs."""


@contextmanager
def figure(path: Path, *, width: float = 8.0, height: float = 4.0) -> Iterator[Figure]:
    """A figure in Aqua's style, sizes in inches, written to `path` when the block ends well.

    Raises:
        ConfigError: Another ending, or it cannot be written there.
        UnavailableError: matplotlib is not installed.
    """
    from aqua_protocol.errors import ConfigError, UnavailableError

    if path.suffix not in FORMATS:
        raise ConfigError(
            f"cannot draw {path.name}", remedy="Choose a name that ends in .png or .svg."
        )
    try:
        import matplotlib as mpl
        from cycler import cycler
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            f"cannot draw without matplotlib: {error}", remedy="pip install 'aqua-cli[plot]'"
        ) from error
    # A copy of any type: matplotlib's own lists each key as a literal.
    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    with mpl.rc_context(style):
        drawing = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawing)
        yield drawing
        content = io.BytesIO()
        drawing.savefig(content, format=path.suffix[1:], metadata=FORMATS[path.suffix])
    write_bytes(path, content.getvalue())
