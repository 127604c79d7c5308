"""All figures by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aqua_protocol.errors import ConfigError
from aqua_simulator.papers import aqua_figures, blendserve_figures
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.report import Reproduction

FIGURES: Final[dict[str, Callable[[Experiments], Reproduction]]] = {
    **blendserve_figures.FIGURES,
    **aqua_figures.FIGURES,
}
"""BlendServe's without a prefix, Aqua's with one: both papers have a Figure 8."""


def named(names: Sequence[str]) -> list[str]:
    """Figures by name, each once; `all` is all of them.

    Raises:
        ConfigError: No figure of that name.
    """
    for name in names:
        if name not in FIGURES and name != "all":
            raise ConfigError(
                f"no figure named {name!r}", remedy=f"Known: {', '.join(FIGURES)}, all."
            )
    return list(FIGURES) if "all" in names else list(dict.fromkeys(names))
