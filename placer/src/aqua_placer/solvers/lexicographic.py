"""The default objective: cover the most demand first, then balance, then move little.

1. Bound: the layer cake over all groups; with few types the fractional program over contents, else
   all groups on one giant server and the program over blocks (`blockwise`).
2. The min-max optimum (`portfolio`) tells how well balanced a placement can be at all.
3. The smallest thresholds (H x C + M) at which contents still cover everything coverable, by
   bisection over fractional programs. Mostly these are the min-max thresholds themselves: the best
   coverage is rarely at odds with the paper's objective, but most placements that are optimal by
   the paper's objective cover far less.
4. Whole servers at those thresholds by the duals (`rounding`); where contents are too many to list,
   consumers with their producers as blocks (`blockwise`), then exchanges judged by exact coverage
   (`pursuit`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.coverage.covering import layer_bound_gb
from aqua_placer.coverage.prefixes import covered_gb
from aqua_placer.coverage.rosters import roster
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.contents import ContentSpace, content_space, has_few_types
from aqua_placer.programs.rounding import Fraction, round_servers
from aqua_placer.programs.thresholds import (
    MAX_COLUMNS,
    Mode,
    contents_by_server,
    cover,
    whole_servers,
)
from aqua_placer.search.dealing import deal_contents, worst
from aqua_placer.search.exchange import Aim, Effort, Layout, balance
from aqua_placer.search.pursuit import judge_for, pursue
from aqua_placer.solvers.blockwise import COARSE_QUANTUM_GB, LARGE_CLUSTER, TINY_CLUSTER, by_blocks
from aqua_placer.solvers.harvest import COVERAGE_TOLERANCE, Harvest
from aqua_placer.solvers.portfolio import from_fraction, solve_minmax

MAX_WIDENINGS: Final = 3
"""Steps by which the memory threshold may grow when whole servers fall short of the bound."""

EXACT_LIMIT_S: Final = 2.0
"""For one integer program over few contents on few servers; milliseconds as a rule."""


def content_worth(space: ContentSpace) -> tuple[Floats, bool]:
    """Coverage of each content, shape (num_contents,), and whether none could be covered better.

    Only exact worths bound a program over contents; others may guide it.
    """
    types = space.types
    is_exact = True
    result = np.zeros(len(space.rows))
    for kind, gpus in enumerate(space.servers.gpus.tolist()):
        here = np.nonzero(space.kind == kind)[0]
        rows = space.rows[here]
        counts = rows.sum(axis=1)
        slots = np.full((len(rows), max(gpus, 1)), -1, dtype=np.int64)
        flat = np.repeat(np.tile(np.arange(rows.shape[1]), len(rows)), rows.reshape(-1))
        first = np.repeat(np.cumsum(counts) - counts, counts)
        slots[np.repeat(np.arange(len(rows)), counts), np.arange(len(flat)) - first] = flat
        table = roster(types.tp, types.r_gb[:, kind], types.weight, gpus)
        result[here] = covered_gb(table, slots)
        is_exact &= table.is_exact
    return result, is_exact


def solve_coverage(instance: Instance, budget: Budget, seed: int) -> Harvest:
    """Maximise coverage, then balance; always returns a placement."""
    even = solve_minmax(instance, Mode.ABS, budget, seed)
    assert even.placement is not None, "the min-max portfolio always places everything"
    best = Harvest(instance, budget, layer_bound_gb(instance), even, even.placement)
    best.offer(even.placement, "balance")
    cnt, mem = worst(instance, even.placement, Mode.ABS)
    best.goal = even.value
    if best.done or budget.expired():
        return best
    rng = np.random.default_rng(seed)
    space = (
        content_space(instance.servers, instance.types, full=instance.is_full)
        if has_few_types(instance)
        else None
    )
    step = max(instance.quantum_gb, COARSE_QUANTUM_GB)
    aim = Aim(cnt, mem, Mode.ABS, instance.hbm_gb)
    if space is None:
        by_blocks(best, rng, seed)
        return best
    worth, is_exact = content_worth(space)
    everything: Bools = np.ones(len(space.rows), dtype=bool)
    _, _, most, _ = cover(space, everything, budget, worth)
    if is_exact and np.isfinite(most):
        best.bound_gb = min(best.bound_gb, most + GRAIN_GB)
    found = _least_thresholds(best, space, worth, aim, most, step)
    if found is None:
        by_blocks(best, rng, seed)
        return best
    aim, fraction = found
    _whole(best, space, worth, aim, fraction, rng, seed)
    is_tiny = len(space.rows) <= MAX_COLUMNS and instance.servers.count <= TINY_CLUSTER
    if is_tiny and is_exact and not best.done:
        _exactly(best, space, worth)
    if best.covered_gb < best.bound_gb * (1 - COVERAGE_TOLERANCE) and not budget.expired():
        by_blocks(best, rng, seed)
    return best


def _least_thresholds(
    best: Harvest, space: ContentSpace, worth: Floats, aim: Aim, most: float, step: float
) -> tuple[Aim, Fraction] | None:
    """The thresholds of least H x C + M at which contents still reach `most`."""
    goal = most * (1 - COVERAGE_TOLERANCE)
    cnt_key, mem_key = np.abs(space.cnt), np.abs(space.mem_gb)
    chosen = None
    value = np.inf

    for cnt in np.unique(cnt_key[cnt_key >= aim.cnt]).tolist():
        if best.budget.expired() or aim.hbm_gb * cnt + aim.mem_gb >= value - GRAIN_GB:
            break
        low, high = -1, int(np.ceil((float(mem_key.max()) - aim.mem_gb) / step)) + 1
        if chosen is not None:
            high = int((value - aim.hbm_gb * cnt - aim.mem_gb) / step) + 1
        width = 1
        probe = 0
        while low + 1 < high and not best.budget.expired():
            trial = Aim(cnt, aim.mem_gb + probe * step, aim.mode, aim.hbm_gb)
            found = _fraction_within(space, worth, trial, best.budget)
            if found is None or worth @ found.servers_of < goal:
                low = probe
                probe = min(low + width, high - 1)
                width *= 3
            else:
                high = probe
                width = 1
                if aim.hbm_gb * cnt + trial.mem_gb < value - GRAIN_GB:
                    value = aim.hbm_gb * cnt + trial.mem_gb
                    chosen = (trial, found)
                probe = (low + high) // 2
    return chosen


def _fraction_within(
    space: ContentSpace, worth: Floats, aim: Aim, budget: Budget
) -> Fraction | None:
    """The fractional servers of most worth within the thresholds; None when there are none."""
    allowed = (np.abs(space.cnt) <= aim.cnt) & (np.abs(space.mem_gb) <= aim.mem_gb + GRAIN_GB / 2)
    _, servers_of, _, duals = cover(space, allowed, budget, worth)
    if servers_of is None or duals is None:
        return None
    return Fraction(allowed, servers_of, duals)


def _whole(
    best: Harvest,
    space: ContentSpace,
    worth: Floats,
    aim: Aim,
    fraction: Fraction,
    rng: np.random.Generator,
    seed: int,
) -> None:
    """Few types: whole servers of the same worth, at rising thresholds; exchanges where needed."""
    instance, budget = best.instance, best.budget
    for widening in range(MAX_WIDENINGS + 1):
        best.goal = aim.hbm_gb * aim.cnt + aim.mem_gb
        enough = best.bound_gb * (1 - COVERAGE_TOLERANCE)
        chosen = round_servers(space, fraction, worth, enough, budget, seed)
        if chosen is not None:
            start = deal_contents(instance, space.types, contents_by_server(space, chosen))
            best.offer(start, "whole")
        if best.covered_gb >= enough or budget.expired():
            return
        if widening:
            # Contents alone did not do it with a quantum to spare: exchanges may.
            dealt = from_fraction(instance, space, fraction.servers_of, Mode.ABS, budget)
            _pursue(best, best.placement if dealt is None else dealt, aim, rng)
            if best.covered_gb >= enough or budget.expired():
                return
        # Whole servers need more room than fractional ones: one quantum at a time.
        aim = Aim(aim.cnt, aim.mem_gb + instance.quantum_gb, aim.mode, aim.hbm_gb)
        widened = _fraction_within(space, worth, aim, budget)
        if widened is None:
            return
        fraction = widened


def _exactly(best: Harvest, space: ContentSpace, worth: Floats) -> None:
    """Few contents: the whole cluster as one integer program, then the least thresholds it allows.

    The first program proves how much can be covered at all. Then the thresholds of least
    H x C + M at which as much is covered are found by bisection, one program each.
    """
    instance, budget, hbm_gb = best.instance, best.budget, best.instance.hbm_gb
    cnt_key, mem_key = np.abs(space.cnt), np.abs(space.mem_gb)

    def attempt(allowed: Bools) -> float:
        """The most that whole servers of these contents cover; 0 when they cannot."""
        _, servers_of, most, _ = cover(space, allowed, budget, worth)
        if servers_of is None or most < best.covered_gb * (1 - COVERAGE_TOLERANCE):
            return 0.0
        chosen, _, bound = whole_servers(
            space, allowed, servers_of, budget, worth=worth, limit_s=EXACT_LIMIT_S
        )
        if chosen is None:
            return 0.0
        if allowed.all():
            best.bound_gb = min(best.bound_gb, bound + GRAIN_GB)
        best.offer(deal_contents(instance, space.types, contents_by_server(space, chosen)), "whole")
        return float(worth @ chosen)

    attempt(np.ones(len(space.rows), dtype=bool))
    goal = best.covered_gb * (1 - COVERAGE_TOLERANCE)
    for cnt in np.unique(cnt_key).tolist():
        value = best.value
        within = cnt_key <= cnt
        levels = np.unique(np.round(mem_key[within], 6))
        levels = levels[hbm_gb * cnt + levels < value - GRAIN_GB]
        low, high = -1, len(levels)
        while low + 1 < high and not budget.expired():
            probe = (low + high) // 2
            if attempt(within & (mem_key <= levels[probe] + GRAIN_GB / 2)) >= goal:
                high = probe
            else:
                low = probe


def _pursue(best: Harvest, start: Ints, aim: Aim, rng: np.random.Generator) -> None:
    """Exchanges from `start`: balance within types first, then coverage."""
    instance, budget = best.instance, best.budget
    best.offer(start, "start")
    layout = Layout(instance, start)
    large = instance.servers.count > LARGE_CLUSTER
    balance(layout, aim, rng, budget, Effort(40, 1, 10))
    best.offer(layout.placement(), "balance")
    for order, rounds, tolerance in ((1, 40 if large else 80, 1.0), (2, 20 if large else 150, 2.0)):
        if best.done or budget.expired():
            return
        pursue(
            layout,
            judge_for(layout, aim),
            rng,
            budget,
            Effort(rounds, order, 40, tolerance),
            target_gb=best.bound_gb,
        )
        best.offer(layout.placement(), "coverage")
