"""The coverage strategy, the default: cover the most demand first, then balance.

1. The min-max optimum tells how well balanced a placement can be at all, and is the first
   incumbent; the layer cake bounds what can be covered.
2. Few types: the program over contents bounds coverage exactly. The smallest thresholds (H x C + M)
   at which contents still cover everything coverable are found by bisection; mostly these are the
   min-max thresholds themselves, because the best coverage is rarely at odds with the paper's
   objective, but most placements that are optimal by the paper's objective cover far less. Whole
   servers at those thresholds follow by the duals.
3. Many sizes, or contents too many to list: consumers with their producers as units, placed whole;
   then exchanges towards coverage where units fell short of it, at the balance that they have or
   with as little more room as they need.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64

from aqua_placer.bounds.blocks import solve_blocks
from aqua_placer.bounds.layer_cake import layer_bound_gb, lockstep_bound_gb
from aqua_placer.bounds.thresholds import Thresholds, fractional_servers, least_thresholds
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.contents import ContentSpace, content_space, has_few_types
from aqua_placer.problem.instance import GRAIN_GB, Instance, Placement
from aqua_placer.search.construction import whole_placement
from aqua_placer.search.coverage import ServerCost, improve_coverage
from aqua_placer.search.layout import WINDOW, Effort, Layout
from aqua_placer.search.units import form_units, of_units
from aqua_placer.solve.minmax import LARGE_CLUSTER, BalanceIncumbent, solve_minmax
from aqua_placer.value.balance import BalanceMode, level_gb, worst
from aqua_placer.value.coverage import content_worth_gb, coverage_gb, group_tables

COARSE_QUANTUM_GB: Final = 1.0
"""Where all sizes differ there is no grid; memory within this of the optimum is as good.
Doubled, it is still one part in eighty of a card."""

MAX_WIDENINGS: Final = 2
"""Quanta by which the memory threshold may grow when whole servers fall short of the bound.
Doubled, up to twice as many programs are rounded."""

UNIT_ROUNDS: Final = 60
"""Rounds of exchanging whole units; where they are too coarse for the bound, more do not help.
Doubled, units that do not pack take twice as long."""

SINGLE_ROUNDS: Final = 40
"""Rounds of exchanges of single groups; most searches end before, so doubling costs little."""

PAIR_ROUNDS: Final = 2_400
"""Servers x rounds of two-group exchanges per start: half a second; doubled, a second."""

ROOMS: Final = ((0.0, 0, 0.2), (0.25, 0, 3.0), *((0.75, 2, 8.0),) * 2, *((2.5, 2, 8.0),) * 2)
"""How far memory (in HBMs of a GPU) and count may exceed the best's, and how many GB a pair of
servers may get worse, start after start: what the last groups need to change places is found beyond
the balance, and the balance is regained after."""

COVERAGE_TOLERANCE: Final = 1e-3
"""Coverage given up at most for balance, relative to the bound: an eighteenth of the 1.8% that
profiles are good to. Doubled, plans are better balanced where all sizes differ, and cover less."""

SEARCH_TOLERANCE: Final = 2.5e-3
"""Distance to the bound, relative, at which no search for more coverage is worth its time: half of
what a plan may fall short at most. Halved, all-distinct clusters of 128 GPUs take twice as long for
a thousandth."""


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


def solve_coverage(instance: Instance, budget: Budget, seed: int) -> CoverageIncumbent:
    """Maximise coverage, then balance; always returns a placement.

    Raises:
        ProblemInfeasibleError: The groups cannot be divided over the servers.
    """
    even = solve_minmax(instance, BalanceMode.ABS, budget, seed)
    best = CoverageIncumbent(
        instance, budget, layer_bound_gb(instance), even, even.found, goal=even.value
    )
    best.offer(even.found, "balance")
    if best.done or budget.expired():
        return best
    if has_few_types(instance):
        space = content_space(instance.servers, instance.types, full=instance.is_full)
        assert space is not None, "counted by has_few_types"
        _by_contents(best, space, seed)
    if best.covered_gb < best.enough_gb or not has_few_types(instance):
        _by_units(best, np.random.default_rng(seed), seed)
    return best


def _by_contents(best: CoverageIncumbent, space: ContentSpace, seed: int) -> None:
    """Few types: the bound by contents, and whole servers at the least thresholds that reach it."""
    instance, budget = best.instance, best.budget
    worth = content_worth_gb(space)
    everything: Bool[np.ndarray, " contents"] = np.ones(len(space.rows), dtype=bool)
    _, fraction = fractional_servers(space, everything, budget, worth)
    if fraction is None:
        return
    most = fraction.most
    goal = most * (1 - COVERAGE_TOLERANCE)
    found = least_thresholds(
        space,
        instance.hbm_gb,
        BalanceMode.ABS,
        budget,
        start=worst(instance, best.balance.found, BalanceMode.ABS),
        step_gb=max(instance.quantum_gb, COARSE_QUANTUM_GB),
        worth=worth,
        goal_gb=goal,
    )
    for widening in range(MAX_WIDENINGS + 1):
        if found is None or budget.expired():
            return
        level, fraction = found
        best.goal = level.level_gb
        whole = whole_placement(
            instance, space, fraction, budget, worth=worth, enough=goal, seed=seed
        )
        if whole is not None:
            best.offer(whole, "whole")
        if best.covered_gb >= goal and best.value <= best.goal + GRAIN_GB:
            return
        if widening == MAX_WIDENINGS:
            return
        # Whole servers need more room than fractional ones: one quantum at a time.
        level = replace(level, mem_gb=level.mem_gb + instance.quantum_gb)
        _, wider = fractional_servers(space, level.admit(space), budget, worth)
        found = None if wider is None else (level, wider)


def _by_units(best: CoverageIncumbent, rng: np.random.Generator, seed: int) -> None:
    """Improve in coverage without listing contents."""
    instance, budget = best.instance, best.budget
    if best.covered_gb < best.enough_gb:
        _place_units(best, None, seed)
    if best.covered_gb < best.enough_gb:
        best.bound_gb = min(best.bound_gb, lockstep_bound_gb(instance) + GRAIN_GB)
    if best.covered_gb < best.enough_gb and not budget.expired():
        blocks = solve_blocks(instance, budget)
        best.bound_gb = min(best.bound_gb, blocks.bound_gb + GRAIN_GB)
        if best.covered_gb < best.enough_gb:
            _place_units(best, blocks.order, seed)
    if best.covered_gb < best.enough_gb:
        _search(best, rng)


def _place_units(
    best: CoverageIncumbent, order: Int64[np.ndarray, " served"] | None, seed: int
) -> None:
    """Consumers with their producers, placed as a whole; those of `order` are served first."""
    unit_of = form_units(best.instance, order)
    with suppress(ProblemInfeasibleError):  # Groups fit where their units need not.
        units = solve_minmax(
            of_units(best.instance, unit_of),
            BalanceMode.ABS,
            best.budget,
            seed,
            rounds=UNIT_ROUNDS,
            prove=False,
        )
        best.offer(units.found[unit_of], "units")


def _search(best: CoverageIncumbent, rng: np.random.Generator) -> None:
    """Exchanges towards coverage: at the balance of the best, then with more room."""
    instance, budget = best.instance, best.budget
    servers = instance.servers.count
    small = servers <= LARGE_CLUSTER and instance.servers.gpus.max() <= WINDOW
    pair_rounds = min(200, PAIR_ROUNDS // servers) if small else 0
    for more_mem, more_cnt, tolerance_gb in ROOMS if small else ROOMS[:1]:
        cnt, mem = worst(instance, best.placement, BalanceMode.ABS)
        room = mem + more_mem * instance.hbm_gb
        aim = Thresholds(cnt + more_cnt, room, BalanceMode.ABS, instance.hbm_gb)
        layout = Layout(instance, best.placement)
        cost = ServerCost(aim, group_tables(instance))
        for order, rounds in ((1, SINGLE_ROUNDS), (2, pair_rounds)):
            if best.most_gb >= best.enough_gb or budget.expired():
                return
            effort = Effort(rounds, order, 40, tolerance_gb)
            improve_coverage(layout, cost, rng, budget, effort, target_gb=best.enough_gb)
            best.offer(layout.placement(), "coverage")
