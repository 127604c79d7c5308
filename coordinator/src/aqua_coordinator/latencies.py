"""Durations of what happens thousands of times a second, counted by the loop's thread alone.

prometheus_client's own histogram takes a lock for each of its numbers and looks at one bucket after
the other: two of them took a fortieth of what a coordinator spends on a grant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily

BUCKETS_S: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""From the time of a script in Redis to the store's timeout."""


class LatencyHistogram:
    """A histogram of seconds, for one thread that counts and any that scrapes."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        self._description = (name, documentation)
        self._labels = labels
        self._rows: dict[tuple[str, ...], list[float]] = {}
        registry.register(self)

    def observe(self, values: tuple[str, ...], seconds: float) -> None:
        """Count one, under the values of its labels."""
        row = self._rows.get(values)
        if row is None:
            row = self._rows[values] = [0.0] * (len(BUCKETS_S) + 2)
        row[bisect_left(BUCKETS_S, seconds)] += 1
        row[-1] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What has been counted, for a scrape."""
        family = HistogramMetricFamily(*self._description, labels=self._labels)
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        for values, (*counts, total_s) in self._rows.copy().items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(values, buckets, sum_value=total_s)
        yield family
