"""The best placement so far, by balance or by coverage and then balance, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.instance import GRAIN_GB, Instance, Placement
from aqua_placer.search.layout import Layout
from aqua_placer.value.balance import BalanceMode, level_gb
from aqua_placer.value.coverage import coverage_gb

COVERAGE_TOLERANCE: Final = 1e-3
"""Coverage given up at most for balance, relative to the bound: an eighteenth of the 1.8% that
profiles are good to. Doubled, plans are better balanced where all sizes differ, and cover less."""


SEARCH_TOLERANCE: Final = 2.5e-3
"""Distance to the bound, relative, at which no search for more coverage is worth its time: half of
what a plan may fall short at most. Halved, all-distinct clusters of 128 GPUs take twice as long for
a thousandth."""


@dataclass
class BalanceIncumbent:
    """Best placement so far under `mode`, and the bound it is measured against."""

    instance: Instance
    mode: BalanceMode
    budget: Budget
    placement: Placement | None = None
    value: float = np.inf
    bound: float = -np.inf

    def offer(self, placement: Placement, stage: str) -> float:
        """Take the placement if it is better; returns its value."""
        value = level_gb(self.instance, placement, self.mode)
        if value < self.value - GRAIN_GB:
            self.placement, self.value = placement, value
        self.report(stage)
        return value

    def raise_bound(self, bound: float, stage: str) -> None:
        """Note a better proven bound."""
        self.bound = max(self.bound, bound)
        self.report(stage)

    def report(self, stage: str) -> None:
        """Tell the listener of the budget."""
        self.budget.report(
            stage,
            None if self.placement is None else self.value,
            None if np.isinf(self.bound) else self.bound,
        )

    @property
    def is_met(self) -> bool:
        """Whether the bound is met."""
        return self.value <= self.bound + GRAIN_GB

    @property
    def found(self) -> Placement:
        """The placement, once there is one."""
        assert self.placement is not None, "the min-max strategy always places everything"
        return self.placement


@dataclass
class CoverageIncumbent:
    """Best placement so far: coverage first, and among coverages as good as the best, balance.

    Attributes:
        balance: The min-max optimum, as far as it is known.
        bound_gb: No placement covers more.
        most_gb: The most that any placement so far covers; `placement` may cover a little less.
        goal: The balance at which nothing is left to do.
    """

    instance: Instance
    budget: Budget
    bound_gb: float
    balance: BalanceIncumbent
    placement: Placement
    goal: float
    covered_gb: float = 0.0
    most_gb: float = 0.0

    def offer(self, placement: Placement, stage: str) -> bool:
        """Take the placement if it covers more, or as much and is better balanced."""
        layout = Layout(self.instance, placement)
        covered = float(coverage_gb(self.instance, layout.slots, layout.class_of).sum())
        self.most_gb = max(self.most_gb, covered)
        better = self._better(covered, placement)
        if better:
            self.placement, self.covered_gb = placement, covered
        self.budget.report(stage, self.covered_gb, self.bound_gb)
        return better

    def _better(self, covered: float, placement: Placement) -> bool:
        alike = self.most_gb - COVERAGE_TOLERANCE * self.bound_gb - GRAIN_GB
        if min(covered, self.covered_gb) < alike:
            return covered > self.covered_gb
        value = level_gb(self.instance, placement, BalanceMode.ABS)
        if abs(self.value - value) > GRAIN_GB:
            return value < self.value
        return covered > self.covered_gb + GRAIN_GB

    @property
    def value(self) -> float:
        """The balance of the placement."""
        return level_gb(self.instance, self.placement, BalanceMode.ABS)

    @property
    def enough_gb(self) -> float:
        """Coverage at which no search for more is worth its time."""
        return self.bound_gb * (1 - SEARCH_TOLERANCE)

    @property
    def done(self) -> bool:
        """Whether everything coverable is covered, as well balanced as hoped for."""
        return self.covered_gb >= self.bound_gb - GRAIN_GB and self.value <= self.goal + GRAIN_GB
