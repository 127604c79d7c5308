"""What a step of `make gpu` has to say: tables, checks, figures by name; or why it did not run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass
class Table:
    """Rows for the page; cells are text."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """One more row."""
        self.rows.append([str(cell) for cell in cells])


@dataclass
class Check:
    """One thing that must be so."""

    what: str
    is_met: bool
    found: str


@dataclass
class Curve:
    """A line of a plot: one figure at each x, with its interval."""

    plot: str
    label: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


class NotRunError(Exception):
    """The step cannot run on this machine; says what it lacks."""


@dataclass
class Outcome:
    """Of one step.

    Attributes:
        why: Of a step that did not run or broke off; else empty.
        figures: Numbers by name, which predictions and thresholds are held against.
        notes: Sentences for the page.
    """

    state: State = State.PASSED
    why: str = ""
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> Table:
        """A new table."""
        self.tables.append(Table(title, list(columns)))
        return self.tables[-1]

    def curve(self, plot: str, label: str) -> Curve:
        """A new line."""
        self.curves.append(Curve(plot, label))
        return self.curves[-1]

    def check(self, what: str, is_met: bool, found: object) -> None:
        """Something that must be so; the step fails where it is not."""
        self.checks.append(Check(what, bool(is_met), str(found)))
        if not is_met:
            self.state = State.FAILED

    def require_numbers(self) -> None:
        """Leave out what no record can hold, infinities and the like; the step fails by them."""
        for name in [n for n, value in self.figures.items() if not math.isfinite(value)]:
            self.check(f"{name} is a number", False, self.figures.pop(name))
        for curve in list(self.curves):
            if not all(map(math.isfinite, (*curve.x, *curve.y, *curve.low, *curve.high))):
                self.check(f"{curve.plot}, {curve.label}: numbers", False, curve.y)
                self.curves.remove(curve)

    def as_json(self) -> dict[str, Any]:
        """As records keep it."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Outcome:
        """What `as_json` gave."""
        return cls(
            State(raw["state"]),
            raw["why"],
            [Table(**table) for table in raw["tables"]],
            [Check(**check) for check in raw["checks"]],
            [Curve(**curve) for curve in raw["curves"]],
            raw["figures"],
            raw["notes"],
        )
