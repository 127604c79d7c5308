"""Bounds on the min-max objectives: from counts, and from contents within thresholds.

For thresholds (C, M) only contents with |cnt| <= C and |mem| <= M may be used (without absolute
values for `signed`). If no *fractional* number of servers per content uses every group up, no
placement stays within the thresholds. So the least M at which the fractional program is feasible,
found by search over the distinct memory sums, gives with H x C a bound on every placement; and the
number of distinct sums is small, whatever the number of servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_placer.bounds.linear_program import LinearModel, Verdict, solve
from aqua_placer.problem.contents import ContentSpace, content_space
from aqua_placer.problem.instance import GRAIN_GB, Instance, PerRow, Servers, Types
from aqua_placer.value.balance import BalanceMode, keyed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from aqua_placer.budget import Budget

MAX_CLASS_CONTENTS: Final = 8_000
"""Servers of 8 GPUs have hundreds of contents of classes; racks beyond this go without.
Doubled, wider servers take part, and their program takes twice as long."""


@dataclass(frozen=True, eq=False)
class Fraction:
    """A fractional solution: servers per content within `allowed`.

    Attributes:
        most: Upper bound on the worth of all servers of allowed contents.
        duals: Of the program's rows.
    """

    allowed: Bool[np.ndarray, " contents"]
    servers_of: Float64[np.ndarray, " contents"]
    most: float
    duals: PerRow


@dataclass(frozen=True)
class Thresholds:
    """The largest cnt and mem of a server that count as balanced, and how they are compared.

    Attributes:
        hbm_gb: What one of cnt weighs beside a GB of mem.
    """

    cnt: int
    mem_gb: float
    mode: BalanceMode
    hbm_gb: float

    @property
    def level_gb(self) -> float:
        """The objective of a placement just within."""
        return self.hbm_gb * self.cnt + self.mem_gb

    def admit(self, space: ContentSpace) -> Bool[np.ndarray, " contents"]:
        """Contents within the thresholds."""
        within: Bool[np.ndarray, " contents"] = (keyed(space.cnt, self.mode) <= self.cnt) & (
            keyed(space.mem_gb, self.mode) <= self.mem_gb + GRAIN_GB / 2
        )
        return within


def fractional_servers(
    space: ContentSpace,
    allowed: Bool[np.ndarray, " contents"],
    budget: Budget,
    worth: Float64[np.ndarray, " contents"] | None = None,
) -> tuple[Verdict, Fraction | None]:
    """Servers per allowed content that use every group up, of most `worth`."""
    picked = np.nonzero(allowed)[0]
    cost = np.zeros(len(picked)) if worth is None else -worth[picked]
    dense = space.as_program_rows[picked]
    answer = solve(LinearModel.of(dense, cost, space.totals, space.totals), budget)
    if answer.x is None or answer.row_duals is None:
        return answer.verdict, None
    servers_of = np.zeros(len(allowed))
    servers_of[picked] = answer.x
    return answer.verdict, Fraction(allowed, servers_of, -answer.bound, answer.row_duals)


def mean_bounds(servers: Servers, types: Types, mode: BalanceMode) -> tuple[int, float]:
    """The mean over servers bounds any maximum: (cnt rounded up, mem in GB).

    Sizes that differ by server class make totals depend on the placement; the smallest total
    that any choice of class gives is used then.
    """
    count = servers.count
    mem = (types.tp * types.counts)[:, None] * types.r_gb
    cnt = (types.tp * types.counts)[:, None] * types.sign
    low_mem, high_mem = mem.min(axis=1).sum() / count, mem.max(axis=1).sum() / count
    low_cnt, high_cnt = cnt.min(axis=1).sum() / count, cnt.max(axis=1).sum() / count
    if mode is BalanceMode.SIGNED:
        return int(np.ceil(low_cnt - 1e-9)), low_mem
    least_mem = max(low_mem, -high_mem, 0.0)
    return int(np.ceil(max(low_cnt, -high_cnt, 0.0) - 1e-9)), least_mem


def classes_of(instance: Instance) -> Types:
    """The groups' classes, by (shards, sign), as types without sizes.

    Whether servers can be filled exactly, and how small |cnt| can be, depends on classes alone.
    """
    nothing = np.zeros_like(instance.r_gb)
    return Types.of(instance.tp, nothing, np.ones(instance.num_groups), instance.sign)


def counting_bound(instance: Instance, mode: BalanceMode, budget: Budget) -> tuple[int, float]:
    """Bounds on the largest cnt and mem that hold for every placement."""
    cnt, mem = mean_bounds(instance.servers, instance.types, mode)
    gpus = instance.servers.gpus
    if instance.is_full and (instance.sign != 0).all() and len(set((gpus % 2).tolist())) == 1:
        # Servers without an unused or a neutral GPU have the parity of their GPUs.
        cnt += (cnt - int(gpus[0])) % 2
    space = content_space(
        instance.servers, classes_of(instance), full=instance.is_full, limit=MAX_CLASS_CONTENTS
    )
    if space is not None:
        cnt = _least_cnt(space, cnt, mode, budget)
    quantum = instance.quantum_gb
    mem = max(mem, _forced_mem_gb(instance, mode))
    return cnt, float(np.ceil((mem - GRAIN_GB) / quantum) * quantum)


def _least_cnt(space: ContentSpace, start: int, mode: BalanceMode, budget: Budget) -> int:
    """The least bound on cnt at which servers can be filled fractionally; `start` out of time."""
    key = keyed(space.cnt, mode)
    for cnt in np.unique(key[key >= start]):
        if fractional_servers(space, key <= cnt, budget)[1] is not None:
            return int(cnt)
        if budget.expired():
            break
    return start


def _forced_mem_gb(instance: Instance, mode: BalanceMode) -> float:
    """The memory that some group brings wherever it goes, beyond what could level it there.

    A group of 8 shards fills a server of 8: nothing beside it makes up for its size.
    """
    least = np.full(instance.num_groups, np.inf)
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        r_gb = instance.r_gb[:, kind]
        room = gpus - instance.tp
        above = instance.tp * r_gb - room * max(float(-r_gb.min()), 0.0)
        below = -instance.tp * r_gb - room * max(float(r_gb.max()), 0.0)
        beyond = above if mode is BalanceMode.SIGNED else np.maximum(above, below)
        least = np.where(room >= 0, np.minimum(least, beyond), least)
    return float(least.max())


def least_thresholds(
    space: ContentSpace,
    hbm_gb: float,
    mode: BalanceMode,
    budget: Budget,
    *,
    start: tuple[int, float] | None = None,
    step_gb: float = 0.0,
    worth: Float64[np.ndarray, " contents"] | None = None,
    goal_gb: float = 0.0,
) -> tuple[Thresholds, Fraction] | None:
    """The thresholds of least H x C + M that are fractionally feasible; None out of time.

    From the means on, their level is a bound on every placement, unless the budget has ended the
    search.

    Args:
        start: Least cnt and mem to try; the means over servers by default.
        step_gb: Memory is tried in such steps; at every distinct sum by default.
        worth: Of each content; the servers together have to be worth `goal_gb`.
    """
    least_cnt, least_mem = start or mean_bounds(space.servers, space.types, mode)
    cnt_key, mem_key = keyed(space.cnt, mode), keyed(space.mem_gb, mode)
    if step_gb:
        steps = np.ceil(np.maximum(mem_key - least_mem, 0.0) / step_gb - GRAIN_GB)
        mem_key = least_mem + steps * step_gb
    best: tuple[Thresholds, Fraction] | None = None
    for cnt in np.unique(cnt_key[cnt_key >= least_cnt]).astype(int).tolist():
        if best is not None and hbm_gb * cnt + least_mem >= best[0].level_gb - GRAIN_GB:
            break
        within = cnt_key <= cnt
        levels = np.unique(np.round(mem_key[within & (mem_key >= least_mem - GRAIN_GB)], 6))
        if best is not None:
            levels = levels[hbm_gb * cnt + levels < best[0].level_gb - GRAIN_GB]
        # Gallop from the least upwards, then bisect; the answer is nearly always at the start.
        low, high, step, probe = -1, len(levels), 1, 0
        found = False
        while low + 1 < high and not budget.expired():
            trial = Thresholds(cnt, float(levels[probe]), mode, hbm_gb)
            verdict, fraction = fractional_servers(space, trial.admit(space), budget, worth)
            if fraction is None and verdict is not Verdict.INFEASIBLE:
                return best if budget.expired() else None
            if fraction is None or (worth is not None and worth @ fraction.servers_of < goal_gb):
                low = probe
            else:
                high, found, best = probe, True, (trial, fraction)
            probe = (low + high) // 2 if found else min(low + step, len(levels) - 1)
            step *= 4
        if budget.expired():
            return best
    return best
