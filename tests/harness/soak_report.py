"""What a soak has seen: a line a period in a file, and the verdict over all of them.

A soak that was interrupted goes on after the last period that has a line, with new processes; their
counts are compared among themselves only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from harness.growth import Trend, trend_of
from harness.soak_counts import JUDGED, Counts, Details

PERIODS: Final = 10


@dataclass(frozen=True)
class Period:
    """One period, or, with number 0, what was before the first of a stretch.

    Attributes:
        number: From 1.
        stretch: Which run of the program, from 0.
        counts: At its end, at rest.
        details: What counts consist of.
        tally: What members counted: bytes, steps.
        accounted: Bytes that are gone with consumers that were killed.
        faults: How many of each kind there were.
        works_s: While faults were at work.
        rests_s: Until everything was at rest.
        load: Of the machine, in processes.
    """

    number: int
    stretch: int
    counts: Counts
    details: Details
    tally: dict[str, int] = field(default_factory=dict)
    accounted: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    works_s: float = 0.0
    rests_s: float = 0.0
    load: float = 0.0


@dataclass(frozen=True)
class Growth:
    """Something that grows."""

    subject: str
    name: str
    first: float
    last: float
    trend: Trend
    parts: dict[str, int]

    def __str__(self) -> str:
        grown = ", ".join(f"{what} {number:+d}" for what, number in self.parts.items())
        return (
            f"{self.subject}: {self.name} grow by {self.trend.per_period:.2f} a period (at least "
            f"{self.trend.at_least:.2f}), from {self.first:g} to {self.last:g}"
            + (f": {grown}" if grown else "")
        )


class SoakReport:
    """The periods of one soak, in a file.

    Args:
        path: Of the file; what is there is taken over if it is of the same soak and not complete.
        header: Says which soak it is: commit, hours, seed, what is planted.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path: Final = path
        self.header: Final = header
        self.periods: list[Period] = []
        if path.exists():
            first, *lines = path.read_text().splitlines()
            periods = [Period(**json.loads(line)) for line in lines]
            if json.loads(first) == header and not _is_complete(periods):
                self.periods = periods
        self.stretch: Final = max((period.stretch for period in self.periods), default=-1) + 1
        if not self.periods:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n")

    @property
    def next_number(self) -> int:
        """Of the period to come."""
        return max((period.number for period in self.periods), default=0) + 1

    @property
    def is_complete(self) -> bool:
        """Whether all periods are there."""
        return _is_complete(self.periods)

    def add(self, period: Period) -> None:
        """Keep a period."""
        self.periods.append(period)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(period)) + "\n")

    def series(self, subject: str, name: str) -> list[list[float]]:
        """A count at the ends of periods, stretch by stretch."""
        after = [period for period in self.periods if period.number]
        return [
            [period.counts[subject][name] for period in periods]
            for _, periods in groupby(after, key=lambda period: period.stretch)
        ]

    def growths(self) -> list[Growth]:
        """What grows, worst first."""
        return sorted(self._growths(), key=lambda growth: -growth.trend.at_least)

    def _growths(self) -> Iterator[Growth]:
        for subject, counts in self.periods[-1].counts.items():
            for name in counts:
                stretches = self.series(subject, name)
                trend = trend_of(stretches)
                if name in JUDGED and trend is not None and trend.at_least > JUDGED[name]:
                    longest = max(stretches, key=len)
                    parts = self._parts(f"{subject} {name}", stretches.index(longest))
                    yield Growth(subject, name, longest[0], longest[-1], trend, parts)

    def _parts(self, count: str, index: int) -> dict[str, int]:
        """What of a count has grown over a stretch."""
        after = [period for period in self.periods if period.number]
        stretch = sorted({period.stretch for period in after})[index]
        found = [period.details.get(count, {}) for period in after if period.stretch == stretch]
        changes = {what: found[-1].get(what, 0) - found[0].get(what, 0) for what in found[-1]}
        return {what: change for what, change in changes.items() if change > 0}

    def losses(self) -> list[str]:
        """Bytes that are wrong or gone and should not be, a sentence each."""
        return [
            f"period {period.number}: {period.tally[kind]} bytes {kind}"
            for period in self.periods
            for kind in ("wrong", "lost", "missing")
            if period.tally.get(kind)
        ]

    def total(self, kind: str) -> int:
        """Sum over the members' counts."""
        return sum(period.tally.get(kind, 0) for period in self.periods)

    def summary(self) -> dict[str, Any]:
        """Everything that a program wants to know."""
        before, *_, after = self.periods
        faults: dict[str, int] = {}
        for period in self.periods:
            for kind, number in period.faults.items():
                faults[kind] = faults.get(kind, 0) + number
        return self.header | {
            "periods": self.next_number - 1,
            "stretches": self.periods[-1].stretch + 1,
            "complete": self.is_complete,
            "judged": any(
                map(trend_of, [self.series(s, n) for s, c in after.counts.items() for n in c])
            ),
            "works_s": round(sum(period.works_s for period in self.periods), 1),
            "rests_s": round(sum(period.rests_s for period in self.periods), 1),
            "load": [period.load for period in self.periods],
            "faults": faults,
            "steps": self.total("steps"),
            "stored_bytes": self.total("stored"),
            "verified_bytes": self.total("verified"),
            "wrong_bytes": self.total("wrong"),
            "lost_bytes_unaccounted": self.total("lost") + self.total("missing"),
            "lost_bytes_with_killed_consumers": sum(p.accounted for p in self.periods),
            "before": before.counts,
            "after": after.counts,
            "grows": [str(growth) for growth in self.growths()],
            "losses": self.losses(),
        }


def _is_complete(periods: list[Period]) -> bool:
    return max((period.number for period in periods), default=0) >= PERIODS
