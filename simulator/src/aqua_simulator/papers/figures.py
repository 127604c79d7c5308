"""All figures by the names of the command line, and how one is made.

`published.toml` holds what the papers print and what is to be said of it; a function of
`blendserve_figures`, `aqua_figures` or `conserve_figures` measures our numbers, by the names of the
rows. `reproduce` lays the two beside each other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import BaseModel, TypeAdapter

from aqua_protocol.errors import ConfigError
from aqua_simulator.papers import aqua_figures, blendserve_figures, conserve_figures
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.report import (
    FigureMeasurement,
    FigureRow,
    FittedConstant,
    PublishedRow,
    Reproduction,
)
from aqua_simulator.workloads.sources import SOURCES

PAPERS: Final = {
    "blendserve": blendserve_figures.FIGURES,
    "aqua": aqua_figures.FIGURES,
    "conserve": conserve_figures.FIGURES,
}
"""BlendServe's figures without a prefix, the others' with one: all papers have a Figure 8."""

FIGURES: Final[Mapping[str, Callable[[Experiments], FigureMeasurement]]] = {
    key: figure for figures in PAPERS.values() for key, figure in figures.items()
}


class PublishedFigure(BaseModel, frozen=True, extra="forbid"):
    """A table of `published.toml`, which explains the fields."""

    title: str
    source: str
    unit: str = ""
    sensitivity_unit: str = ""
    sensitivity_units: Mapping[str, str] = {}
    traces: Sequence[str] = ()
    surrogates: Sequence[str] = ()
    remarks: Sequence[str] = ()
    chosen: Sequence[FittedConstant] = ()
    rows: Mapping[str, PublishedRow] = {}

    def unit_of_case(self, name: str) -> str:
        """Unit of a row of the sensitivity."""
        units = (unit for end, unit in self.sensitivity_units.items() if name.endswith(end))
        return next(units, self.sensitivity_unit)


@cache
def published_figures() -> Mapping[str, PublishedFigure]:
    """What the papers print, by the names of the command line."""
    text = Path(__file__).with_name("published.toml").read_text()
    return TypeAdapter(dict[str, PublishedFigure]).validate_python(tomllib.loads(text))


def named(names: Sequence[str]) -> list[str]:
    """Figures by name, each once; the name of a paper is all of its figures, `all` is all.

    Raises:
        ConfigError: No figure of that name.
    """
    groups: dict[str, list[str]] = {"all": list(FIGURES)}
    for paper, figures in PAPERS.items():
        groups[paper] = list(figures)
    groups |= {key: [key] for key in FIGURES}
    for name in names:
        if name not in groups:
            raise ConfigError(f"no figure named {name!r}", remedy=f"Known: {', '.join(groups)}.")
    return list(dict.fromkeys(key for name in names for key in groups[name]))


def reproduce(key: str, experiments: Experiments) -> Reproduction:
    """Measure a figure and lay its rows beside what the paper prints."""
    printed, measured = published_figures()[key], FIGURES[key](experiments)
    rows, unmeasured = [], set(printed.rows)
    for name, ours in measured.values.items():
        # `Trace 1, gain` is a `gain`: the whole name, or what is left behind a comma.
        parts = name.split(", ")
        tails = (", ".join(parts[index:]) for index in range(len(parts)))
        known = next((tail for tail in tails if tail in printed.rows), None)
        number = PublishedRow() if known is None else printed.rows[known]
        unit = printed.unit if number.unit is None else number.unit
        ranges = {
            constant: (min(*tried, ours), max(*tried, ours))
            for constant, tried in measured.moved.get(name, {}).items()
        }
        own = {"name": name, "ours": ours, "unit": unit, "moved": ranges}
        rows.append(FigureRow(**{**number.model_dump(), **own}))
        unmeasured.discard(known or "")
    assert not unmeasured, (key, unmeasured)
    # A constant that is marked as chosen has its sensitivity beside some number.
    beside = {constant for row in rows for constant in row.moved}
    assert beside == {each.name for each in printed.chosen}, (key, beside)
    facts = {
        "request_count": experiments.request_count,
        "interference": experiments.interference,
        **measured.facts,
    }
    traces = (SOURCES[name] for name in printed.traces)
    origins = [f"{source.name} ({source.provenance}): {source.origin}." for source in traces]
    return Reproduction(
        key=key,
        title=printed.title,
        source=printed.source.format_map(facts),
        rows=rows,
        chosen=[
            each.model_copy(update={"value": each.value.format_map(facts)})
            for each in printed.chosen
        ],
        surrogates=[*origins, *(text.format_map(facts) for text in printed.surrogates)],
        sensitivity=[
            FigureRow(name=name, ours=ours, unit=printed.unit_of_case(name))
            for name, ours in measured.sensitivity.items()
        ],
        remarks=[*(text.format_map(facts) for text in printed.remarks), *measured.remarks],
        draw=measured.draw,
    )
