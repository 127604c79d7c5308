"""The program over prefixes: which consumers of a server to serve, for many servers at once.

With producers sorted by spare, a chosen set of consumer groups uses a prefix of them in blocks (by
exchange: min is supermodular), so a state is which groups are chosen and the last block's weakest
producer is known from how many shards they have. Three ways to keep the states few, all as numpy
columns over servers:

- *by kind*: among groups of one size and weight the neediest are chosen first, so a state is a
  number per kind. Exact; for few kinds, on servers of any width.
- *by group*: a state is a set of groups. Exact for any sizes and weights; at most half of the GPUs
  of a server can be served, so servers of 8 have at most 26 sets.
- *in turn*: groups are considered in the order of need, a state is the number of shards served.
  For racks with many kinds, where exact states number millions. What it finds can be served, but
  more might be (`Roster.is_exact` is False), so it may guide a search and never prove a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np

from aqua_placer.columns import Floats, Ints
from aqua_placer.instance import GRAIN_GB

State = tuple[int, ...]

MAX_STATES_NARROW: Final = 60
"""Above this many states by kind, sets of groups are fewer on servers of `NARROW` GPUs."""

NARROW: Final = 10
MAX_STATES: Final = 4_000
"""States by kind that a rack may have: 36 matched shards of sizes 1, 2 and 4 make 1,300."""


class Way(Enum):
    """How states are kept few."""

    BY_KIND = auto()
    BY_GROUP = auto()
    IN_TURN = auto()


@dataclass(frozen=True, eq=False)
class Roster:
    """Groups as rows to pick servers' contents from; the last row stands for an empty slot.

    Attributes:
        kind: Index into `kinds`, -1 for groups that are no consumers.
        kinds: The distinct (shards, weight) of consumers.
        half: Most shards that can be matched on a server: half of its GPUs.
    """

    tp: Ints
    r_gb: Floats
    weight: Floats
    kind: Ints
    kinds: tuple[tuple[int, float], ...]
    gpus: int
    way: Way

    @property
    def half(self) -> int:
        """Most shards that can be matched on a server: each needs a producer."""
        return self.gpus // 2

    @property
    def is_exact(self) -> bool:
        """Whether the program finds the most that can be covered."""
        return self.way is not Way.IN_TURN


def roster(tp: Ints, r_gb: Floats, weight: Floats, gpus: int) -> Roster:
    """Rows for `prefixes` from columns of one server class whose servers have `gpus` GPUs."""
    r_gb = np.where(np.abs(r_gb) > GRAIN_GB / 2, r_gb, 0.0)
    consumer = r_gb < 0
    keys = list(zip(tp.tolist(), weight.tolist(), strict=True))
    kinds = sorted({key for key, needs in zip(keys, consumer.tolist(), strict=True) if needs})
    index = {kind: i for i, kind in enumerate(kinds)}
    kind = [index[k] if needs else -1 for needs, k in zip(consumer.tolist(), keys, strict=True)]
    states = _count_states([size for size, _ in kinds], gpus // 2)
    if states <= (MAX_STATES_NARROW if gpus <= NARROW else MAX_STATES):
        way = Way.BY_KIND
    else:
        way = Way.BY_GROUP if gpus <= NARROW else Way.IN_TURN
    return Roster(
        np.append(tp, 0),
        np.append(r_gb, 0.0),
        np.append(weight, 0.0),
        np.array([*kind, -1], dtype=np.int64),
        tuple(kinds),
        gpus,
        way,
    )


def _count_states(sizes: list[int], half: int) -> int:
    """Ways to choose numbers of groups of these sizes with at most `half` shards."""
    ways = [1] + [0] * half
    for size in sizes:
        for shards in range(size, half + 1):
            ways[shards] += ways[shards - size]
    return sum(ways)


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


@lru_cache(maxsize=64)
def _sets_of_groups(groups: int, most: int) -> list[State]:
    """Sets of at most `most` out of `groups`, in an order that predecessors lead."""
    return sorted(
        (state for state in product((0, 1), repeat=groups) if sum(state) <= most), key=sum
    )


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The program on many servers whose states are alike.

    Attributes:
        level: Spare of the n-th producer shard, n from 1, (shards, servers); 0 beyond the last.
        needs: Per kind, needs in descending order, (depth, servers).
        sizes: Per kind, shards of a group: one number, or one per server.
        worths: Per kind, its weight times its shards, likewise.
        best: Most covered GB by state.
        total: Most over all states, (servers,).
    """

    states: list[State]
    level: Floats
    needs: list[Floats]
    sizes: list[int | Ints]
    worths: list[float | Floats]
    best: dict[State, Floats]
    total: Floats

    def gain(self, state: State, kind: int) -> Floats | None:
        """What the last group of `kind` adds in `state`; None when no server has so many."""
        taken = state[kind]
        if not taken or taken > len(self.needs[kind]):
            return None
        used = sum(n * size for n, size in zip(state, self.sizes, strict=True) if n)
        reached: Floats
        if isinstance(used, int):
            reached = self.level[used]
        else:
            deepest = len(self.level) - 1
            reached = self.level[np.minimum(used, deepest), np.arange(self.level.shape[1])]
        gain: Floats = np.minimum(self.needs[kind][taken - 1], reached) * self.worths[kind]
        return gain


def before(state: State, kind: int) -> State:
    """The state without its last group of `kind`."""
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def prefixes(table: Roster, slots: Ints) -> Prefixes:
    """Run the program by kind or by group on each row of `slots` (roster rows, -1 for empty).

    By group, rows must hold the same number of consumers, in their first slots (`by_consumers`).
    """
    r_gb, kind, half = table.r_gb[slots], table.kind[slots], table.half
    sizes: list[int | Ints]
    worths: list[float | Floats]
    if table.way is Way.BY_KIND:
        states = _states_by_kind(tuple(size for size, _ in table.kinds), half)
        shards = [size for size, _ in table.kinds]
        sizes = list(shards)
        worths = [size * weight for size, weight in table.kinds]
        needs = [_deepest(np.where(kind == i, -r_gb, 0.0), half // s) for i, s in enumerate(shards)]
    else:
        count = int((kind[0] >= 0).sum())
        states = _sets_of_groups(count, min(count, half, table.gpus - count))
        sizes = [table.tp[slots[:, i]] for i in range(count)]
        worths = [sizes[i] * table.weight[slots[:, i]] for i in range(count)]
        needs = [-r_gb[None, :, i] for i in range(count)]
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


def levels(table: Roster, slots: Ints) -> Floats:
    """Spare of the n-th producer shard of each row, n from 1, (half + 2, rows)."""
    spare = np.maximum(table.r_gb[slots], 0.0)
    order = np.argsort(-spare, axis=1, kind="stable")
    spare = np.take_along_axis(spare, order, axis=1)
    shards = np.cumsum(np.take_along_axis(table.tp[slots], order, axis=1), axis=1)
    level = np.zeros((table.half + 2, len(slots)))
    for shard in range(table.half):
        holder = np.minimum((shards <= shard).sum(axis=1), slots.shape[1] - 1)
        level[shard + 1] = spare[np.arange(len(slots)), holder]
    return level


def _deepest(need: Floats, deep: int) -> Floats:
    """The `deep` largest needs of each row in descending order, (depth, rows)."""
    if not deep:
        need = need[:, :0]
    elif deep < need.shape[1]:
        need = np.partition(need, need.shape[1] - deep - 1, axis=1)[:, -deep:]
    falling: Floats = -np.sort(-need, axis=1).T
    return falling


def by_consumers(table: Roster, slots: Ints) -> list[tuple[Ints, Ints]]:
    """Rows by their number of consumers: (indices of rows, their slots with consumers first)."""
    consumer = table.kind[slots] >= 0
    order = np.argsort(~consumer, axis=1, kind="stable")
    slots, counts = np.take_along_axis(slots, order, axis=1), consumer.sum(axis=1)
    return [
        (rows, slots[rows])
        for rows in (np.nonzero(counts == count)[0] for count in np.unique(counts).tolist())
    ]


def covered_gb(table: Roster, slots: Ints) -> Floats:
    """Covered demand of each row of `slots`."""
    result = np.zeros(len(slots))
    if not table.kinds or not table.half or not len(slots):
        return result
    if table.way is Way.BY_KIND:
        return prefixes(table, slots).total
    if table.way is Way.BY_GROUP:
        for rows, ordered in by_consumers(table, slots):
            result[rows] = prefixes(table, ordered).total
        return result
    most: Floats = in_turn(table, slots)[-1].max(axis=0)
    return most


def in_turn(table: Roster, slots: Ints) -> list[Floats]:
    """Most covered GB by shards served, (half + 1, rows), after each group in order of need.

    The groups of a row are taken in the order of `by_need`.
    """
    slots = by_need(table, slots)
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


def by_need(table: Roster, slots: Ints) -> Ints:
    """The slots of each row with the neediest consumers first and all others last."""
    order = np.argsort(np.where(table.kind[slots] >= 0, table.r_gb[slots], np.inf), axis=1)
    return np.take_along_axis(slots, order, axis=1)


def chosen_groups(table: Roster, slots: Ints) -> list[list[int]]:
    """Per row, the consumer groups that the program serves, in the order of their blocks."""
    chosen: list[list[int]] = [[] for _ in range(len(slots))]
    if not table.kinds or not table.half:
        return chosen
    if table.way is Way.BY_KIND:
        ranked = [
            [
                sorted(
                    (g for g in row if g >= 0 and table.kind[g] == kind),
                    key=lambda group: (float(table.r_gb[group]), group),
                )
                for kind in range(len(table.kinds))
            ]
            for row in slots.tolist()
        ]
        return _walk_back(prefixes(table, slots), ranked)
    if table.way is Way.BY_GROUP:
        for rows, ordered in by_consumers(table, slots):
            ranked = [[[group] for group in row] for row in ordered.tolist()]
            for row, groups in zip(
                rows.tolist(), _walk_back(prefixes(table, ordered), ranked), strict=True
            ):
                chosen[row] = groups
        return chosen
    return [_walk_in_turn(table, slots[row : row + 1]) for row in range(len(slots))]


def _walk_back(program: Prefixes, ranked: list[list[list[int]]]) -> list[list[int]]:
    """Undo the program of each row: which group came last, and so on down to none.

    Args:
        ranked: Per row and kind, its groups with the neediest first.
    """
    final = np.stack([program.best[state] for state in program.states]).argmax(axis=0)
    gains = {
        (state, kind): gain
        for state in program.states
        for kind in range(len(program.needs))
        if (gain := program.gain(state, kind)) is not None
    }
    result = []
    for row, of_kind in enumerate(ranked):
        state = program.states[int(final[row])]
        order: list[int] = []
        while any(state):
            kind = max(
                (kind for kind in range(len(state)) if (state, kind) in gains),
                key=lambda kind: program.best[before(state, kind)][row] + gains[state, kind][row],
            )
            if gains[state, kind][row] > 0:
                order.append(of_kind[kind][state[kind] - 1])
            state = before(state, kind)
        result.append(order[::-1])
    return result


def _walk_in_turn(table: Roster, slots: Ints) -> list[int]:
    steps = in_turn(table, slots)
    groups = by_need(table, slots)[0].tolist()
    at = int(steps[-1][:, 0].argmax())
    order = []
    for index in range(len(steps) - 1, 0, -1):
        if steps[index][at, 0] > steps[index - 1][at, 0]:
            order.append(groups[index - 1])
            at -= int(table.tp[groups[index - 1]])
    order.reverse()
    # Whoever fits beside the last producers is served as well, however little they have.
    left = int((levels(table, slots) > 0).sum()) - int(table.tp[order].sum())
    for group in groups:
        if table.kind[group] >= 0 and group not in order and table.tp[group] <= left:
            order.append(group)
            left -= int(table.tp[group])
    return order
