"""A reproduced figure: rows of published against ours, what was a surrogate, how far it bends.

A row without a published number is still shown: the reader sees what the figure has that the text
does not state. Differences are in the unit of the row, points for percentages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqua_simulator.plots import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        published: The paper's number; None where it prints none.
        low, high: The paper's range where it states a range instead.
    """

    name: str
    ours: float
    published: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None

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


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One table or figure.

    Attributes:
        key: Its name on the command line, for example `figure6`.
        rows: The numbers.
        surrogates: Inputs that are not the paper's.
        sensitivity: What changes when a constant that the paper does not give changes.
        remarks: Where and why we differ.
        draw: Draws the figure; None where a table says it all.
    """

    key: str
    title: str
    source: str
    rows: Sequence[Row]
    surrogates: Sequence[str] = ()
    sensitivity: Sequence[Row] = ()
    remarks: Sequence[str] = ()
    draw: Callable[[Figure], None] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Everything but the drawing."""
        return {
            "key": self.key,
            "title": self.title,
            "source": self.source,
            "rows": [_row_json(row) for row in self.rows],
            "surrogates": list(self.surrogates),
            "sensitivity": [_row_json(row) for row in self.sensitivity],
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Reproduction:
        """What `to_json` wrote; it cannot be drawn again."""
        return cls(
            data["key"],
            data["title"],
            data["source"],
            [_row_from_json(row) for row in data["rows"]],
            data["surrogates"],
            [_row_from_json(row) for row in data["sensitivity"]],
            data["remarks"],
        )

    def to_markdown(self, *, image: str | None = None) -> str:
        """A section of `docs/measurements/papers.md`."""
        lines = [f"## {self.title}", "", f"{self.source}.", ""]
        if image:
            lines += [f"![{self.title}]({image})", ""]
        lines += _table(self.rows)
        if self.sensitivity:
            lines += ["", "Sensitivity:", "", *_table(self.sensitivity, published=False)]
        if self.surrogates:
            lines += ["", "Surrogates:", "", *(f"- {text}" for text in self.surrogates)]
        if self.remarks:
            lines += ["", *(f"- {text}" for text in self.remarks)]
        return "\n".join([*lines, ""])

    def save_plot(self, path: Path) -> bool:
        """Write the drawing as PNG; False when there is none."""
        if self.draw is None:
            return False
        save(path, self.draw)
        return True


def _row_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "difference": row.difference}


def _row_from_json(data: dict[str, Any]) -> Row:
    return Row(**{name: value for name, value in data.items() if name != "difference"})


def _table(rows: Sequence[Row], *, published: bool = True) -> list[str]:
    if not published:
        body = [f"| {row.name} | {number(row.ours)} | {row.unit} |" for row in rows]
        return ["| case | ours | unit |", "|---|---:|---|", *body]
    body = [
        f"| {row.name} | {row.published_text} | {number(row.ours)} | "
        f"{'' if row.difference is None else format(row.difference, '+.3g')} | {row.unit} |"
        for row in rows
    ]
    return ["| | published | ours | difference | unit |", "|---|---:|---:|---:|---|", *body]


def number(value: float) -> str:
    """Four significant digits, no exponent for everyday sizes."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"  # noqa: PLR2004
