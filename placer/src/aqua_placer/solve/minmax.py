"""The min-max strategy: the objectives `abs` and `signed`.

1. Bound from counts: the least count that servers can be filled with, and the mean memory.
2. A first placement, and exchanges towards that bound. On most instances it is met, which proves
   both.
3. Otherwise, with few types, the bound by contents, then whole servers at exactly that level; with
   many, the bound by flows, and exchanges towards that.

Every step leaves the best placement so far in the incumbent, so an interrupt at any point returns
it with the bound known by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aqua_placer.bounds.flows import least_means
from aqua_placer.bounds.thresholds import Thresholds, counting_bound, least_thresholds
from aqua_placer.budget import Budget
from aqua_placer.problem.contents import content_space, has_few_types
from aqua_placer.problem.instance import GRAIN_GB, Instance, Placement
from aqua_placer.search.balance import improve_balance
from aqua_placer.search.construction import any_placement, spread_evenly, whole_placement
from aqua_placer.search.layout import WINDOW, Effort, Layout
from aqua_placer.value.balance import BalanceMode, level_gb

GOOD_GAP: Final = 0.002
"""Relative gap that all-distinct sizes aim at: a ninth of what a profile can tell. Half of it
took up to twice the time."""

NEARLY: Final = 0.004
"""Relative gap at which exchanges of two groups are no longer worth their time; doubled, it is
still below the 1% that all-distinct sizes may be off."""

ROUNDS: Final = 200
"""Rounds of exchanges of single groups, at most; of two groups twice as many. Doubled, the
time of instances that do not meet their bound doubles."""

# Rounds of exchanges of two groups without progress. Where contents can be listed they may soon
# prove that the aim cannot be reached. Doubled, hopeless searches take twice as long.
PATIENCE: Final = 120
PATIENCE_BEFORE_CONTENTS: Final = 30

REAIMS: Final = 3
"""Searches for the level that flows say may be reached, a tenth of a second each on 144 GPUs: the
second found what the first had not on servers of three. Doubled, it finds no more."""

LARGE_CLUSTER: Final = 600
"""Servers above which contents come before exchanges, and only those that exceed look for a
partner. Doubled, clusters of twice the size take the way of small ones, at twice the time."""


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

    def is_near(self) -> bool:
        """Whether exchanges of two groups are no longer worth their time."""
        return self.value <= self.bound + NEARLY * abs(self.bound) + GRAIN_GB

    @property
    def found(self) -> Placement:
        """The placement, once there is one."""
        assert self.placement is not None, "the min-max strategy always places everything"
        return self.placement


def solve_minmax(
    instance: Instance,
    mode: BalanceMode,
    budget: Budget,
    seed: int,
    *,
    rounds: int = ROUNDS,
    prove: bool = True,
) -> BalanceIncumbent:
    """Minimise the paper's objective; the incumbent always holds a placement at the end.

    Args:
        rounds: Rounds of exchanges per stage, at most.
        prove: Whether to list contents or compositions; seconds for the many sizes of units, whose
            balance exchanges improve anyway.

    Raises:
        ProblemInfeasibleError: The groups cannot be divided over the servers.
    """
    best = BalanceIncumbent(instance, mode, budget)
    rng = np.random.default_rng(seed)
    cnt, mem = counting_bound(instance, mode, budget)
    best.raise_bound(instance.hbm_gb * cnt + mem, "bound")
    few = prove and has_few_types(instance)
    slack = 0.0 if instance.repeats_sizes else GOOD_GAP * abs(best.bound)
    aim = Thresholds(cnt, mem + slack, mode, instance.hbm_gb)
    if few and instance.servers.count > LARGE_CLUSTER:
        # The fractional vertex decides nearly all servers; exchanges would start from none.
        aim, few = _by_contents(best, seed) or aim, False
        if best.is_met:
            return best
    first = spread_evenly(instance)
    if first is None:
        # Sizes so awkward that spreading them leaves a group without room.
        first = any_placement(instance, budget)
    best.offer(first, "construction")
    _exchange(best, first, aim, rng, (rounds, PATIENCE_BEFORE_CONTENTS if few else PATIENCE))
    if few and best.value > best.bound + slack + GRAIN_GB:
        reachable = _by_contents(best, seed)
        if reachable is not None and not best.is_met:
            _exchange(best, best.found, reachable, rng, (rounds, PATIENCE))
    if prove and not few and not best.is_near():
        start = Thresholds(cnt, mem, mode, instance.hbm_gb)
        least = least_means(instance, start, best.value, NEARLY, budget)
        best.raise_bound(least.level_gb, "flows")
        reachable = replace(least, mem_gb=least.mem_gb + NEARLY * abs(best.bound))
        for _ in range(REAIMS):
            if best.is_near() or budget.expired():
                break
            _exchange(best, best.found, reachable, rng, (rounds, PATIENCE))
    return best


def _exchange(
    best: BalanceIncumbent,
    start: Placement,
    aim: Thresholds,
    rng: np.random.Generator,
    limits: tuple[int, int],
) -> None:
    """Exchanges of single groups, then of up to two; `limits` are rounds and patience."""
    instance, budget = best.instance, best.budget
    rounds, patience = limits
    layout = Layout(instance, start)
    improve_balance(layout, aim, rng, budget, Effort(rounds, 1))
    value = best.offer(layout.placement(), "exchange")
    if value <= aim.level_gb + GRAIN_GB or (best.is_near() and not instance.repeats_sizes):
        return
    # Racks have so many groups that single ones, in ever other windows, find more per second.
    order = 1 if layout.slots.shape[1] > WINDOW else 2
    large = instance.servers.count > LARGE_CLUSTER
    effort = Effort(2 * rounds, order, patience, 2.0)
    improve_balance(layout, aim, rng, budget, effort, only_bad=large)
    best.offer(layout.placement(), "exchange")


def _by_contents(best: BalanceIncumbent, seed: int) -> Thresholds | None:
    """Few types: the bound by contents, and whole servers at that level; the level, if known."""
    instance, budget = best.instance, best.budget
    space = content_space(instance.servers, instance.types, full=instance.is_full)
    found = None
    if space is not None:
        found = least_thresholds(space, instance.hbm_gb, best.mode, budget)
    if space is None or found is None:
        return None
    level, fraction = found
    if not budget.expired():
        best.raise_bound(level.level_gb, "contents")
    if not best.is_met:
        whole = whole_placement(instance, space, fraction, budget, seed=seed)
        if whole is not None:
            best.offer(whole, "whole")
    return level
