"""`auto`: what to try in which order. No licence, no tuning knobs.

Min-max (`abs`, `signed`):

1. Bound from counts: the least count that servers can be filled with, and the mean memory.
2. Deal and exchange towards that bound. On most instances it is met, which proves both.
3. Otherwise, with few types, the bound by contents, then whole servers at exactly that level:
   by floor and integer program, by exchanges, by both.

Coverage: the layer-cake bound, the contents that reach it at the smallest thresholds, then
exchanges that judge coverage exactly; see `solve_coverage`.

Every step leaves the best placement so far in the `Incumbent`, so an interrupt at any point
returns it with the bound known by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance, Servers, Types
from aqua_placer.programs.contents import ContentSpace, content_space, has_few_types
from aqua_placer.programs.thresholds import (
    Mode,
    contents_by_server,
    least_level,
    mean_bounds,
    whole_servers,
)
from aqua_placer.search.dealing import (
    class_space,
    classes_of,
    deal_contents,
    least_cnt,
    spread_evenly,
    start_placement,
    worst,
)
from aqua_placer.search.exchange import WINDOW, Aim, Effort, Layout, balance
from aqua_placer.search.packing import pack

GOOD_GAP: Final = 0.001
"""Relative gap that all-distinct sizes aim at: what is left is below what a profile can tell."""

NEARLY: Final = 0.003
"""Relative gap at which exchanges of two groups are no longer worth their time."""

PATIENCE: Final = 120
PATIENCE_BEFORE_CONTENTS: Final = 30
"""Rounds of exchanges of two groups without progress. Where contents can be listed they may soon
prove that the aim cannot be reached."""

LARGE_CLUSTER: Final = 600
"""Servers above which only those that exceed look for a partner."""


@dataclass
class Incumbent:
    """Best placement so far under `mode`, and the bound it is measured against."""

    instance: Instance
    mode: Mode
    budget: Budget
    placement: Ints | None = None
    value: float = np.inf
    bound: float = -np.inf
    tried_contents: bool = False
    rounds: int = 200

    def offer(self, placement: Ints, stage: str) -> float:
        """Take the placement if it is better; returns its value."""
        cnt, mem = worst(self.instance, placement, self.mode)
        value = self.instance.hbm_gb * cnt + mem
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

    def is_met(self) -> bool:
        """Whether the bound is met, or nearly so where all sizes differ."""
        return self.value <= self.bound + GRAIN_GB


def ceil_to(value: float, quantum: float) -> float:
    """The least multiple of `quantum` that is not below `value` (by more than a grain)."""
    return float(np.ceil((value - GRAIN_GB) / quantum) * quantum)


def parity_cnt(instance: Instance, cnt: int) -> int:
    """Raise a bound on |cnt| or cnt to the parity that fully used servers force."""
    gpus = instance.servers.gpus
    no_neutral = bool((instance.sign != 0).all())
    if instance.is_full and no_neutral and len(set((gpus % 2).tolist())) == 1:
        return cnt + (cnt - int(gpus[0])) % 2
    return cnt


def solve_minmax(
    instance: Instance,
    mode: Mode,
    budget: Budget,
    seed: int,
    *,
    rounds: int = 200,
    by_contents: bool = True,
) -> Incumbent:
    """Minimise the paper's objective; the incumbent always holds a placement at the end.

    Args:
        rounds: Rounds of exchanges per stage, at most.
        by_contents: Whether to list contents where there are few enough; seconds for the many
            sizes of blocks, whose balance exchanges improve anyway.
    """
    best = Incumbent(instance, mode, budget, rounds=rounds)
    rng = np.random.default_rng(seed)
    classes = classes_of(instance)
    space = class_space(instance, classes)
    cnt, mem = _counting_bound(instance, space, mode, budget)
    best.raise_bound(instance.hbm_gb * cnt + mem, "bound")
    few = by_contents and has_few_types(instance)
    slack = 0.0 if instance.repeats_sizes else GOOD_GAP * abs(best.bound)
    aim = Aim(cnt, mem + slack, mode, instance.hbm_gb)
    if few and instance.servers.count > LARGE_CLUSTER:
        # The fractional vertex decides nearly all servers; dealing would start from none.
        _by_contents(best, rng)
        if best.is_met():
            return best
    start = start_placement(instance, classes, space, cnt, mode, budget)
    if start is not None:
        best.offer(start, "dealing")
        to_come = few and not best.tried_contents
        _exchange(best, start, aim, rng, PATIENCE_BEFORE_CONTENTS if to_come else PATIENCE)
    if best.value <= best.bound + slack + GRAIN_GB or not few or best.tried_contents:
        return _at_least_anything(best)
    _by_contents(best, rng)
    return _at_least_anything(best)


def _counting_bound(
    instance: Instance, space: ContentSpace | None, mode: Mode, budget: Budget
) -> tuple[int, float]:
    """Bounds on the largest cnt and mem that hold for every placement."""
    cnt, mem = mean_bounds(instance.servers, instance.types, mode)
    cnt = parity_cnt(instance, cnt)
    if space is not None:
        cnt = least_cnt(space, cnt, mode, budget) or cnt
    return cnt, ceil_to(max(mem, forced_mem_gb(instance, mode)), instance.quantum_gb)


def forced_mem_gb(instance: Instance, mode: Mode) -> float:
    """The memory that some group brings wherever it goes, beyond what could level it there.

    A group of 8 shards fills a server of 8: nothing beside it makes up for its size.
    """
    least = np.full(instance.num_groups, np.inf)
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        r_gb = instance.r_gb[:, kind]
        room = gpus - instance.tp
        above = instance.tp * r_gb - room * max(float(-r_gb.min()), 0.0)
        below = -instance.tp * r_gb - room * max(float(r_gb.max()), 0.0)
        beyond = above if mode is Mode.SIGNED else np.maximum(above, below)
        least = np.where(room >= 0, np.minimum(least, beyond), least)
    return float(least.max())


def _exchange(
    best: Incumbent, start: Ints, aim: Aim, rng: np.random.Generator, patience: int = PATIENCE
) -> None:
    """Exchanges of single groups, then of up to two; small clusters search longer."""
    instance, budget = best.instance, best.budget
    layout = Layout(instance, start)
    large = instance.servers.count > LARGE_CLUSTER
    balance(layout, aim, rng, budget, Effort(best.rounds, 1))
    value = best.offer(layout.placement(), "exchange")
    if value <= best.bound + NEARLY * abs(best.bound) + GRAIN_GB and not instance.repeats_sizes:
        return
    goal = instance.hbm_gb * aim.cnt + aim.mem_gb
    # Racks have so many groups that single ones, in ever other windows, find more per second.
    order = 1 if layout.slots.shape[1] > WINDOW else 2
    if value > goal + GRAIN_GB:
        effort = Effort(2 * best.rounds, order, patience, 2.0)
        balance(layout, aim, rng, budget, effort, only_bad=large)
        best.offer(layout.placement(), "exchange")


def _by_contents(best: Incumbent, rng: np.random.Generator) -> None:
    """Few types: the bound by contents, then whole servers at that level."""
    best.tried_contents = True
    instance, mode, budget = best.instance, best.mode, best.budget
    space = content_space(instance.servers, instance.types, full=instance.is_full)
    if space is None:
        return
    level = least_level(space, instance.hbm_gb, mode, budget)
    if level is None:
        return
    if not budget.expired():
        best.raise_bound(level.bound, "contents")
    if best.is_met():
        return
    aim = Aim(level.cnt, level.mem_gb, mode, instance.hbm_gb)
    start = from_fraction(instance, space, level.servers_of, mode, budget)
    if start is not None:
        best.offer(start, "rounding")
        _exchange(best, start, aim, rng)
    if best.is_met():
        return
    chosen, _, _ = whole_servers(space, level.allowed, level.servers_of, budget)
    if chosen is not None:
        best.offer(deal_contents(instance, space.types, contents_by_server(space, chosen)), "whole")


def from_fraction(
    instance: Instance, space: ContentSpace, servers_of: Floats, mode: Mode, budget: Budget
) -> Ints | None:
    """A placement that follows the floor of a fractional solution and deals out the rest."""
    floor = np.floor(servers_of + 1e-6).astype(np.int64)
    rows = np.full((instance.servers.count, len(space.types.tp)), -1, dtype=np.int64)
    rest_counts = []
    for kind, count in enumerate(instance.servers.counts.tolist()):
        here = space.kind == kind
        placed = np.repeat(space.rows[here], floor[here], axis=0)
        first = int(instance.servers.counts[:kind].sum())
        rows[first : first + len(placed)] = placed
        rest_counts.append(count - len(placed))
    decided = rows[:, 0] >= 0
    left_counts = space.types.counts - rows[decided].sum(axis=0)
    # The groups of a type that the floor leaves over, spread over the type's sizes.
    leftover: Bools = np.zeros(instance.num_groups, dtype=bool)
    for kind, left in enumerate(left_counts.tolist()):
        members = np.nonzero(space.types.of_group == kind)[0]
        if left:
            order = members[np.argsort(instance.r_gb[members, 0], kind="stable")]
            at = (np.arange(left) * len(order) + len(order) // 2) // left
            leftover[order[np.minimum(at, len(order) - 1)]] = True
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    servers = instance.servers
    if decided.any():
        part = subset_of(instance, ~leftover, servers.counts - np.array(rest_counts))
        types = _types_of(space.types, ~leftover)
        placement[~leftover] = np.nonzero(decided)[0][deal_contents(part, types, rows[decided])]
    if leftover.any():
        rest = subset_of(instance, leftover, np.array(rest_counts))
        if int(rest.tp.sum()) > rest.servers.total_gpus:
            return None
        classes = classes_of(rest)
        small = class_space(rest, classes)
        cnt, _ = mean_bounds(rest.servers, rest.types, mode)
        if small is not None:
            cnt = least_cnt(small, cnt, mode, budget) or cnt
        start = start_placement(rest, classes, small, cnt, mode, budget)
        if start is None:
            return None
        placement[leftover] = np.nonzero(~decided)[0][start]
    return placement


def subset_of(instance: Instance, members: Bools, counts: Ints) -> Instance:
    """The given groups on `counts[k]` servers of each class, without constraints."""
    servers = instance.servers
    return Instance(
        name=instance.name,
        servers=Servers(servers.class_names, counts, servers.gpus, servers.hbm_gb, servers.links),
        names=[],
        tp=instance.tp[members],
        r_gb=instance.r_gb[members],
        weight=instance.weight[members],
        current=instance.current[members],
        cnt_per_shard=None if instance.cnt_per_shard is None else instance.cnt_per_shard[members],
    )


def _types_of(types: Types, members: Bools) -> Types:
    of_group = types.of_group[members]
    counts = np.bincount(of_group, minlength=len(types.tp))
    return Types(types.tp, types.r_gb, types.weight, counts, of_group, types.sign)


def _at_least_anything(best: Incumbent) -> Incumbent:
    """When no engine placed everything (deadline, awkward sizes): any that fits."""
    if best.placement is None:
        placement = spread_evenly(best.instance)
        best.offer(pack(best.instance, best.budget) if placement is None else placement, "packing")
    return best
