"""The best placement so far by (coverage, balance), and what bounds it.

Coverage counts first, but not to the last kilobyte: rounding noise of one part in a thousand must
not cost balance. So coverage within `alike` of the best counts as equal, and near the bound, where
nobody could gain more than `near`, balance decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.coverage.covering import coverage_gb
from aqua_placer.problem.columns import Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.thresholds import Mode
from aqua_placer.search.dealing import worst
from aqua_placer.search.exchange import Layout
from aqua_placer.solvers.portfolio import Incumbent

COVERAGE_TOLERANCE: Final = 3e-4
"""Coverage given up at most for balance, relative to the bound."""

DISTINCT_TOLERANCE: Final = 8e-4
"""The same where all sizes differ: every step towards balance costs some coverage there."""


@dataclass
class Harvest:
    """What solving for coverage has come to.

    Attributes:
        balance: The min-max optimum, as far as it is known.
        most_gb: The most that any placement so far covers; `placement` may cover a little less.
        goal: The balance at which nothing is left to do.
    """

    instance: Instance
    budget: Budget
    bound_gb: float
    balance: Incumbent
    placement: Ints
    covered_gb: float = 0.0
    most_gb: float = 0.0
    goal: float = np.inf

    def offer(self, placement: Ints, stage: str) -> bool:
        """Take the placement if it covers more, or as much and is better balanced."""
        layout = Layout(self.instance, placement)
        covered = float(coverage_gb(self.instance, layout.slots, layout.class_of).sum())
        better = self._better(covered, placement)
        if better:
            self.placement, self.covered_gb = placement, covered
        self.most_gb = max(self.most_gb, covered)
        self.budget.report(stage, self.covered_gb, self.bound_gb)
        return better

    @property
    def enough_gb(self) -> float:
        """Coverage from which balance decides: near the best, or near the bound."""
        alike = self.most_gb - COVERAGE_TOLERANCE * self.bound_gb - GRAIN_GB
        if self.instance.repeats_sizes:
            return alike
        return min(alike, self.bound_gb * (1 - DISTINCT_TOLERANCE))

    def _better(self, covered: float, placement: Ints) -> bool:
        self.most_gb = max(self.most_gb, covered)
        if min(covered, self.covered_gb) < self.enough_gb:
            return covered > self.covered_gb
        mine, theirs = self._value(self.placement), self._value(placement)
        if abs(mine - theirs) > GRAIN_GB:
            return theirs < mine
        return covered > self.covered_gb + GRAIN_GB

    def _value(self, placement: Ints) -> float:
        cnt, mem = worst(self.instance, placement, Mode.ABS)
        return self.instance.hbm_gb * cnt + mem

    @property
    def value(self) -> float:
        """The balance of the placement."""
        return self._value(self.placement)

    @property
    def done(self) -> bool:
        """Whether everything coverable is covered, as well balanced as hoped for."""
        covered = self.covered_gb >= self.bound_gb - GRAIN_GB
        return covered and self._value(self.placement) <= self.goal + GRAIN_GB
