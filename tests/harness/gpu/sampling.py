"""Numbers out of repetitions: medians with an interval that holds for any distribution.

A figure is the median of several rounds. Its interval lies between two of the values as they are
ordered, chosen such that it contains the true median with at least 95% where there are six rounds
or more: each round falls below the median like a coin, whatever the disturbance is. Fewer rounds
give their whole range, which promises less.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Figure:
    """A median, and between what the true one is."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """The figure of at least one value."""
        ordered = sorted(values)
        outer = _outer_rank(len(ordered))
        return cls(statistics.median(ordered), ordered[outer], ordered[-1 - outer])

    def as_json(self) -> dict[str, float]:
        """As records keep it."""
        return asdict(self)

    def surely_below(self, other: Figure) -> bool:
        """Whether the intervals do not touch and this one is the lower."""
        return self.high < other.low

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.low)} to {digits(self.high)})"


def _outer_rank(count: int) -> int:
    """How many values at each end lie outside the interval."""
    outer = 0
    # The chance that fewer than `outer + 2` of the values lie below the median, twice.
    while 2 * sum(math.comb(count, k) for k in range(outer + 2)) / 2**count <= 1 - CONFIDENCE:
        outer += 1
    return outer


def digits(number: float) -> str:
    """Three digits that count, without an exponent."""
    if not math.isfinite(number) or number == 0:
        return f"{number:.0f}"
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{places}f}"


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def durations(work: Callable[[], Any], rounds: int) -> Figure:
    """Milliseconds of a call, the first one left out: it warms kernels and links up."""
    work()
    return Figure.of([milliseconds(work) for _ in range(rounds)])


def rates(nbytes: int, work: Callable[[], Any], rounds: int) -> Figure:
    """GB/s (1e9 bytes a second) of a call that moves `nbytes`, likewise."""
    work()
    return Figure.of([nbytes / milliseconds(work) / 1e6 for _ in range(rounds)])
