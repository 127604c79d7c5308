"""What servers cover, for thousands of them at once: the program over prefixes of producers.

A consumer group is covered when each of its shards has its own producer on the same server; the
group runs in lockstep, so it gets `weight x tp x min(need, spare of its weakest producer)`. With
producers sorted by spare, a chosen set of consumer groups uses a prefix of them in blocks (by
exchange: min is supermodular), and among groups of one size and weight the neediest are chosen
first. So a state is a number per kind of consumer, and each state is one numpy expression over all
servers.

That is exact, for few kinds. With many weights on a wide server, groups are considered in turn
instead, ranked by need and weight in several ways, the best of which counts, and a state is the
number of shards served. What is found can be served, but more might be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.problem.contents import ContentSpace
from aqua_placer.problem.instance import GRAIN_GB, Contents, Instance, PerRow, PerServer

State = tuple[int, ...]

MAX_STATES_PER_GPU: Final = 20
"""States of the exact program, per GPU of a server: 36 matched shards of a rack of 72, of sizes
1, 2 and 4, make 1,300. Four times as many cover three weights on servers of 16, and gained nothing
that was measured."""

WEIGHINGS: Final = (0.0, 0.5, 1.0)
"""Powers of the weight that needs are multiplied by to rank groups of several weights: where spare
is ample the needy take the best producers, where it is scarce the heavy do."""


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Groups as rows to pick servers' contents from; the last row stands for an empty slot.

    Attributes:
        kind: Index into `sizes`, -1 for groups that are no consumers.
        sizes: Shards of each kind of consumers.
        is_exact: Whether the program over numbers per kind has few enough states to be run.
        half: Most shards that can be matched on a server: each needs a producer.
    """

    tp: Int64[np.ndarray, " groups_and_none"]
    r_gb: Float64[np.ndarray, " groups_and_none"]
    weight: Float64[np.ndarray, " groups_and_none"]
    kind: Int64[np.ndarray, " groups_and_none"]
    sizes: tuple[int, ...]
    is_exact: bool
    half: int

    @cached_property
    def consumer_weight(self) -> Float64[np.ndarray, " groups_and_none"]:
        """Worth of a covered GB; 0 for groups that are no consumers."""
        return np.where(self.kind >= 0, self.weight, 0.0)

    @cached_property
    def lent_gb(self) -> Float64[np.ndarray, " groups_and_none"]:
        """What all shards of a group could lend."""
        lent: Float64[np.ndarray, " groups_and_none"] = np.maximum(self.r_gb, 0.0) * self.tp
        return lent


def group_table(
    tp: Int64[np.ndarray, " groups"],
    r_gb: Float64[np.ndarray, " groups"],
    weight: Float64[np.ndarray, " groups"],
    gpus: int,
) -> GroupTable:
    """The table from columns of one server class whose servers have `gpus` GPUs."""
    r_gb = np.where(np.abs(r_gb) > GRAIN_GB / 2, r_gb, 0.0)
    consumers = np.nonzero(r_gb < 0)[0]
    keys = np.stack([tp[consumers], weight[consumers]], axis=1)
    kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
    sizes = kinds[:, 0].astype(int).tolist()
    kind = np.full(len(tp) + 1, -1, dtype=np.int64)
    kind[consumers] = kind_of.reshape(-1)
    return GroupTable(
        tp=np.append(tp, 0),
        r_gb=np.append(r_gb, 0.0),
        weight=np.append(weight, 0.0),
        kind=kind,
        sizes=tuple(sizes),
        is_exact=_count_states(sizes, gpus // 2) <= MAX_STATES_PER_GPU * gpus,
        half=gpus // 2,
    )


def group_tables(instance: Instance) -> tuple[GroupTable, ...]:
    """The table of each server class."""
    return tuple(
        group_table(instance.tp, instance.r_gb[:, kind], instance.weight, gpus)
        for kind, gpus in enumerate(instance.servers.gpus.tolist())
    )


def _count_states(sizes: list[int], half: int) -> int:
    """Ways to choose numbers of groups of these sizes with at most `half` shards."""
    ways = [1] + [0] * half
    for size in sizes:
        for shards in range(size, half + 1):
            ways[shards] += ways[shards - size]
    return sum(ways)


@lru_cache(maxsize=64)
def _states(sizes: tuple[int, ...], half: int) -> list[State]:
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
class PrefixProgram:
    """The program on many servers whose states are alike.

    Attributes:
        level: Spare of the n-th producer shard, n from 1, (shards, servers); 0 beyond the last.
        ranked: Per kind its neediest groups, -1 after the last, (depth, servers); `need` is theirs
            and `worth` what a GB of it counts on all shards.
        best: Most covered GB by state.
        total: Most over all states, (servers,).
    """

    table: GroupTable
    states: list[State]
    level: Float64[np.ndarray, "half_and_one rows"]
    ranked: list[Int64[np.ndarray, "depth rows"]]
    need: list[Float64[np.ndarray, "depth rows"]]
    worth: list[Float64[np.ndarray, "depth rows"]]
    best: dict[State, PerRow]
    total: PerRow

    def last_steps(self, state: State) -> list[tuple[int, PerRow, PerRow]]:
        """What `state` covers if its last group is of a kind, and what that adds, kind by kind."""
        used = sum(n * size for n, size in zip(state, self.table.sizes, strict=True))
        steps = []
        for kind, taken in enumerate(state):
            if 0 < taken <= len(self.ranked[kind]):
                gain = np.minimum(self.need[kind][taken - 1], self.level[used])
                gain *= self.worth[kind][taken - 1]
                steps.append((kind, self.best[before(state, kind)] + gain, gain))
        return steps


def before(state: State, kind: int) -> State:
    """The state without its last group of `kind`."""
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def _run(table: GroupTable, slots: Contents) -> PrefixProgram:
    """Run the program on each row of `slots` (rows of the table, -1 for empty)."""
    states = _states(table.sizes, table.half)
    ranked = _ranked(table, slots)
    need = [-table.r_gb[groups] for groups in ranked]
    worth = [table.weight[groups] * table.tp[groups] for groups in ranked]
    level, total = levels(table, slots), np.zeros(len(slots))
    program = PrefixProgram(table, states, level, ranked, need, worth, {}, total)
    for state in states:
        value = None
        for _, reached, _ in program.last_steps(state):
            value = reached if value is None else np.maximum(value, reached)
        program.best[state] = np.zeros(len(slots)) if value is None else value
        np.maximum(program.total, program.best[state], out=program.total)
    return program


def _ranked(table: GroupTable, slots: Contents) -> list[Int64[np.ndarray, "depth rows"]]:
    """Per kind, the groups of each row that need most, as many as could be served."""
    kind, found = table.kind[slots], []
    for index, size in enumerate(table.sizes):
        own = np.where(kind == index, table.r_gb[slots], 0.0)
        order = np.argsort(own, axis=1, kind="stable")[:, : table.half // size]
        groups = np.take_along_axis(slots, order, axis=1)
        found.append(np.where(table.kind[groups] == index, groups, -1).T)
    return found


def covered_gb(table: GroupTable, slots: Contents) -> PerRow:
    """Covered demand of each row of `slots`."""
    if not table.sizes or not table.half or not len(slots):
        return np.zeros(len(slots))
    if table.is_exact:
        return _run(table, slots).total
    found = [_in_turn(table, _by_need(table, slots, power))[-1] for power in WEIGHINGS]
    best: PerRow = np.max(found, axis=(0, 1))
    return best


def chosen_groups(table: GroupTable, slots: Contents) -> list[list[int]]:
    """Per row, the consumer groups that the program serves, in the order of their blocks."""
    if not table.sizes or not table.half or not len(slots):
        return [[] for _ in range(len(slots))]
    if table.is_exact:
        return [[g for g in row if g >= 0] for row in _walk_back(_run(table, slots)).tolist()]
    return [_walk_in_turn(table, slots[row : row + 1]) for row in range(len(slots))]


def _in_turn(table: GroupTable, slots: Contents) -> list[Float64[np.ndarray, "half_and_one rows"]]:
    """Most covered GB by shards served, (half + 1, rows), after each group in the order of slots.

    All consumers of a row are before its other slots, as `_by_need` leaves them.
    """
    level = levels(table, slots)
    shards = np.arange(len(level))[:, None]
    steps = [np.zeros((len(level), len(slots)))]
    width = int((table.kind[slots] >= 0).sum(axis=1).max(initial=0))
    for index in range(width):
        group = slots[:, index]
        size = np.where(table.kind[group] >= 0, table.tp[group], len(level))
        earlier = shards - size[None, :]
        reached = np.take_along_axis(steps[-1], np.maximum(earlier, 0), axis=0)
        gain = np.minimum(-table.r_gb[group], level) * (size * table.weight[group])
        steps.append(np.where(earlier >= 0, np.maximum(steps[-1], reached + gain), steps[-1]))
    return steps


def _by_need(table: GroupTable, slots: Contents, power: float) -> Contents:
    """The slots of each row with the neediest consumers first and all others last."""
    need = table.r_gb[slots] * table.weight[slots] ** power
    order = np.argsort(np.where(table.kind[slots] >= 0, need, np.inf), axis=1, kind="stable")
    return np.take_along_axis(slots, order, axis=1)


def _walk_in_turn(table: GroupTable, slots: Int64[np.ndarray, "one width"]) -> list[int]:
    ranked = [_by_need(table, slots, power) for power in WEIGHINGS]
    found = [_in_turn(table, order) for order in ranked]
    best = max(range(len(found)), key=lambda index: float(found[index][-1].max()))
    steps, groups, served = found[best], ranked[best][0].tolist(), []
    at = int(steps[-1][:, 0].argmax())
    for index in range(len(steps) - 1, 0, -1):
        if steps[index][at, 0] > steps[index - 1][at, 0]:
            served.append(groups[index - 1])
            at -= int(table.tp[groups[index - 1]])
    served.reverse()
    # A group that fits beside the last producers is served as well, however little they have.
    left = int((levels(table, slots) > 0).sum()) - int(table.tp[served].sum())
    for group in groups:
        if table.kind[group] >= 0 and group not in served and table.tp[group] <= left:
            served.append(group)
            left -= int(table.tp[group])
    return served


def _walk_back(program: PrefixProgram) -> Int64[np.ndarray, "rows half"]:
    """Undo the program of all rows at once: which group came last, and so on down to none.

    Every state is visited once, those of most groups first, by the rows that pass through it.

    Returns:
        The served groups by their blocks, -1 where no group gains from one, (rows, most blocks).
    """
    index_of = {state: index for index, state in enumerate(program.states)}
    at = np.stack([program.best[state] for state in program.states]).argmax(axis=0)
    blocks = np.full((len(at), program.table.half), -1, dtype=np.int64)
    for index in range(len(program.states) - 1, 0, -1):
        rows = np.nonzero(at == index)[0]
        if not len(rows):
            continue
        state = program.states[index]
        steps = program.last_steps(state)
        chosen = np.stack([reached[rows] for _, reached, _ in steps]).argmax(axis=0)
        for position, (kind, _, gain) in enumerate(steps):
            own = rows[chosen == position]
            at[own] = index_of[before(state, kind)]
            own = own[gain[own] > 0]
            blocks[own, sum(state) - 1] = program.ranked[kind][state[kind] - 1, own]
    return blocks


def levels(table: GroupTable, slots: Contents) -> Float64[np.ndarray, "half_and_one rows"]:
    """Spare of the n-th producer shard of each row, n from 1; 0 before it and after the last."""
    spare = np.maximum(table.r_gb[slots], 0.0)
    order = np.argsort(-spare, axis=1, kind="stable")
    spare = np.take_along_axis(spare, order, axis=1)
    shards = np.cumsum(np.take_along_axis(table.tp[slots], order, axis=1), axis=1)
    level = np.zeros((table.half + 1, len(slots)))
    for shard in range(table.half):
        holder = np.minimum((shards <= shard).sum(axis=1), slots.shape[1] - 1)
        level[shard + 1] = spare[np.arange(len(slots)), holder]
    return level


def at_most_gb(table: GroupTable, slots: Contents) -> PerRow:
    """A quick bound on the covered demand of each row, without a sort.

    No consumer gets more than the producer of most spare has, and the heaviest consumer could at
    best have all that is lent.
    """
    r_gb, weight = table.r_gb[slots], table.consumer_weight[slots]
    asked = np.minimum(-r_gb, r_gb.max(axis=1, keepdims=True)) * weight * table.tp[slots]
    lent = table.lent_gb[slots].sum(axis=1) * weight.max(axis=1)
    most: PerRow = np.maximum(np.minimum(asked.sum(axis=1), lent), 0.0)
    return most


def coverage_gb(
    instance: Instance,
    slots: Int64[np.ndarray, "servers width"],
    class_of: Int64[np.ndarray, " servers"],
) -> PerServer:
    """Covered demand per server of a layout's slots."""
    return by_class(covered_gb, group_tables(instance), slots, class_of)


def by_class(
    measure: Callable[[GroupTable, Contents], PerRow],
    tables: Sequence[GroupTable],
    rows: Contents,
    kind: Int64[np.ndarray, " rows"],
) -> PerRow:
    """What `measure` says of contents on servers of class `kind`; 0 where there are no tables."""
    result = np.zeros(len(rows))
    for index, table in enumerate(tables):
        here = slice(None) if len(tables) == 1 else kind == index
        result[here] = measure(table, rows[here])
    return result


def content_worth_gb(space: ContentSpace) -> Float64[np.ndarray, " contents"]:
    """Coverage of each content."""
    types = space.types
    result = np.zeros(len(space.rows))
    for kind, gpus in enumerate(space.servers.gpus.tolist()):
        here = np.nonzero(space.kind == kind)[0]
        rows = space.rows[here]
        counts = rows.sum(axis=1)
        slots = np.full((len(rows), max(gpus, 1)), -1, dtype=np.int64)
        flat = np.repeat(np.tile(np.arange(rows.shape[1]), len(rows)), rows.reshape(-1))
        first = np.repeat(np.cumsum(counts) - counts, counts)
        slots[np.repeat(np.arange(len(rows)), counts), np.arange(len(flat)) - first] = flat
        table = group_table(types.tp, types.r_gb[:, kind], types.weight, gpus)
        result[here] = covered_gb(table, slots)
    return result


def demand_gb(instance: Instance) -> float:
    """Demand of all consumer groups; on the class where each needs least, if classes differ."""
    need = np.maximum(-instance.r_gb.max(axis=1), 0.0)
    return float((instance.weight * instance.tp * need).sum())
