"""All figures by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aqua_simulator.papers import aqua_figures, figures
from aqua_simulator.papers.blendserve import Laboratory
from aqua_simulator.papers.report import Reproduction

FIGURES: Final[dict[str, Callable[[Laboratory], Reproduction]]] = {
    **figures.FIGURES,
    **aqua_figures.FIGURES,
}
"""BlendServe's without a prefix, Aqua's with one: both papers have a Figure 8."""
