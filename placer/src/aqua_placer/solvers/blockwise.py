"""Coverage where contents are too many to list: consumers and their producers as blocks.

1. Who serves whom, as if all were one server (`lockstep`), or by the program over blocks where
   there are too many kinds for that or servers are of several sizes (`blocks`). Blocks pack into
   servers as a rule, so this is the coverage of the bound or nearly.
2. Blocks that leave the count as even as it can be, if they cover as much.
3. Exchanges of single groups, first towards coverage where blocks fell short of it, then towards
   balance for as long as coverage holds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from aqua_placer.coverage.lockstep import on_giant_server
from aqua_placer.coverage.units import form_units, of_units
from aqua_placer.errors import ProblemInfeasibleError
from aqua_placer.problem.columns import Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.blocks import solve_blocks
from aqua_placer.programs.thresholds import Mode
from aqua_placer.search.dealing import worst
from aqua_placer.search.exchange import WINDOW, Aim, Effort, Layout
from aqua_placer.search.pursuit import judge_for, pursue
from aqua_placer.solvers.harvest import Harvest
from aqua_placer.solvers.portfolio import solve_minmax

POLISHED: Final = 2e-4
"""Relative distance to the bound at which coverage is done."""

NEAR: Final = 6e-4
"""Relative distance to the bound at which no further start is worth its time."""

UNIT_ROUNDS: Final = 60
"""Rounds of exchanging whole units; where they are too coarse for the bound, more do not help."""

SINGLE_ROUNDS: Final = 40

PAIR_ROUNDS: Final = 4_800
"""Servers x rounds of two-group exchanges per start: about a second."""

LARGE_CLUSTER: Final = 600
RESTARTED_SERVERS: Final = 150
"""Servers up to which the search starts again from its best with more room."""

TINY_CLUSTER: Final = 40
RESTART_ROOMS: Final = (
    *((0.25, 0, 3.0), (0.75, 2, 8.0), (0.25, 0, 8.0)),
    *((0.75, 2, 5.0), (2.5, 2, 8.0), (0.75, 2, 8.0)),
)
"""How far memory (in HBMs of a GPU) and count may exceed the best's, and how many GB a pair of
servers may get worse, start after start: what the last groups need to change places is found beyond
the balance, and the balance is regained after."""

LARGE_RESTARTS: Final = 2
"""Starts beyond `TINY_CLUSTER`, where each takes seconds."""

EVENING_ROUNDS: Final = 640
"""Servers x rounds of two-group exchanges per step towards balance."""

EVENING_STEP: Final = 0.6
"""Share of the memory beyond the optimum's that a step leaves, at first."""

MAX_FAILURES: Final = 5
MAX_STEPS: Final = 40
"""Steps towards balance: the later ones bring a few GB each, and cost as much as the first."""

EVENING_PRICE: Final = 1.0
"""GB of coverage for a GB beyond the threshold: `pursuit`'s own price gives up too much."""

COARSE_QUANTUM_GB: Final = 1.0
"""Where all sizes differ there is no grid; memory within this of the optimum is as good."""


def by_blocks(best: Harvest, rng: np.random.Generator, seed: int) -> None:
    """Improve `best` in coverage, then in balance."""
    instance, budget = best.instance, best.budget
    giant = on_giant_server(instance)
    if giant is not None:
        best.bound_gb = min(best.bound_gb, giant.most_gb + GRAIN_GB)
    if giant is not None or _is_plain(instance):
        _place(best, None if giant is None else giant.order, seed)
    if best.covered_gb < best.bound_gb * (1 - POLISHED) and not budget.expired():
        blocks = solve_blocks(instance, budget, seed=seed)
        if blocks is not None:
            best.bound_gb = min(best.bound_gb, blocks.bound_gb)
            _place(best, blocks.order, seed)
    assert best.balance.placement is not None, "the min-max portfolio always places everything"
    even_cnt, _ = worst(instance, best.balance.placement, Mode.ABS)
    if worst(instance, best.placement, Mode.ABS)[0] > even_cnt and not budget.expired():
        blocks = solve_blocks(instance, budget, most_cnt=even_cnt, seed=seed)
        if blocks is not None:
            _place(best, blocks.order, seed)
    if best.covered_gb < best.bound_gb * (1 - NEAR):
        _search(best, rng)
    if instance.servers.count <= LARGE_CLUSTER:
        _even_out(best, rng)


def _is_plain(instance: Instance) -> bool:
    """Whether serving the neediest first is near the best: one weight, servers of one size."""
    return bool(np.ptp(instance.weight) == 0 and np.ptp(instance.servers.gpus) == 0)


def _place(best: Harvest, order: Ints | None, seed: int) -> None:
    """Blocks in this order, placed as a whole."""
    instance = best.instance
    unit_of = form_units(instance, order)
    with suppress(ProblemInfeasibleError):  # Groups fit where their units need not.
        units = solve_minmax(
            of_units(instance, unit_of),
            Mode.ABS,
            best.budget,
            seed,
            rounds=UNIT_ROUNDS,
            by_contents=False,
        )
        assert units.placement is not None, "the min-max portfolio always places everything"
        best.offer(units.placement[unit_of], "blocks")


def _search(best: Harvest, rng: np.random.Generator) -> None:
    """Exchanges towards coverage: at the balance of the blocks, then with more room."""
    instance, budget = best.instance, best.budget
    servers = instance.servers.count
    small = servers <= LARGE_CLUSTER and instance.servers.gpus.max() <= WINDOW
    pair_rounds = min(200, PAIR_ROUNDS // servers) if small else 0
    enough = best.bound_gb * (1 - POLISHED)
    rooms = [(0.0, 0, 0.2)]
    if servers <= RESTARTED_SERVERS:
        rooms += RESTART_ROOMS if servers <= TINY_CLUSTER else RESTART_ROOMS[:LARGE_RESTARTS]
    cnt, mem = worst(instance, best.placement, Mode.ABS)
    first = best.placement
    for start, (more_mem, more_cnt, tolerance_gb) in enumerate(rooms):
        if best.most_gb >= best.bound_gb * (1 - NEAR) or budget.expired():
            break
        aim = Aim(cnt + more_cnt, mem + more_mem * instance.hbm_gb, Mode.ABS, instance.hbm_gb)
        layout = Layout(instance, best.placement if start % 2 else first)
        for order, rounds in (
            (1, SINGLE_ROUNDS),
            (2, pair_rounds if not start else pair_rounds // 2),
        ):
            pursue(
                layout,
                judge_for(layout, aim),
                rng,
                budget,
                Effort(rounds, order, 40, tolerance_gb),
                target_gb=enough,
            )
            best.offer(layout.placement(), "coverage")


def _even_out(best: Harvest, rng: np.random.Generator) -> None:
    """Exchanges towards balance: ask for a little less each time, for as long as coverage holds."""
    instance, budget = best.instance, best.budget
    assert best.balance.placement is not None, "the min-max portfolio always places everything"
    even_cnt, even_mem = worst(instance, best.balance.placement, Mode.ABS)
    even_mem += COARSE_QUANTUM_GB
    small = instance.servers.gpus.max() <= WINDOW
    pair_rounds = max(5, min(80, EVENING_ROUNDS // instance.servers.count)) if small else 0
    step, failures = EVENING_STEP, 0
    for _ in range(MAX_STEPS):
        if failures == MAX_FAILURES or budget.expired():
            return
        cnt, mem = worst(instance, best.placement, Mode.ABS)
        if cnt <= even_cnt and mem <= even_mem:
            return
        if cnt > even_cnt and failures % 2 == 0:
            aim = Aim(max(cnt - 2, even_cnt), max(mem, even_mem), Mode.ABS, instance.hbm_gb)
        else:
            less = even_mem + max(mem - even_mem, 0.0) * step
            aim = Aim(cnt, less, Mode.ABS, instance.hbm_gb)
        layout = Layout(instance, best.placement)
        judge = replace(judge_for(layout, aim), excess_price=EVENING_PRICE)
        taken = False
        for order, rounds in ((1, SINGLE_ROUNDS // 4), (2, pair_rounds)):
            effort = Effort(rounds, order, 20, 0.2)
            pursue(layout, judge, rng, budget, effort, target_gb=best.bound_gb)
            taken = best.offer(layout.placement(), "balance")
            if taken:
                break
        if not taken:
            failures += 1
            step = step**0.5
