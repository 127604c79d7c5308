"""A reproduced figure: published numbers beside ours, what was a surrogate, how far it bends.

All figures together are the page `docs/measurements/papers.md`, written by `aqua-sim paper all`.

A row without a published number is still shown: the reader sees what the figure has that the text
does not state. Differences are in the unit of the row, points for percentages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, computed_field

from aqua_cli.figures import figure
from aqua_cli.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PublishedRow(BaseModel, frozen=True, extra="forbid"):
    """What the paper prints for a row.

    Attributes:
        published: The number; None where it prints none.
        low, high: The range where it states a range instead.
        unit: None is that of the figure.
    """

    published: float | None = None
    unit: str | None = None
    low: float | None = None
    high: float | None = None


class FigureRow(PublishedRow, frozen=True, extra="ignore"):
    """One number of a figure."""

    name: str
    ours: float

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def difference(self) -> float | None:
        """Ours less published; for a range, how far outside it we are (0 inside)."""
        if self.published is not None:
            return self.ours - self.published
        if self.low is not None and self.ours < self.low:
            return self.ours - self.low
        if self.high is not None and self.ours > self.high:
            return self.ours - self.high
        return 0.0 if self.low is not None or self.high is not None else None

    @property
    def published_text(self) -> str:
        """The published number or range, for people."""
        if self.published is not None:
            return f"{self.published:g}"
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"at least {self.low:g}"
        return f"up to {self.high:g}" if self.high is not None else "not printed"

    @property
    def ours_text(self) -> str:
        """Our number with four significant digits, no exponent for everyday sizes."""
        big = abs(self.ours) >= 10_000  # noqa: PLR2004 - five digits before the point
        return f"{self.ours:,.0f}" if big else f"{self.ours:.4g}"

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table: name, published, ours, difference, unit."""
        difference = "" if self.difference is None else f"{self.difference:+.3g}"
        return self.name, self.published_text, self.ours_text, difference, self.unit or ""


@dataclass(frozen=True, slots=True)
class FigureMeasurement:
    """What a figure came out as here; `published.toml` says what the paper has in its place.

    Attributes:
        values: Our numbers by the names of their rows, in order.
        sensitivity: The same for cases that the paper does not state.
        facts: Values that the texts of `published.toml` name in braces.
        remarks: What only the measurement knows.
        draw: Draws on a Matplotlib figure.
    """

    values: Mapping[str, float]
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    draw: Callable[[Figure], None] | None = None


class Reproduction(BaseModel, frozen=True):
    """One table or figure.

    Attributes:
        key: Its name on the command line, for example `figure6`.
        surrogates: Inputs that are not the paper's.
        sensitivity: What changes when a constant that the paper does not give changes.
        remarks: Where and why we differ.
        draw: Draws on a Matplotlib figure; None where a table says it all, and in what was read
            back from JSON.
    """

    key: str
    title: str
    source: str
    rows: Sequence[FigureRow]
    surrogates: Sequence[str] = ()
    sensitivity: Sequence[FigureRow] = ()
    remarks: Sequence[str] = ()
    draw: Callable[[Any], None] | None = Field(default=None, repr=False, exclude=True)

    def to_markdown(self, *, image: str | None = None) -> str:
        """A section of `docs/measurements/papers.md`."""
        lines = [f"## {self.title}", "", f"{self.source}.", ""]
        if image:
            lines += [f"![{self.title}]({image})", ""]
        lines += ["| | published | ours | difference | unit |", "|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(row.cells)} |" for row in self.rows]
        if self.sensitivity:
            lines += ["", "Sensitivity:", "", "| case | ours | unit |", "|---|---:|---|"]
            lines += [f"| {row.name} | {row.ours_text} | {row.unit} |" for row in self.sensitivity]
        if self.surrogates:
            lines += ["", "Surrogates:", "", *(f"- {text}" for text in self.surrogates)]
        if self.remarks:
            lines += ["", *(f"- {text}" for text in self.remarks)]
        return "\n".join([*lines, ""])

    def save_plot(self, path: Path) -> bool:
        """Write the drawing as PNG; False when there is none."""
        if self.draw is None:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with figure(path) as drawing:
            self.draw(drawing)
        return True


HEADER: Final = """# The papers, simulated again

Written by `aqua-sim paper all -o docs/measurements/papers.md --plots docs/measurements/images`; do
not edit. Numbers are those of a simulator with the policies of `aqua_schedulers`, not of a GPU;
`docs/simulation.md` says what it models and how far it is off a real engine.

Columns: what the paper prints, what we get, the difference (ours less published; for a range, how
far outside). "not printed" marks numbers that the paper shows only as a picture.
"""


def page(made: Sequence[Reproduction], images: Mapping[str, str]) -> str:
    """The whole page as Markdown; `images` are paths of pictures, relative to it, by figure."""
    sections = [each.to_markdown(image=images.get(each.key)) for each in made]
    return "\n".join([HEADER, *sections])


def picture_of(key: str, folder: Path) -> Path:
    """Where the picture of a figure lies."""
    return folder / (f"{key}.png" if key.startswith("aqua") else f"blendserve-{key}.png")


def write_page(output: Path, made: Sequence[Reproduction], plots: Path | None) -> None:
    """Write the page, with those pictures that are in `plots`."""
    images = {
        each.key: os.path.relpath(picture_of(each.key, plots), output.parent)
        for each in made
        if plots is not None and picture_of(each.key, plots).is_file()
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page(made, images))
