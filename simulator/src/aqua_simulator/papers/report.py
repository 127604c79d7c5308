"""A reproduced figure: published numbers beside ours, what was a surrogate, how far it bends.

The figures of one command are a page, as `docs/measurements/papers.md` and `conserve.md` are.

A row without a published number is still shown: the reader sees what the figure has that the text
does not state. Differences are in the unit of the row, points for percentages, and a share of what
is published.

"Up to" and "at least" are the extreme of several numbers, and the extreme is a point: ours is
compared with it, on whichever side it lies. Falling short of "up to 1.44" is a miss like any other.
Only of a range, least to greatest, any place inside is as published.

A constant that was chosen with the printed result in view makes a row no check of the paper. Such
constants are listed above the table, and beside each number that they move stands what it becomes
with other values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, computed_field

from aqua_cli.figures import figure
from aqua_cli.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MISS_SHARE: Final = 0.1
"""Of what is published: a row that is further off is listed as a miss at the head of the page.
Doubled, a fifth off would go unlisted."""


class PublishedRow(BaseModel, frozen=True, extra="forbid"):
    """What the paper prints for a row.

    Attributes:
        published: The number; None where it prints none.
        low: What it states "at least", the least of several; with `high`, a range.
        high: What it states "up to", the greatest of several.
        unit: None is that of the figure.
        digit: Value of the last printed digit, where half of it is more than a tenth of the number.
        fitted: A constant was chosen to meet this number, so it checks nothing.
        bound: `low` and `high` are no extremes but bounds to keep to: inside is well, any step
            outside a miss.
        held: A throughput that other figures of the paper agree with, so that it has to be within
            `MISS_SHARE`; why others are not is in the remarks.
    """

    published: float | None = None
    unit: str | None = None
    low: float | None = None
    high: float | None = None
    digit: float = 0.0
    fitted: bool = False
    bound: bool = False
    held: bool = False


class FittedConstant(BaseModel, frozen=True, extra="forbid"):
    """A constant that the paper does not give, chosen with its results in view.

    Attributes:
        value: What it is in the table.
        why: What it was chosen to meet, or what else speaks for it.
        tried: The other values.
    """

    name: str
    value: str
    why: str
    tried: str


class FigureRow(PublishedRow, frozen=True, extra="ignore"):
    """One number of a figure.

    Attributes:
        moved: By chosen constant, the least and greatest that ours becomes with its other values.
    """

    name: str
    ours: float
    moved: Mapping[str, tuple[float, float]] = {}

    @property
    def reference(self) -> float | None:
        """The published point that ours is compared with; of a range, its nearest."""
        if self.published is not None:
            return self.published
        if self.bound or (self.low is not None and self.high is not None):
            low = -inf if self.low is None else self.low
            return min(max(self.ours, low), inf if self.high is None else self.high)
        return self.high if self.low is None else self.low

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def difference(self) -> float | None:
        """Ours less the published point; 0 for a number inside a range."""
        return None if self.reference is None else self.ours - self.reference

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def is_missed(self) -> bool:
        """Whether ours is further from what is published than `MISS_SHARE` of it."""
        if self.reference is None or self.difference is None:
            return False
        if self.bound:
            return self.difference != 0.0
        return abs(self.difference) > max(MISS_SHARE * abs(self.reference), self.digit / 2)

    @property
    def difference_text(self) -> str:
        """The difference for people: with its share of what is published, never a bare `+0`."""
        if self.reference is None or self.difference is None:
            return ""
        if self.difference == 0.0:
            is_range = self.bound or (self.low is not None and self.high is not None)
            text = "inside" if is_range else "as published"
        else:
            share = f" ({self.difference / abs(self.reference):+.1%})" if self.reference else ""
            text = f"{self.difference:+.3g}{share}"
        return text + ", fitted" * self.fitted + ", held" * self.held

    @property
    def moved_text(self) -> str:
        """What other values of the chosen constants make of ours."""
        ranges = (
            f"{_short(low)} to {_short(high)} ({of})" for of, (low, high) in self.moved.items()
        )
        return "; ".join(ranges)

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
        return _short(self.ours)

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table: name, published, ours, difference, unit."""
        return self.name, self.published_text, self.ours_text, self.difference_text, self.unit or ""


def _short(value: float) -> str:
    big = abs(value) >= 10_000  # noqa: PLR2004 - five digits before the point
    return f"{value:,.0f}" if big else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class FigureMeasurement:
    """What a figure came out as here; `published.toml` says what the paper has in its place.

    Attributes:
        values: Our numbers by the names of their rows, in order.
        sensitivity: The same for cases that the paper does not state.
        facts: Values that the texts of `published.toml` name in braces.
        remarks: What only the measurement knows.
        draw: Draws on a Matplotlib figure.
        moved: By row and by chosen constant of `published.toml`, our number with its other values.
    """

    values: Mapping[str, float]
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    draw: Callable[[Figure], None] | None = None
    moved: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


class Reproduction(BaseModel, frozen=True):
    """One table or figure.

    Attributes:
        key: Its name on the command line, for example `figure6`.
        chosen: Constants that were chosen with the paper's results in view.
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
    chosen: Sequence[FittedConstant] = ()
    surrogates: Sequence[str] = ()
    sensitivity: Sequence[FigureRow] = ()
    remarks: Sequence[str] = ()
    draw: Callable[[Any], None] | None = Field(default=None, repr=False, exclude=True)

    def to_markdown(self, *, image: str | None = None) -> str:
        """A section of the page."""
        lines = [f"## {self.title}", "", f"{self.source}.", ""]
        if image:
            lines += [f"![{self.title}]({image})", ""]
        if self.chosen:
            lines += ["Constants chosen knowing the result:", ""]
            lines += [
                f"- {one.name}, {one.value}: {one.why} Tried: {one.tried}." for one in self.chosen
            ]
            lines += [""]
        lines += [f"| {' | '.join(self.columns)} |", "|---|---:|---:|---:|---|"]
        if self.columns[-1] != "unit":
            lines[-1] += "---|"
        lines += [f"| {' | '.join(cells)} |" for cells in self.table]
        if self.sensitivity:
            lines += ["", "Sensitivity:", "", "| case | ours | unit |", "|---|---:|---|"]
            lines += [f"| {row.name} | {row.ours_text} | {row.unit} |" for row in self.sensitivity]
        if self.surrogates:
            lines += ["", "Surrogates:", "", *(f"- {text}" for text in self.surrogates)]
        if self.remarks:
            lines += ["", *(f"- {text}" for text in self.remarks)]
        return "\n".join([*lines, ""])

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the table; the last one is there where a chosen constant moves a row."""
        columns = ("", "published", "ours", "difference", "unit")
        return (
            (*columns, "with other constants") if any(row.moved for row in self.rows) else columns
        )

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Cells of the rows, in the order of the columns."""
        return [(*row.cells, row.moved_text)[: len(self.columns)] for row in self.rows]

    def save_plot(self, path: Path) -> bool:
        """Write the drawing as PNG; False when there is none."""
        if self.draw is None:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with figure(path) as drawing:
            self.draw(drawing)
        return True


HEADER: Final = """# The papers, simulated again

Written by `aqua-sim paper {names}` with `-o` and `--plots`; do not edit. Numbers are those of a
simulator with the policies of `aqua_schedulers`, not of a GPU; `docs/simulation.md` says what it
models and how far it is off a real engine.

Columns: what the paper prints, what we get, the difference (ours less published, and its share).
"Up to" and "at least" are the extremes of several numbers and compared as points, so that falling
short of them shows, or bounds to keep to, and any number beyond one is a miss; a number within a
range or a bound is "inside". "Fitted" marks numbers that a constant was chosen to meet: they check
nothing. "Not printed" marks numbers that the paper shows only as a picture.
"""


def misses(made: Sequence[Reproduction]) -> list[str]:
    """The table of all rows that are off by more than `MISS_SHARE`, as lines of Markdown."""
    found = [(each, row) for each in made for row in each.rows if row.is_missed]
    count = sum(row.reference is not None for each in made for row in each.rows)
    lines = ["## Misses", ""]
    lines += [f"{len(found)} of {count} printed numbers are off by more than {MISS_SHARE:.0%}.", ""]
    held = [row for each in made for row in each.rows if row.held]
    if held:
        kept = sum(not row.is_missed for row in held)
        lines += [
            (
                f"Of the {len(held)} throughputs that the paper's other figures agree with "
                f'("held"), {kept} are within {MISS_SHARE:.0%}.'
            ),
            "",
        ]
    if found:
        lines += [
            "| figure | | published | ours | difference | unit |",
            "|---|---|---:|---:|---:|---|",
        ]
        lines += [
            f"| {each.title.partition(':')[0]} | {' | '.join(row.cells)} |" for each, row in found
        ]
        lines += [""]
    return lines


def page(
    made: Sequence[Reproduction], images: Mapping[str, str], names: Sequence[str] = ("all",)
) -> str:
    """The whole page as Markdown.

    Args:
        images: Paths of pictures, relative to the page, by figure.
        names: What the figures were asked for by.
    """
    sections = [each.to_markdown(image=images.get(each.key)) for each in made]
    return "\n".join([HEADER.format(names=" ".join(names)), *misses(made), *sections])


def picture_of(key: str, folder: Path) -> Path:
    """Where the picture of a figure lies."""
    has_paper = key.startswith(("aqua", "conserve"))
    return folder / (f"{key}.png" if has_paper else f"blendserve-{key}.png")


def write_page(
    output: Path, made: Sequence[Reproduction], plots: Path | None, names: Sequence[str]
) -> None:
    """Write the page, with those pictures that are in `plots`."""
    images = {
        each.key: os.path.relpath(picture_of(each.key, plots), output.parent)
        for each in made
        if plots is not None and picture_of(each.key, plots).is_file()
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page(made, images, names))
