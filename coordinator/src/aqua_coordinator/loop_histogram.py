"""Histograms of what happens with every request, counted without the client's machinery.

prometheus_client's metrics take a lock and walk the buckets for each observation. All of ours are
made on the loop, so plain numbers do, for a fifth of the processor time: 0.7 us a request instead
of 3.2. A scrape gets them by a collector, as the client documents for what is counted elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class LoopHistogram:
    """How many there were of each length, and their sum; of one loop."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def add(self, other: LoopHistogram) -> None:
        """Count those of `other` as well."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum_s += other.sum_s


class LabelHistogram:
    """Those of a loop by the values of labels.

    Args:
        bounds_s: Upper bounds of its buckets, without infinity.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds_s: Sequence[float]
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds: Final = bounds_s
        self._les: Final = [*map(floatToGoString, bounds_s), "+Inf"]
        self._of: Final[dict[tuple[str, ...], LoopHistogram]] = {}

    def labels(self, *values: str) -> LoopHistogram:
        """Those of these values; the same object each time."""
        if (found := self._of.get(values)) is None:
            found = self._of[values] = LoopHistogram(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a scrape shows."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, histogram in self._of.items():
            buckets = list(zip(self._les, accumulate(histogram.counts), strict=True))
            family.add_metric(values, buckets, histogram.sum_s)
        yield family
