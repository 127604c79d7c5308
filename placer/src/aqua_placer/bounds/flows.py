"""The bound on balance that knows which sizes can stand together, however many there are.

What groups make of a server by shards and sign alone is a *composition*; few are within a threshold
on count. Where no server of a composition holds more than M, their mean is no more than M either. A
linear program lets groups flow to compositions: if no flow keeps the mean of every composition
within M, no placement keeps every server within. On servers of three GPUs that tells how level two
producers beside a consumer, and one beside two consumers, can be at once; with two kinds of cards
it says on which of them every group is, and so what it weighs.

The bound forgets that servers of one composition differ, which costs little: where all sizes differ
they can be made nearly alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_placer.bounds.linear_program import LinearModel, Verdict, solve
from aqua_placer.bounds.thresholds import Thresholds, classes_of
from aqua_placer.problem.contents import ContentSpace, content_space
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.value.balance import BalanceMode, keyed

if TYPE_CHECKING:
    from aqua_placer.budget import Budget

MAX_FLOWS: Final = 10_000
"""Columns of a program; as many take 0.3 s. With twice as many it takes 1.5 s."""

PRECISION: Final = 0.001
"""Of the value, or of HBM where that is more: how finely memory is searched, a tenth of the gap
that all-distinct sizes may have. Doubled, one program less is solved."""


def least_means(
    instance: Instance, start: Thresholds, value_gb: float, gap: float, budget: Budget
) -> Thresholds:
    """Thresholds of the least level that placements may reach; `start` where nothing is gained.

    Args:
        start: Least count and memory, as far as they are known.
        value_gb: The level of some placement.
        gap: Distance to `value_gb`, relative, at which a bound is as good as any.
    """
    space = content_space(instance.servers, classes_of(instance), full=instance.is_full)
    if space is None:
        return start
    enough = value_gb - gap * abs(value_gb)
    step = PRECISION * max(abs(value_gb), start.hbm_gb)
    found: list[Thresholds] = []
    key = keyed(space.cnt, start.mode)
    for cnt in np.unique(key[key >= start.cnt]).astype(int).tolist():
        most = min([value_gb, *(aim.level_gb for aim in found)])
        aim = replace(start, cnt=cnt)
        if aim.level_gb >= most:
            break
        model = _Flows(instance, space, start.mode, cnt)
        if model.count > MAX_FLOWS:
            return start
        high = most - start.hbm_gb * cnt
        trial = replace(aim, mem_gb=max(aim.mem_gb, enough - start.hbm_gb * cnt))
        while high - aim.mem_gb > step and aim.level_gb < enough and not budget.expired():
            if model.fit(trial.mem_gb, budget):
                high = trial.mem_gb
            else:
                aim = trial
            trial = replace(aim, mem_gb=(aim.mem_gb + high) / 2)
        found.append(aim)
    return min(found, key=lambda aim: aim.level_gb, default=start)


class _Flows:
    """How groups can flow to the compositions within a count.

    Attributes:
        count: Flows, of a type of groups to a composition each.
    """

    def __init__(
        self, instance: Instance, space: ContentSpace, mode: BalanceMode, cnt: int
    ) -> None:
        within = keyed(space.cnt, mode) <= cnt
        self.instance, self.mode = instance, mode
        self.rows, self.kind = space.rows[within], space.kind[within]
        types = instance.types
        self.class_of = np.zeros(len(types.counts), dtype=np.int64)
        self.class_of[types.of_group] = space.types.of_group
        self.size_gb = types.tp[:, None] * types.r_gb
        self.has = self.rows.T[self.class_of] > 0
        self.count = int(self.has.sum())

    def fit(self, mem_gb: float, budget: Budget) -> bool:
        """Whether compositions can have means within `mem_gb`; False only where it is proven.

        Rows: servers by class, groups by type, the groups of each class in each composition, and
        the memory of each composition from above and below.
        """
        servers, types, count = self.instance.servers, self.instance.types, len(self.rows)
        kind, size_gb = self.kind, self.size_gb[:, self.kind]
        both = self.mode is BalanceMode.ABS
        # No group goes where all that may stand beside it cannot make up for its size.
        extremes = []
        for sign in (1, -1):
            least = np.full((self.rows.shape[1], size_gb.shape[1]), np.inf)
            np.minimum.at(least, self.class_of, sign * size_gb)
            beside = np.where(self.rows.T > 0, self.rows.T * least, 0.0).sum(axis=0) - least
            extremes.append(sign * size_gb + beside[self.class_of])
        fits = self.has & (extremes[0] <= mem_gb + GRAIN_GB)
        if both:
            fits &= extremes[1] <= mem_gb + GRAIN_GB
        group, to = np.nonzero(fits)
        held, own = np.nonzero(self.rows)
        part = np.zeros(self.rows.shape, dtype=np.int64)
        part[held, own] = np.arange(len(held))
        firsts = np.cumsum([0, len(servers.counts), len(types.counts), len(held), count, count])
        dense = np.zeros((count, firsts[-1]))
        dense[np.arange(count), kind] = 1.0
        dense[held, firsts[2] + np.arange(len(held))] = -self.rows[held, own]
        dense[np.arange(count), firsts[3] + np.arange(count)] = -mem_gb
        dense[np.arange(count), firsts[4] + np.arange(count)] = mem_gb
        column, row = np.nonzero(dense)
        flows = np.stack([group, part[to, self.class_of[group]], to, to], axis=1) + firsts[1:5]
        gb = size_gb[group, to]
        one = np.ones(len(group))
        ends = np.cumsum(np.append(np.bincount(column, minlength=count), np.full(len(group), 4)))
        free = np.full(count, np.inf)
        given = np.concatenate([servers.counts, types.counts, np.zeros(len(held))])
        total = count + len(group)
        model = LinearModel(
            cost=np.zeros(total),
            lower=np.zeros(total),
            upper=np.full(total, np.inf),
            starts=np.append(0, ends),
            index=np.append(row, flows),
            values=np.append(dense[column, row], np.stack([one, one, gb, gb], axis=1)),
            row_lower=np.concatenate([given, -free, np.zeros(count) if both else -free]),
            row_upper=np.concatenate([given, np.zeros(count), free]),
        )
        return solve(model, budget).verdict is not Verdict.INFEASIBLE
