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
    from jaxtyping import Bool

    from aqua_placer.budget import Budget

MAX_FLOWS: Final = 15_000
"""Types of groups times compositions; a program of as many takes 0.5 s, of twice as many 1.5 s."""

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
        within = key <= cnt
        if int(within.sum()) * len(instance.types.counts) > MAX_FLOWS:
            return start
        high = most - start.hbm_gb * cnt
        trial = replace(aim, mem_gb=max(aim.mem_gb, enough - start.hbm_gb * cnt))
        while high - aim.mem_gb > step and aim.level_gb < enough and not budget.expired():
            if _can_flow(instance, space, within, trial, budget):
                high = trial.mem_gb
            else:
                aim = trial
            trial = replace(aim, mem_gb=(aim.mem_gb + high) / 2)
        found.append(aim)
    return min(found, key=lambda aim: aim.level_gb, default=start)


def _can_flow(
    instance: Instance,
    space: ContentSpace,
    within: Bool[np.ndarray, " compositions"],
    aim: Thresholds,
    budget: Budget,
) -> bool:
    """Whether the means of compositions can be within the memory; False only where it is proven.

    Rows: servers by class, groups by type, the groups of each class in each composition, and the
    memory of each composition from above and below.
    """
    types, rows, kind = instance.types, space.rows[within], space.kind[within]
    size_gb, class_of = types.tp[:, None] * types.r_gb[:, kind], np.zeros_like(types.tp)
    class_of[types.of_group] = space.types.of_group
    fits = rows.T[class_of] > 0
    both = aim.mode is BalanceMode.ABS
    # No group goes where all that may stand beside it cannot make up for its size.
    for sign in (1, -1) if both else (1,):
        least = np.full((rows.shape[1], len(rows)), np.inf)
        np.minimum.at(least, class_of, sign * size_gb)
        beside = np.where(rows.T > 0, rows.T * least, 0.0).sum(axis=0) - least
        fits &= sign * size_gb + beside[class_of] <= aim.mem_gb + GRAIN_GB
    (group, to), (held, own) = np.nonzero(fits), np.nonzero(rows)
    every, parts, flow = (
        np.arange(len(rows)),
        np.arange(len(held)),
        len(rows) + np.arange(len(group)),
    )
    part = np.zeros(rows.shape, dtype=np.int64)
    part[held, own] = parts
    lengths = [len(instance.servers.counts), len(types.counts), len(held), len(rows), len(rows)]
    _, by_type, by_part, above, below, end = np.cumsum([0, *lengths]).tolist()
    dense = np.zeros((len(rows) + len(group), end))
    dense[every, kind] = 1.0
    dense[held, by_part + parts] = -rows[held, own]
    dense[every, above + every], dense[every, below + every] = -aim.mem_gb, aim.mem_gb
    dense[flow, by_type + group] = dense[flow, by_part + part[to, class_of[group]]] = 1.0
    dense[flow, above + to] = dense[flow, below + to] = size_gb[group, to]
    given, free = (
        np.concatenate([instance.servers.counts, types.counts, 0.0 * parts]),
        np.inf * (every + 1),
    )
    lower = np.concatenate([given, -free, 0.0 * every if both else -free])
    upper = np.concatenate([given, 0.0 * every, free])
    model = LinearModel.of(dense, np.zeros(len(dense)), lower, upper)
    return solve(model, budget).verdict is not Verdict.INFEASIBLE
