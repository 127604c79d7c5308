"""Whether requests come faster than an engine sustains, and whether they do not any more.

Pure: counts of arrivals and the time go in, and what is remembered is a value. A rate over a window
would be the plain way, and a bad one: of 25 requests that arrive in ten seconds on average, there
are 30 or more in every sixth window by chance. So counts are added up as evidence.

A *chart* is a CUSUM of Poisson counts between two rates, the one before and the one after a change:
each arrival weighs the logarithm of their ratio, time weighs the difference against it, and the sum
never falls below zero. It crosses a threshold soon after a change, and by chance about as seldom as
the threshold says. The threshold is not tuned, it follows: with D0 and D1 the divergences per unit
of time of the rate before from the one after and back, chance crosses h about D0^2 / D1 * exp(-h)
times per unit (Cramer's constant of the crossing, which for these jumps is D0 / D1). Two false
alarms an hour are allowed, divided among the charts; that is more evidence at 100 requests/s, where
an hour has many chances, than at 1.

Three charts look for a rise at once, since its size is not known before: to twice the steady
rate, half as much again, and a fifth, from which the objective is missed. Two look for the way back
afterwards. Between them nothing happens, and a rate in the middle moves neither.

Arrivals that come in bursts carry less evidence each. How much is learned from the counts of
successive windows: a variance of four times the mean makes four arrivals count as one. Slow drifts
hardly show in differences of neighbours, and single steps are bounded.

Not promised: that exactly at the steady rate chance is as seldom. It lies between the rates that
the charts tell apart, and memory goes back and forth some times an hour there.

Source: ours; Aqua section 6 says only that memory is reclaimed when "the workload has increased".
CUSUM: Page 1954; for counts Lucas 1985; its optimality Lorden 1971 and Moustakides 1986; the tail
Asmussen & Albrecher, Ruin Probabilities, IV.5; the dispersion's estimator von Neumann 1941.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Final

FALSE_ALARM_SPACING_S: Final = 1800.0
"""Mean seconds between false alarms at nine tenths of the steady rate, at least: two an hour take
memory from consumers about as often as a real change of the load. Doubled, a rise to twice the rate
is noticed a tenth later."""

FALSE_ALARM_ARRIVALS: Final = 2100.0
"""Requests at the steady rate between false alarms, at least: the way back takes about a hundred,
so a twentieth of the time is spent on it at most. Doubled, engines of less than a request a second
notice a rise a tenth later."""

FALSE_CALM_SPACING_S: Final = 600.0
"""Mean seconds between false signs of calm while a fifth too many come: each costs consumers one
offer that is withdrawn. Doubled, memory is offered a sixth later after a real burst."""

FALSE_CALM_ARRIVALS: Final = 700.0
"""Requests at the steady rate between them, at least; a third of `FALSE_ALARM_ARRIVALS`, because
what is at stake is the consumers' time. Doubled, slow engines offer a quarter later."""

WINDOW_ARRIVALS: Final = 50.0
"""Requests at the steady rate in a window of counts: longer than bursts, and short beside hours.
Doubled, bursts of twice the length are seen for what they are, and known in twice the time."""

WINDOW_MEMORY: Final = 100.0
"""Windows that the dispersion remembers: half an hour at 2.5 requests/s. Doubled, the estimate errs
by 12% instead of 17%, and habits of arrivals are noticed later."""

PRIOR_WINDOWS: Final = 10.0
"""Windows that Poisson arrivals are believed to have been seen for at the start: without them the
first two differences decide. Doubled, bursts are taken for rises some minutes longer at first."""

SURENESS: Final = 2.0
"""Standard errors from which a dispersion above one is believed. Doubled, mild bursts count as
chance, and give more false alarms."""

MOST_OF_MEAN: Final = 8.0
"""One difference counts so many times the dispersion at most: chance exceeds it once in 200 times,
and a step of the load exceeds it by far. Doubled, one step delays the next alarm by twice as much.
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A CUSUM between two rates, which are given in terms of the steady rate.

    Attributes:
        before: The rate that is not to be reported.
        after: The rate that is looked for, higher or lower.
        share: Of the false alarms allowed.
        weight: Of an arrival.
    """

    before: float
    after: float
    share: float
    weight: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", math.log(self.after / self.before))

    def added(self, evidence: float, count: int, expected: float) -> float:
        """The sum after `count` arrivals in the time in which the steady rate brings `expected`."""
        return max(0.0, evidence + count * self.weight - (self.after - self.before) * expected)

    def threshold(self, spacing: float, dispersion: float) -> float:
        """The sum that chance reaches once in `spacing` arrivals at the steady rate.

        Args:
            dispersion: Variance of counts in terms of their mean.
        """
        at_first = _divergence(self.before, self.after)
        chances = spacing / self.share * at_first**2 / _divergence(self.after, self.before)
        return dispersion * math.log(max(chances / dispersion, math.e))


def _divergence(rate: float, other: float) -> float:
    """Evidence per unit of time that Poisson arrivals give for their rate and against another."""
    return rate * math.log(rate / other) - (rate - other)


RISES: Final = (Chart(0.9, 2.0, 0.5), Chart(0.9, 1.5, 0.25), Chart(1.0, 1.2, 0.25))
"""From nine tenths of the steady rate, since engines are planned to run below what they sustain. A
fifth too much is told from the steady rate itself: from below it, that would alarm at it."""

FALLS: Final = (Chart(1.2, 0.9, 0.5), Chart(1.2, 0.5, 0.5))
"""From the least that is pressure to a normal rate, and, sooner, to an engine that has little to
do."""


@dataclass(frozen=True, slots=True)
class Dispersion:
    """How much more counts of arrivals vary than by chance alone; 1 for Poisson arrivals.

    Attributes:
        window_expected: Arrivals that the steady rate brings in the window under way, so far.
        window_count: Arrivals in it.
        last_count: Arrivals of the window before; None in the first.
        squares: Sum of squared differences of neighbours, in terms of their mean.
        weight: Differences in it; old ones count less and less.
    """

    window_expected: float = 0.0
    window_count: int = 0
    last_count: int | None = None
    squares: float = 0.0
    weight: float = 0.0

    def seen(self, count: int, expected: float) -> Dispersion:
        """Count on, and close a window that is long enough."""
        expected += self.window_expected
        count += self.window_count
        if expected < WINDOW_ARRIVALS:
            return Dispersion(expected, count, self.last_count, self.squares, self.weight)
        closed = replace(self, window_expected=0.0, window_count=0, last_count=count)
        if self.last_count is None or not count + self.last_count:
            return closed
        square = (count - self.last_count) ** 2 / (count + self.last_count)
        kept = 1.0 - 1.0 / WINDOW_MEMORY
        squares = kept * self.squares + min(square, MOST_OF_MEAN * max(1.0, self._mean))
        return replace(closed, squares=squares, weight=kept * self.weight + 1.0)

    @property
    def factor(self) -> float:
        """Variance in terms of the mean, where it is surely more than 1; else 1."""
        # A squared difference varies by 2, and neighbours share a window.
        by_chance = SURENESS * math.sqrt(3.0 / (self.weight + PRIOR_WINDOWS))
        return self._mean if self._mean > 1.0 + by_chance else 1.0

    @property
    def _mean(self) -> float:
        return (self.squares + PRIOR_WINDOWS) / (self.weight + PRIOR_WINDOWS)


@dataclass(frozen=True, slots=True)
class ArrivalWatch:
    """What is remembered of arrivals between two looks.

    Attributes:
        at_s: Time of the last look; None before the first.
        arrived: Requests that had arrived by then since the engine began.
        is_fast: More come than the steady rate, and nothing has shown since that they do not.
        evidence: Sums of the charts that matter: of `FALLS` while it is fast, else of `RISES`.
        dispersion: Of the arrivals.
    """

    at_s: float | None = None
    arrived: int = 0
    is_fast: bool = False
    evidence: tuple[float, ...] = (0.0,) * len(RISES)
    dispersion: Dispersion = Dispersion()

    def seen(self, arrived: int, steady_per_s: float, now_s: float) -> ArrivalWatch:
        """Look at the count of arrivals.

        Args:
            arrived: Requests that have arrived since the engine began. Fewer than before: the
                engine began anew, and these came in no time that is known.
            steady_per_s: The highest rate within the objective.
            now_s: Monotonic seconds.
        """
        if self.at_s is None or arrived < self.arrived:
            return replace(self, at_s=now_s, arrived=arrived)
        count, expected = arrived - self.arrived, steady_per_s * (now_s - self.at_s)
        dispersion = self.dispersion.seen(count, expected)
        charts = FALLS if self.is_fast else RISES
        evidence = tuple(
            chart.added(sum_, count, expected)
            for chart, sum_ in zip(charts, self.evidence, strict=True)
        )
        looked = ArrivalWatch(now_s, arrived, self.is_fast, evidence, dispersion)
        factor = dispersion.factor
        if max(evidence) < factor:
            return looked  # Below any threshold, as nearly always.
        spacing = self._spacing(steady_per_s)
        thresholds = (chart.threshold(spacing, factor) for chart in charts)
        if any(map(operator.ge, evidence, thresholds)):
            return looked.turned(is_fast=not self.is_fast)
        return looked

    def turned(self, *, is_fast: bool) -> ArrivalWatch:
        """Take the load for this from now on, and begin to look for the opposite."""
        charts = FALLS if is_fast else RISES
        return replace(self, is_fast=is_fast, evidence=(0.0,) * len(charts))

    def _spacing(self, steady_per_s: float) -> float:
        if self.is_fast:
            return max(FALSE_CALM_SPACING_S * steady_per_s, FALSE_CALM_ARRIVALS)
        return max(FALSE_ALARM_SPACING_S * steady_per_s, FALSE_ALARM_ARRIVALS)
