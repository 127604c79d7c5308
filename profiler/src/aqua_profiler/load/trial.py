"""A trial: one stretch of open-loop load, and when its requests are sent.

Arrivals are Poisson, at a constant rate or along an exponential ramp. Those of a rate that changes
are those of rate one, stretched by the inverse of the cumulated rate. The schedule depends on the
trial alone, never on answers: that is what open loop means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """One stretch of open-loop load.

    Attributes:
        rate_per_s: Mean rate of Poisson arrivals; of a ramp, where it starts.
        seed: Of arrivals and lengths.
        doubling_s: A ramp: the rate doubles in that time, until the endpoint falls behind.
        max_rate_per_s: Where a ramp ends.
        enough_requests: Stop after so many, if the load has become steady.
        enough_backlog: Stop after so many first tokens while requests queued; 0 for no such end.
        patience: Stop when the oldest request has waited that many times the limit.
        least_s: No verdict of "enough" before.
        most_s: The end in any case.
        to_the_end: Nothing else ends it: a burst goes on however long the queue.
    """

    rate_per_s: float
    seed: int
    doubling_s: float | None = None
    max_rate_per_s: float = 1e9
    enough_requests: int = 200
    enough_backlog: int = 0
    patience: float = 4.0
    least_s: float = 5.0
    most_s: float = 120.0
    to_the_end: bool = False


class ArrivalProcess:
    """Send times of a trial in seconds from its start, in order."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._generator = random.Random(f"arrivals {trial.seed}")
        self._frozen_since_s = math.inf
        self._frozen_s = 0.0
        self._last_s = 0.0

    def __iter__(self) -> Iterator[float]:
        """Endless; one pass."""
        while True:
            self._last_s = self._after(self._last_s, self._generator.expovariate(1.0))
            yield self._last_s

    def rate_at(self, at_s: float) -> float:
        """Requests a second that are due at that time."""
        trial = self._trial
        if trial.doubling_s is None:
            return trial.rate_per_s
        doublings = (min(at_s, self._frozen_since_s) - self._frozen_s) / trial.doubling_s
        if doublings >= math.log2(trial.max_rate_per_s / trial.rate_per_s):
            return trial.max_rate_per_s
        return float(trial.rate_per_s * 2.0**doublings)

    def freeze(self, at_s: float) -> None:
        """Let a ramp go on at the rate it has then, until it thaws."""
        self._frozen_since_s = min(self._frozen_since_s, at_s)

    def thaw(self, at_s: float) -> None:
        """Let a frozen ramp rise again from where it was: it was a hiccup."""
        if self._frozen_since_s < at_s:
            self._frozen_s += at_s - self._frozen_since_s
            self._frozen_since_s = math.inf

    def _after(self, last_s: float, work: float) -> float:
        """The time until which `work` arrivals are expected from `last_s` on."""
        doubling_s, rate = self._trial.doubling_s, self.rate_at(last_s)
        is_constant = last_s >= self._frozen_since_s or rate >= self._trial.max_rate_per_s
        if doubling_s is None or is_constant:
            return last_s + work / rate
        growth = math.log(2) / doubling_s
        return last_s + math.log1p(work * growth / rate) / growth
