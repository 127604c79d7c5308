"""When requests are sent: Poisson arrivals at a constant rate or along an exponential ramp.

Arrivals of a rate that changes are those of rate one, stretched by the inverse of the cumulated
rate. The schedule depends on the trial alone, never on answers: that is what open loop means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from aqua_profiler.objective import Trial


class ArrivalProcess:
    """Send times of a trial in seconds from its start, in order.

    Args:
        trial: Which stretch of load.
    """

    def __init__(self, trial: Trial) -> None:
        self._run = trial
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
        trial = self._run
        if trial.doubling_s is None:
            return trial.rate_per_s
        doublings = (min(at_s, self._frozen_since_s) - self._frozen_s) / trial.doubling_s
        ratio = trial.max_rate_per_s / trial.rate_per_s
        if doublings >= math.log2(ratio):
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
        trial = self._run
        if trial.doubling_s is None:
            return last_s + work / trial.rate_per_s
        rate = self.rate_at(last_s)
        growth = math.log(2) / trial.doubling_s
        if last_s >= self._frozen_since_s or rate >= trial.max_rate_per_s:
            return last_s + work / rate
        return last_s + math.log1p(work * growth / rate) / growth
