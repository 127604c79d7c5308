"""The program over prefixes: which consumers of a server to serve, for many servers at once.

A consumer group is covered when each of its shards has its own producer on the same server; the
group runs in lockstep, so it gets `weight x tp x min(need, spare of its weakest producer)`. With
producers sorted by spare, a chosen set of consumer groups uses a prefix of them in blocks (by
exchange: min is supermodular), so a state is which groups are chosen, and the last block's weakest
producer is known from how many shards they have. Two ways to keep the states few, both as numpy
columns over servers:

- *by kind*: among groups of one size and weight the neediest are chosen first, so a state is a
  number per kind. Exact; for few kinds, on servers of any width.
- *in turn*: groups are considered in the order of need, weighed in several ways, the best of which
  counts; a state is the number of shards served. What it finds can be served, but more might be
  (`GroupTable.is_exact` is False), so it may guide a search and never prove a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.value.roster import GroupTable, levels

State = tuple[int, ...]

WEIGHINGS: Final = (0.0, 0.5, 1.0)
"""Powers of the weight that needs are multiplied by to rank groups `in_turn`: where spare is ample
the needy take the best producers, where it is scarce the heavy do."""


@lru_cache(maxsize=64)
def _states_by_kind(sizes: tuple[int, ...], half: int) -> list[State]:
    """Numbers chosen per kind that fit `half` shards, in an order that predecessors lead."""
    states: list[State] = [()]
    for size in sizes:
        states = [
            (*state, count)
            for state in states
            for count in range(
                (half - sum(n * s for n, s in zip(state, sizes, strict=False))) // size + 1
            )
        ]
    return sorted(states, key=sum)


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The program on many servers whose states are alike.

    Attributes:
        level: Spare of the n-th producer shard, n from 1, (shards, servers); 0 beyond the last.
        needs: Per kind, needs in descending order, (depth, servers).
        sizes: Per kind, shards of a group.
        worths: Per kind, its weight times its shards.
        best: Most covered GB by state.
        total: Most over all states, (servers,).
    """

    states: list[State]
    level: Float64[np.ndarray, "half_and_one rows"]
    needs: list[Float64[np.ndarray, "depth rows"]]
    sizes: list[int]
    worths: list[float]
    best: dict[State, Float64[np.ndarray, " rows"]]
    total: Float64[np.ndarray, " rows"]

    def gain(self, state: State, kind: int) -> Float64[np.ndarray, " rows"] | None:
        """What the last group of `kind` adds in `state`; None when no server has so many."""
        taken = state[kind]
        if not taken or taken > len(self.needs[kind]):
            return None
        used = sum(n * size for n, size in zip(state, self.sizes, strict=True))
        gain: Float64[np.ndarray, " rows"] = np.minimum(
            self.needs[kind][taken - 1], self.level[used]
        )
        gain *= self.worths[kind]
        return gain


def before(state: State, kind: int) -> State:
    """The state without its last group of `kind`."""
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def prefixes(table: GroupTable, slots: Int64[np.ndarray, "rows width"]) -> Prefixes:
    """Run the program by kind on each row of `slots` (roster rows, -1 for empty)."""
    r_gb, kind, half = table.r_gb[slots], table.kind[slots], table.half
    sizes = [size for size, _ in table.kinds]
    worths = [size * weight for size, weight in table.kinds]
    states = _states_by_kind(tuple(sizes), half)
    needs = [_deepest(np.where(kind == i, -r_gb, 0.0), half // s) for i, s in enumerate(sizes)]
    result = Prefixes(states, levels(table, slots), needs, sizes, worths, {}, np.zeros(len(slots)))
    for state in states:
        value = None
        for index in range(len(needs)):
            gain = result.gain(state, index)
            if gain is not None:
                reached = result.best[before(state, index)] + gain
                value = reached if value is None else np.maximum(value, reached)
        result.best[state] = np.zeros(len(slots)) if value is None else value
        np.maximum(result.total, result.best[state], out=result.total)
    return result


def _deepest(
    need: Float64[np.ndarray, "rows width"], deep: int
) -> Float64[np.ndarray, "depth rows"]:
    """The `deep` largest needs of each row in descending order, (depth, rows)."""
    if not deep:
        need = need[:, :0]
    elif deep < need.shape[1]:
        need = np.partition(need, need.shape[1] - deep - 1, axis=1)[:, -deep:]
    falling: Float64[np.ndarray, "depth rows"] = -np.sort(-need, axis=1).T
    return falling


def covered_gb(
    table: GroupTable, slots: Int64[np.ndarray, "rows width"]
) -> Float64[np.ndarray, " rows"]:
    """Covered demand of each row of `slots`."""
    result = np.zeros(len(slots))
    if not table.kinds or not table.half or not len(slots):
        return result
    if table.is_exact:
        return prefixes(table, slots).total
    for weighing in _weighings(table):
        steps = in_turn(table, by_need(table, slots, weighing))
        np.maximum(result, steps[-1].max(axis=0), out=result)
    return result


def in_turn(
    table: GroupTable, slots: Int64[np.ndarray, "rows width"]
) -> list[Float64[np.ndarray, "half_and_one rows"]]:
    """Most covered GB by shards served, (half + 1, rows), after each group in the order of slots.

    All consumers of a row are before its other slots, as `by_need` leaves them.
    """
    level = levels(table, slots)[:-1]
    shards = np.arange(len(level))[:, None]
    steps = [np.zeros((len(level), len(slots)))]
    width = int((table.kind[slots] >= 0).sum(axis=1).max(initial=0))
    for index in range(width):
        group = slots[:, index]
        served = table.kind[group] >= 0
        size = np.where(served, table.tp[group], len(level))
        worth = size * table.weight[group]
        earlier = shards - size[None, :]
        reached = np.take_along_axis(steps[-1], np.maximum(earlier, 0), axis=0)
        gain = np.minimum(-table.r_gb[group], level) * worth
        steps.append(np.where(earlier >= 0, np.maximum(steps[-1], reached + gain), steps[-1]))
    return steps


def _weighings(table: GroupTable) -> tuple[float, ...]:
    """Those that differ: with one weight there is one order of need."""
    return WEIGHINGS if len({weight for _, weight in table.kinds}) > 1 else WEIGHINGS[:1]


def by_need(
    table: GroupTable, slots: Int64[np.ndarray, "rows width"], weighing: float
) -> Int64[np.ndarray, "rows width"]:
    """The slots of each row with the neediest consumers first and all others last."""
    need = table.r_gb[slots] * table.weight[slots] ** weighing
    order = np.argsort(np.where(table.kind[slots] >= 0, need, np.inf), axis=1, kind="stable")
    return np.take_along_axis(slots, order, axis=1)


def chosen_groups(table: GroupTable, slots: Int64[np.ndarray, "rows width"]) -> list[list[int]]:
    """Per row, the consumer groups that the program serves, in the order of their blocks."""
    chosen: list[list[int]] = [[] for _ in range(len(slots))]
    if not table.kinds or not table.half:
        return chosen
    if table.is_exact:
        walked = _walk_back(prefixes(table, slots), table, slots)
        return [[group for group in row if group >= 0] for row in walked.tolist()]
    return [_walk_in_turn(table, slots[row : row + 1]) for row in range(len(slots))]


def _walk_back(
    program: Prefixes, table: GroupTable, slots: Int64[np.ndarray, "rows width"]
) -> Int64[np.ndarray, "rows half"]:
    """Undo the program of all rows at once: which group came last, and so on down to none.

    Every state is visited once, those of most groups first, by the rows that pass through it.

    Returns:
        The served groups by their blocks, -1 where no group gains from one, (rows, most blocks).
    """
    kind = table.kind[slots]
    order = np.lexsort((slots, table.r_gb[slots], kind), axis=1)
    ranked, kind = np.take_along_axis(slots, order, axis=1), np.take_along_axis(kind, order, axis=1)
    first = [(kind < index).sum(axis=1) for index in range(len(program.needs))]
    index_of = {state: index for index, state in enumerate(program.states)}
    at = np.stack([program.best[state] for state in program.states]).argmax(axis=0)
    blocks = np.full((len(slots), table.half), -1, dtype=np.int64)
    for index in range(len(program.states) - 1, 0, -1):
        rows = np.nonzero(at == index)[0]
        if not len(rows):
            continue
        state = program.states[index]
        gains = {k: program.gain(state, k) for k in range(len(state))}
        last = [(k, gain[rows]) for k, gain in gains.items() if gain is not None]
        reached = [program.best[before(state, k)][rows] + gain for k, gain in last]
        chosen = np.stack(reached).argmax(axis=0)
        for position, (k, gain) in enumerate(last):
            here = chosen == position
            own = rows[here]
            at[own] = index_of[before(state, k)]
            own = own[gain[here] > 0]
            blocks[own, sum(state) - 1] = ranked[own, first[k][own] + state[k] - 1]
    return blocks


def _walk_in_turn(table: GroupTable, slots: Int64[np.ndarray, "rows width"]) -> list[int]:
    ranked = [by_need(table, slots, weighing) for weighing in _weighings(table)]
    found = [in_turn(table, order) for order in ranked]
    best = max(range(len(found)), key=lambda index: float(found[index][-1].max()))
    steps, groups = found[best], ranked[best][0].tolist()
    at = int(steps[-1][:, 0].argmax())
    order = []
    for index in range(len(steps) - 1, 0, -1):
        if steps[index][at, 0] > steps[index - 1][at, 0]:
            order.append(groups[index - 1])
            at -= int(table.tp[groups[index - 1]])
    order.reverse()
    # A group that fits beside the last producers is served as well, however little they have.
    left = int((levels(table, slots) > 0).sum()) - int(table.tp[order].sum())
    for group in groups:
        if table.kind[group] >= 0 and group not in order and table.tp[group] <= left:
            order.append(group)
            left -= int(table.tp[group])
    return order
