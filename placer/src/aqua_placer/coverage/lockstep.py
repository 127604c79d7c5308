"""An upper bound on coverage that knows lockstep: all groups on one giant server.

The layer cake (`covering.layer_bound_gb`) cuts a group of four into single shards at every level;
a group in lockstep cannot be cut, and where sizes all differ that costs a few tenths of a percent.
On one server that holds everything the program over prefixes is exact, and whatever servers there
are can only cover less. Its states are numbers per kind of consumer; along the most numerous kind
the recursion

    best(n) = max(reached(n), best(n - 1) + gain(n))

is a running maximum of `reached` less the sum of gains, so numpy walks it and only the other kinds
are looped over. Up to a few hundred GPUs that is milliseconds; in larger clusters neighbours in the
order of sizes differ so little that the layer cake is as good.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from aqua_placer.coverage.covering import can_be_served, lendable_shards
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import Instance

MAX_ROWS: Final = 4_000
"""Runs along the most numerous kind, some 20 us each."""


@dataclass(frozen=True, eq=False)
class GiantServer:
    """What one server that holds everything covers.

    Attributes:
        most_gb: Upper bound on covered demand of every placement.
        order: Consumer groups by their blocks, those with the best producers first.
    """

    most_gb: float
    order: Ints


@dataclass(frozen=True, eq=False)
class Kind:
    """Consumer groups of one size and weight, the neediest first.

    Attributes:
        worth: Of a GB per shard that one group covers.
    """

    size: int
    worth: float
    members: Ints
    need_gb: Floats


State: TypeAlias = tuple[int, ...]


class Recursion:
    """The program: states count groups of all kinds but the last, a column counts the last."""

    def __init__(self, kinds: list[Kind], level: Floats, half: int) -> None:
        *self.others, self.last = kinds
        self.level = level
        self.half = half
        self.best: dict[State, Floats] = {}

    def states(self) -> list[State] | None:
        """Numbers of the other kinds that fit, in an order that predecessors lead."""
        counts = [range(len(kind.members) + 1) for kind in self.others]
        if np.prod([float(len(count)) for count in counts]) > MAX_ROWS * 8:
            return None
        found = [state for state in product(*counts) if self._shards(state) <= self.half]
        return found if len(found) <= MAX_ROWS else None

    def _shards(self, state: State) -> int:
        return sum(n * kind.size for n, kind in zip(state, self.others, strict=True))

    def used(self, state: State) -> Ints:
        """Shards served with 0, 1, ... groups of the last kind."""
        first, size = self._shards(state), self.last.size
        most = min(len(self.last.members), (self.half - first) // size)
        used: Ints = first + size * np.arange(most + 1)
        return used

    def through(self, state: State, kind: int) -> Floats:
        """Covered where the last block is one of `kind`."""
        used, own = self.used(state), self.others[kind]
        before = self.best[_without(state, kind)][: len(used)]
        last = own.need_gb[state[kind] - 1]
        covered: Floats = before + own.worth * np.minimum(last, self.level[used])
        return covered

    def gains(self, state: State) -> Floats:
        """What the groups of the last kind add, one after the other."""
        used = self.used(state)[1:]
        gains: Floats = self.last.worth * np.minimum(
            self.last.need_gb[: len(used)], self.level[used]
        )
        return gains

    def solve(self, state: State) -> float:
        """Fill in a state whose predecessors are known; returns the most it covers."""
        reached = np.zeros(len(self.used(state)))
        for kind, count in enumerate(state):
            if count:
                reached = np.maximum(reached, self.through(state, kind))
        total = np.concatenate([[0.0], np.cumsum(self.gains(state))])
        self.best[state] = total + np.maximum.accumulate(reached - total)
        return float(self.best[state].max())

    def order(self, state: State) -> Ints:
        """The groups that the best of `state` serves, by their blocks."""
        found = []
        count = int(self.best[state].argmax())
        while count or any(state):
            # Whichever kind explains the value best is the one whose block came last.
            choices = {
                kind: float(self.through(state, kind)[count]) for kind, n in enumerate(state) if n
            }
            if count:
                earlier = float(self.best[state][count - 1])
                choices[len(self.others)] = earlier + float(self.gains(state)[count - 1])
            kind = max(choices, key=lambda kind: choices[kind])
            if kind == len(self.others):
                count -= 1
                found.append(self.last.members[count])
            else:
                state = _without(state, kind)
                found.append(self.others[kind].members[state[kind]])
        return np.array(found[::-1], dtype=np.int64)


def _without(state: State, kind: int) -> State:
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def on_giant_server(instance: Instance) -> GiantServer | None:
    """The most that could be covered and by which blocks; None where it would take too long.

    Where server classes differ, each group counts with its largest spare and its largest need.
    """
    spare = np.maximum(instance.r_gb.max(axis=1), 0.0)
    need = np.where(can_be_served(instance), np.maximum(-instance.r_gb.min(axis=1), 0.0), 0.0)
    lending = np.nonzero(spare)[0]
    lending = lending[np.argsort(-spare[lending], kind="stable")]
    level = np.concatenate([[0.0], np.repeat(spare[lending], lendable_shards(instance)[lending])])
    half = min(len(level) - 1, int(instance.servers.total_gpus) // 2)
    served = np.nonzero((need > 0) & (instance.tp <= half))[0]
    kinds = []
    for size, weight in sorted({(int(instance.tp[g]), float(instance.weight[g])) for g in served}):
        members = served[(instance.tp[served] == size) & (instance.weight[served] == weight)]
        members = members[np.argsort(-need[members], kind="stable")][: half // size]
        kinds.append(Kind(size, size * weight, members, need[members]))
    if not kinds:
        return GiantServer(0.0, np.zeros(0, dtype=np.int64))
    kinds.sort(key=lambda kind: len(kind.members))
    program = Recursion(kinds, level, half)
    states = program.states()
    if states is None:
        return None
    covered = [program.solve(state) for state in states]
    final = int(np.argmax(covered))
    return GiantServer(covered[final], program.order(states[final]))
