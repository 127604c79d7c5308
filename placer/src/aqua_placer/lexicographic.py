"""The default objective: cover the most demand first, then balance, then move little.

1. Bound: the layer cake over all groups, all groups on one giant server where that is affordable,
   and with few types the fractional program over contents.
2. The min-max optimum (`portfolio`) tells how well balanced a placement can be at all.
3. The smallest thresholds (H x C + M) at which contents still cover everything coverable, by
   bisection over fractional programs. Mostly these are the min-max thresholds themselves: the best
   coverage is rarely at odds with the paper's objective, but most placements that are optimal by
   the paper's objective cover far less.
4. Whole servers at those thresholds by the duals (`rounding`); where sizes all differ, consumers
   with their producers as blocks, then exchanges judged by exact coverage (`pursuit`).

Coverage within `COVERAGE_TOLERANCE` of the best counts as equal, so that rounding noise of one
part in a thousand does not cost balance.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.columns import Bools, Floats, Ints
from aqua_placer.contents import ContentSpace, content_space, has_few_types
from aqua_placer.covering import coverage_gb, layer_bound_gb
from aqua_placer.dealing import deal_contents, worst
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.exchange import WINDOW, Aim, Effort, Layout, balance
from aqua_placer.instance import GRAIN_GB, Instance
from aqua_placer.lockstep import lockstep_bound_gb
from aqua_placer.portfolio import (
    Incumbent,
    from_fraction,
    solve_minmax,
)
from aqua_placer.prefixes import covered_gb, roster
from aqua_placer.pursuit import judge_for, pursue
from aqua_placer.rounding import Fraction, round_servers
from aqua_placer.thresholds import MAX_COLUMNS, Mode, contents_by_server, cover, whole_servers
from aqua_placer.units import form_units, of_units

COVERAGE_TOLERANCE: Final = 3e-4
"""Coverage given up at most for balance, relative to the bound."""

MAX_WIDENINGS: Final = 3
"""Steps by which the memory threshold may grow when whole servers fall short of the bound."""

COARSE_QUANTUM_GB: Final = 1.0
"""Where all sizes differ there is no grid; memory within this of the optimum is as good."""

POLISHED: Final = 2e-4
"""Relative distance to the bound at which all-distinct sizes are done."""

UNIT_ROUNDS: Final = 60
"""Rounds of exchanging whole units; where they are too coarse for the bound, more do not help."""

SINGLE_ROUNDS: Final = 40

PAIR_ROUNDS: Final = 4_800
"""Servers x rounds of two-group exchanges per threshold: about a second."""

MAX_TIGHTENINGS: Final = 3

TINY_CLUSTER: Final = 40
"""Servers up to which one integer program over few contents settles everything."""

RESTARTED_SERVERS: Final = 150
"""Servers up to which the search starts again from its best with more room."""

RESTART_ROOMS: Final = (
    *((0.25, 0, 3.0), (0.75, 2, 8.0), (0.25, 0, 8.0)),
    *((0.75, 2, 5.0), (2.5, 2, 8.0), (0.75, 2, 8.0)),
)
"""How far memory (in HBMs of a GPU) and count may exceed the best's, and how many GB a pair of
servers may get worse, start after start: what the last groups need to change places is found beyond
the balance, and the balance is regained after."""

RESTARTED: Final = 6e-4
"""Relative distance to the bound at which no further start is worth its time."""

LARGE_RESTARTS: Final = 3
LARGE_RESTARTED: Final = 8e-4
"""Starts and the distance that is accepted beyond `TINY_CLUSTER`, where a start takes seconds."""

EXACT_LIMIT_S: Final = 2.0
"""For one integer program over few contents on few servers; milliseconds as a rule."""

POLISH_TOLERANCE_GB: Final = 0.2

LARGE_CLUSTER: Final = 600


@dataclass
class Harvest:
    """Best placement so far by (coverage, balance), and what bounds it."""

    instance: Instance
    budget: Budget
    bound_gb: float
    balance: Incumbent
    placement: Ints
    covered_gb: float = 0.0
    goal: float = np.inf

    def offer(self, placement: Ints, stage: str) -> None:
        """Take the placement if it covers more, or as much and is better balanced."""
        layout = Layout(self.instance, placement)
        covered = float(coverage_gb(self.instance, layout.slots, layout.class_of).sum())
        if self._better(covered, placement):
            self.placement, self.covered_gb = placement, covered
        self.budget.report(stage, self.covered_gb, self.bound_gb)

    def _better(self, covered: float, placement: Ints) -> bool:
        slack = COVERAGE_TOLERANCE * self.bound_gb + GRAIN_GB
        if abs(covered - self.covered_gb) > slack:
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
    best.bound_gb = min(best.bound_gb, lockstep_bound_gb(instance) + GRAIN_GB)
    rng = np.random.default_rng(seed)
    space = (
        content_space(instance.servers, instance.types, full=instance.is_full)
        if has_few_types(instance)
        else None
    )
    step = max(instance.quantum_gb, COARSE_QUANTUM_GB)
    aim = Aim(cnt, mem, Mode.ABS, instance.hbm_gb)
    if space is None:
        _by_units(best, rng, seed)
        return best
    worth, is_exact = content_worth(space)
    everything: Bools = np.ones(len(space.rows), dtype=bool)
    _, _, most, _ = cover(space, everything, budget, worth)
    if is_exact and np.isfinite(most):
        best.bound_gb = min(best.bound_gb, most + GRAIN_GB)
    found = _least_thresholds(best, space, worth, aim, most, step)
    if found is None:
        _by_units(best, rng, seed)
        return best
    aim, fraction = found
    _whole(best, space, worth, aim, fraction, rng, seed)
    is_tiny = len(space.rows) <= MAX_COLUMNS and instance.servers.count <= TINY_CLUSTER
    if is_tiny and is_exact and not best.done:
        _exactly(best, space, worth)
    if best.covered_gb < best.bound_gb * (1 - COVERAGE_TOLERANCE) and not budget.expired():
        _by_units(best, rng, seed)
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


def _by_units(best: Harvest, rng: np.random.Generator, seed: int) -> None:
    """Place consumers with their producers as blocks, then let single groups change places.

    The blocks cover nearly everything; exchanges within their balance make up for lockstep, then
    tighter thresholds are tried by halves for as long as the coverage holds.
    """
    instance, budget = best.instance, best.budget
    unit_of = form_units(instance)
    placement = best.placement
    with suppress(ProblemInfeasibleError):  # Groups fit where their units need not.
        blocks = solve_minmax(
            of_units(instance, unit_of), Mode.ABS, budget, seed, rounds=UNIT_ROUNDS
        )
        assert blocks.placement is not None, "the min-max portfolio always places everything"
        placement = blocks.placement[unit_of]
    best.offer(placement, "units")
    assert best.balance.placement is not None, "as above"
    even_cnt, even_mem = worst(instance, best.balance.placement, Mode.ABS)
    cnt, mem = worst(instance, placement, Mode.ABS)
    layout = Layout(instance, placement)
    servers = instance.servers.count
    small = servers <= LARGE_CLUSTER and instance.servers.gpus.max() <= WINDOW
    pair_rounds = min(200, PAIR_ROUNDS // servers) if small else 0
    enough = best.bound_gb * (1 - POLISHED)
    if servers <= RESTARTED_SERVERS and best.covered_gb < enough:
        # Few blocks to choose from: look beyond their balance first, several times.
        rooms = RESTART_ROOMS if servers <= TINY_CLUSTER else RESTART_ROOMS[:LARGE_RESTARTS]
        accepted = RESTARTED if servers <= TINY_CLUSTER else LARGE_RESTARTED
        for start, (more_mem, more_cnt, tolerance_gb) in enumerate(rooms):
            if best.covered_gb >= best.bound_gb * (1 - accepted) or budget.expired():
                break
            room_gb = more_mem * instance.hbm_gb
            aim = Aim(cnt + more_cnt, mem + room_gb, Mode.ABS, instance.hbm_gb)
            trial = Layout(instance, placement if start % 2 else best.placement)
            for order, rounds in ((1, SINGLE_ROUNDS), (2, pair_rounds // 2)):
                pursue(
                    trial,
                    judge_for(trial, aim),
                    rng,
                    budget,
                    Effort(rounds, order, 40, tolerance_gb),
                    target_gb=enough,
                )
            best.offer(trial.placement(), "coverage")
        layout = Layout(instance, best.placement)
        cnt, mem = worst(instance, best.placement, Mode.ABS)
    for attempt in range(1 + (MAX_TIGHTENINGS if small else 0)):
        aim = Aim(cnt, mem, Mode.ABS, instance.hbm_gb)
        for order, rounds in ((1, SINGLE_ROUNDS), (2, pair_rounds)):
            if best.covered_gb < enough or attempt:
                pursue(
                    layout,
                    judge_for(layout, aim),
                    rng,
                    budget,
                    Effort(rounds, order, 40, POLISH_TOLERANCE_GB),
                    target_gb=enough,
                )
                best.offer(layout.placement(), "coverage")
        if budget.expired() or mem <= even_mem + COARSE_QUANTUM_GB:
            return
        mem = (mem + even_mem) / 2
        cnt = max(even_cnt, cnt - 1) if attempt else cnt


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
