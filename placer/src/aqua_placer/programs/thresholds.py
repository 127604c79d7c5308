"""The min-max objectives over contents: a proven bound, then whole servers that reach it.

For thresholds (C, M) only contents with |cnt| <= C and |mem| <= M may be used (without absolute
values for `signed`). If no *fractional* number of servers per content uses every group up, no
placement stays within the thresholds. So the least M at which the fractional program is feasible,
found by search over the distinct memory sums, gives with H x C a bound on every placement; and the
number of distinct sums is small, whatever the number of servers.

`whole_servers` then looks for an integer point: all but a few servers follow the floor of the
fractional vertex (which has as many non-zeros as rows, not as servers), the rest is an integer
program of constant size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Servers, Types
from aqua_placer.programs.contents import ContentSpace
from aqua_placer.programs.linear import Model, Verdict, columns_of, solve

LP_LIMIT_S: Final = 20.0
MAX_COLUMNS: Final = 1_500
"""Contents that an integer program is offered; among thousands that fit, most are alike."""

SLACK_SERVERS: Final = (0, 24, 80)
"""How many servers beyond the fractional ones are handed back to the integer program, in turn:
the residual of the floor alone is sometimes not dividable."""


class Mode(StrEnum):
    """How servers are compared in the min-max objectives."""

    ABS = "abs"
    SIGNED = "signed"


@dataclass(frozen=True, eq=False)
class Level:
    """The least thresholds that a fractional solution meets.

    Attributes:
        bound: H x cnt + mem, below the objective of every placement.
        allowed: Contents within the thresholds.
        servers_of: Fractional number of servers per content, 0 outside of `allowed`.
    """

    cnt: int
    mem_gb: float
    bound: float
    allowed: Bools
    servers_of: Floats


def keyed(values: Floats | Ints, mode: Mode) -> Floats:
    """What the objective takes the maximum of."""
    return np.abs(values).astype(np.float64) if mode is Mode.ABS else values.astype(np.float64)


def mean_bounds(servers: Servers, types: Types, mode: Mode) -> tuple[int, float]:
    """The mean over servers bounds any maximum: (cnt rounded up, mem in GB).

    Sizes that differ by server class make totals depend on the placement; the smallest total
    that any choice of class gives is used then.
    """
    count = servers.count
    mem = (types.tp * types.counts)[:, None] * types.r_gb
    cnt = (types.tp * types.counts)[:, None] * types.sign
    low_mem, high_mem = mem.min(axis=1).sum() / count, mem.max(axis=1).sum() / count
    low_cnt, high_cnt = cnt.min(axis=1).sum() / count, cnt.max(axis=1).sum() / count
    if mode is Mode.SIGNED:
        return int(np.ceil(low_cnt - 1e-9)), low_mem
    least_mem = max(low_mem, -high_mem, 0.0)
    return int(np.ceil(max(low_cnt, -high_cnt, 0.0) - 1e-9)), least_mem


def cover(
    space: ContentSpace, allowed: Bools, budget: Budget, worth: Floats | None = None
) -> tuple[Verdict, Floats | None, float, Floats | None]:
    """Fractional servers per allowed content that use everything up, of most `worth`.

    Returns:
        (verdict, servers per content or None, upper bound on the worth, duals of the rows).
    """
    picked = np.nonzero(allowed)[0]
    dense = space.as_program_rows[picked]
    starts, rows, values = columns_of(dense)
    cost = np.zeros(len(picked)) if worth is None else -worth[picked]
    model = Model(
        cost=cost,
        upper=np.full(len(picked), np.inf),
        starts=starts,
        rows=rows,
        values=values,
        row_lower=space.totals,
        row_upper=space.totals,
    )
    answer = solve(model, budget, limit_s=LP_LIMIT_S)
    if answer.x is None:
        return answer.verdict, None, -answer.bound, None
    full = np.zeros(len(allowed))
    full[picked] = answer.x
    return answer.verdict, full, -answer.bound, answer.row_duals


def least_level(space: ContentSpace, hbm_gb: float, mode: Mode, budget: Budget) -> Level | None:
    """The thresholds of least H x C + M that are fractionally feasible; None out of time."""
    least_cnt, least_mem = mean_bounds(space.servers, space.types, mode)
    cnt_key, mem_key = keyed(space.cnt, mode), keyed(space.mem_gb, mode)
    best: Level | None = None
    for cnt in np.unique(cnt_key[cnt_key >= least_cnt]):
        if best is not None and hbm_gb * cnt + least_mem >= best.bound - GRAIN_GB:
            break
        within = cnt_key <= cnt
        levels = np.unique(np.round(mem_key[within & (mem_key >= least_mem - GRAIN_GB)], 6))
        if best is not None:
            levels = levels[hbm_gb * cnt + levels < best.bound - GRAIN_GB]
        found = _least_mem(space, within, mem_key, levels, budget)
        if found is None:
            if budget.expired():
                return best
            continue
        mem, allowed, servers_of = found
        best = Level(int(cnt), mem, hbm_gb * float(cnt) + mem, allowed, servers_of)
    return best


def _least_mem(
    space: ContentSpace, within: Bools, mem_key: Floats, levels: Floats, budget: Budget
) -> tuple[float, Bools, Floats] | None:
    """Gallop from the mean upwards, then bisect; the answer is nearly always at the start."""
    low, step, best = -1, 1, None
    probe = 0
    high = len(levels)
    while low + 1 < high and not budget.expired():
        allowed = within & (mem_key <= levels[probe] + GRAIN_GB / 2)
        verdict, servers_of, _, _ = cover(space, allowed, budget)
        if servers_of is not None:
            high, best = probe, (float(levels[probe]), allowed, servers_of)
        elif verdict is Verdict.INFEASIBLE:
            low = probe
        else:
            return best
        if best is None:
            probe = min(low + step, len(levels) - 1)
            step *= 4
        else:
            probe = (low + high) // 2
    return best


def whole_servers(
    space: ContentSpace,
    allowed: Bools,
    servers_of: Floats,
    budget: Budget,
    *,
    worth: Floats | None = None,
    limit_s: float = 2.0,
    gap: float = 0.0,
    seed: int = 0,
) -> tuple[Ints | None, bool, float]:
    """Round a fractional solution to whole servers, all of them within `allowed`.

    Returns:
        (servers per content or None, whether the program covered the whole cluster,
        its bound on `worth`); for the whole cluster INFEASIBLE is a proof (bound -inf).
    """
    total = space.servers.count
    for slack in SLACK_SERVERS:
        floor = np.floor(servers_of + 1e-6).astype(np.int64)
        used = np.nonzero(floor)[0]
        left = total - int(floor.sum())
        # Hand servers back, the most used contents first: they recombine most freely.
        for index in used[np.argsort(-floor[used], kind="stable")]:
            share = min(int(floor[index]), -(-slack * int(floor[index]) // max(total - left, 1)))
            floor[index] -= share
        whole = total <= max(left + slack, 40)
        if whole:
            floor[:] = 0
        target = space.totals - floor @ space.as_program_rows
        fits = allowed & (space.as_program_rows <= target + 1e-9).all(axis=1)
        picked = np.nonzero(fits)[0]
        if not len(picked):
            continue
        sampled = len(picked) > MAX_COLUMNS
        if sampled:
            picked = _promising(picked, servers_of, worth, seed)
        cost = np.zeros(len(picked)) if worth is None else -worth[picked]
        model = space.whole_servers(picked, target, cost=cost, most=float(total))
        answer = solve(model, budget, limit_s=limit_s, gap=gap, seed=seed)
        if answer.x is not None:
            result = floor.copy()
            result[picked] += np.rint(answer.x).astype(np.int64)
            bound = -answer.bound if whole and not sampled else np.inf
            return result, whole, bound
        if whole:
            proof = answer.verdict is Verdict.INFEASIBLE and not sampled
            return None, True, -np.inf if proof else np.inf
        if budget.expired():
            break
    return None, False, np.inf


def _promising(picked: Ints, servers_of: Floats, worth: Floats | None, seed: int) -> Ints:
    """Contents that the fractional solution uses, and a sample that favours the most worth."""
    rng = np.random.default_rng(seed)
    score = rng.random(len(picked))
    if worth is not None:
        span = float(np.ptp(worth[picked])) or 1.0
        score += (worth[picked] - worth[picked].min()) / span
    score[servers_of[picked] > 0] = np.inf
    return np.sort(picked[np.argsort(-score, kind="stable")[:MAX_COLUMNS]])


def contents_by_server(space: ContentSpace, chosen: Ints) -> Ints:
    """Contents per server, in the order of the servers."""
    order = np.argsort(space.kind, kind="stable")
    return np.repeat(space.rows[order], chosen[order], axis=0)
