"""The fewest migrations that reach a coverage, by a program over contents of today and tomorrow.

Servers that hold the same residents today are alike. A column turns one of them into a content: it
costs the shards of residents that are not part of that content, newcomers come for free. Rows:
every server becomes something, every group is somewhere, the contents cover the goal together.
There are millions of columns, so they are made as the duals ask for them, over *all* contents;
what the linear program then takes is a bound that no placement beats, also when it is ended early
(Lagrange). Its vertex is nearly whole: an integer program over the columns of least reduced cost is
as a rule within a shard of the bound, and where those are all that could do better, proven.

For few types on servers of a few GPUs, groups neither pinned nor kept apart. Contents less balanced
than the aim are left out: the bound is about placements within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aqua_placer.budget import Budget
from aqua_placer.coverage.prefixes import covered_gb
from aqua_placer.coverage.rosters import roster
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.contents import ContentSpace, content_space
from aqua_placer.programs.linear import Answer, GrowingProgram, Model, columns_of, solve
from aqua_placer.programs.thresholds import Mode
from aqua_placer.search.exchange import Aim

Small: TypeAlias = npt.NDArray[np.int8]

MAX_CONTENTS: Final = 80_000
MAX_CELLS: Final = 16_000_000
"""Contents, and contents times kinds of servers today: a quarter of a second to price them all."""

NEAR: Final = 4
"""Shards that leave a server in the columns that every round prices; the others are priced when
none of these pays any more, and hardly one of them ever does."""

CHUNK: Final = 2_000_000
"""Columns priced at once, 16 MB."""

ELSEWHERE: Final = 127
"""Cost of a content of another server class: more shards than a server has."""

MAX_GPUS: Final = 16
"""Of a server; contents of racks are too many anyway, and coverage is exact up to here."""

MAX_ROUNDS: Final = 120
PER_SERVER: Final = 4
"""Columns that a kind of servers adds in one round."""

MISSING_PRICE: Final = 1e4
"""Shards that a GB below the goal costs: more than the last one that migrations can buy."""

OFFERED: Final = (500, 1_500)
"""Columns of least reduced cost for the integer program, in turn until the bound is met."""

MAX_NODES: Final = 100
WHOLE_LIMIT_S: Final = 5.0
LP_LIMIT_S: Final = 5.0
PAYS: Final = 1e-6
"""Shards that a column must save to be added."""

CLOSE: Final = 1e-3
"""Shards between the program and its bound at which no more columns are made."""


@dataclass(frozen=True, eq=False)
class _Cells:
    """Columns as (kind of servers today, content) with the shards that leave."""

    kind: Ints
    content: Ints
    cost: Floats


@dataclass(frozen=True, eq=False)
class Fewest:
    """What the program found.

    Attributes:
        bound: Shards that any placement within the aim migrates to reach the goal, at least.
        placement: One that reaches it with `shards` migrations; None when none was found.
    """

    bound: int
    placement: Ints | None
    shards: int

    @property
    def is_proven(self) -> bool:
        """Whether the placement migrates as few as can be."""
        return self.placement is not None and self.shards <= self.bound


def fewest_migrations(
    instance: Instance, start: Ints, aim: Aim, goal_gb: float, budget: Budget, seed: int
) -> Fewest | None:
    """Solve; None where contents are too many or servers are not interchangeable.

    Args:
        start: A placement of all groups near today's, to begin with.
        goal_gb: Reached by what covers it but for `GRAIN_GB`, so a goal of a grain or less asks
            for nothing, and is taken as zero rather than left to the solver's tolerance.
    """
    if instance.is_constrained or int(instance.servers.gpus.max()) > MAX_GPUS:
        return None
    space = content_space(
        instance.servers, instance.types, full=instance.is_full, limit=MAX_CONTENTS
    )
    if space is None:
        return None
    program = _Program(instance, space, start, aim, goal_gb if goal_gb > GRAIN_GB else 0.0)
    if program.is_too_large:
        return None
    if not program.converge(budget):
        return None
    return program.whole(budget, seed)


class _Program:
    """Columns (kind of servers today, content), made as they are needed."""

    def __init__(
        self, instance: Instance, space: ContentSpace, start: Ints, aim: Aim, goal_gb: float
    ) -> None:
        self.instance, self.goal_gb = instance, goal_gb
        types = instance.types
        residents = np.zeros((instance.servers.count, len(types.tp)), dtype=np.int64)
        stays = np.nonzero(instance.current >= 0)[0]
        np.add.at(residents, (instance.current[stays], types.of_group[stays]), 1)
        held = np.zeros_like(residents)
        np.add.at(held, (start, types.of_group), 1)
        class_of = instance.servers.class_of
        keyed = np.column_stack([class_of, residents])
        unique, of_server, count = np.unique(keyed, axis=0, return_inverse=True, return_counts=True)
        self.kind, self.today, self.count = unique[:, 0], unique[:, 1:], count.astype(np.float64)
        self.of_server = of_server.reshape(-1)
        self.residents = residents
        # Contents out of balance have no place, but whatever servers hold at the start stays so.
        key = np.abs(space.cnt) if aim.mode is Mode.ABS else space.cnt
        mem = np.abs(space.mem_gb) if aim.mode is Mode.ABS else space.mem_gb
        within = np.nonzero((key <= aim.cnt) & (mem <= aim.mem_gb + GRAIN_GB))[0]
        self.rows, self.row_kind = space.rows[within], space.kind[within]
        self.is_too_large = len(self.rows) * len(self.today) > MAX_CELLS
        if self.is_too_large:
            return
        self.covered = _covered(instance, self.rows, self.row_kind)
        self._by_type = np.ascontiguousarray(self.rows.T.astype(np.int8))
        self.near = self._near()
        first = list(
            zip(self.of_server.tolist(), self._positions(class_of, held).tolist(), strict=True)
        )
        kinds, total = len(self.today), types.counts.astype(np.float64)
        self.lower = np.concatenate([self.count, total, [goal_gb]])
        self.upper = np.concatenate([self.count, total, [np.inf]])
        self._program = GrowingProgram(self.lower, self.upper)
        self._program.add(
            np.array([-MISSING_PRICE]),
            np.array([0, 1]),
            np.array([len(self.lower) - 1]),
            np.ones(1),
        )
        self._known: set[tuple[int, int]] = set()
        self._add(first)
        self.bound = 0.0
        self.duals = np.zeros(kinds + len(total) + 1)

    def _positions(self, kind: Ints, held: Ints) -> Ints:
        """Where each of these contents is in `rows`."""
        weights = np.random.default_rng(0).integers(1, 1 << 62, held.shape[1] + 1)
        known = self.rows @ weights[1:] + self.row_kind * weights[0]
        wanted = held @ weights[1:] + kind * weights[0]
        order = np.argsort(known, kind="stable")
        found: Ints = order[np.searchsorted(known[order], wanted)]
        assert (self.rows[found] == held).all(), "what servers hold is within the aim"
        return found

    def _costs(self, kinds: slice) -> Small:
        """Shards that leave, (kinds of servers, contents); `ELSEWHERE` for another server class."""
        today = self.today[kinds].astype(np.int8)
        cost: Small = np.zeros((len(today), len(self.rows)), dtype=np.int8)
        for index, size in enumerate(self.instance.types.tp.tolist()):
            if today[:, index].any():
                leaving = today[:, index][:, None] - self._by_type[index]
                np.maximum(leaving, 0, out=leaving)
                leaving *= np.int8(size)
                cost += leaving
        if len(self.instance.servers.counts) > 1:
            cost[self.kind[kinds][:, None] != self.row_kind] = ELSEWHERE
        return cost

    def _profits(self, kinds: slice, value: Floats, duals: Floats) -> Floats:
        """Shards that one server of each kind saves by becoming each content."""
        cost = self._costs(kinds)
        profit: Floats = -value - duals[: len(self.today)][kinds, None] - cost
        if len(self.instance.servers.counts) > 1:
            profit[cost == ELSEWHERE] = -np.inf
        return profit

    def _chunks(self) -> Iterator[slice]:
        """Kinds of servers whose columns are priced at once."""
        step = max(1, CHUNK // max(len(self.rows), 1))
        for at in range(0, len(self.today), step):
            yield slice(at, min(at + step, len(self.today)))

    def _near(self) -> _Cells:
        """The columns that are cheap by themselves."""
        kinds, contents, costs = [], [], []
        for part in self._chunks():
            cost = self._costs(part)
            kind, content = np.nonzero(cost <= NEAR)
            kinds.append(kind + part.start)
            contents.append(content)
            costs.append(cost[kind, content])
        return _Cells(np.concatenate(kinds), np.concatenate(contents), np.concatenate(costs))

    def _column_costs(self, columns: Ints) -> Floats:
        """Shards that leave in each of these columns."""
        leaving = np.maximum(self.today[columns[:, 0]] - self.rows[columns[:, 1]], 0)
        cost: Floats = (leaving @ self.instance.types.tp).astype(np.float64)
        return cost

    def _entries(self, columns: Ints) -> Floats:
        """What the columns take of each row, (columns, rows)."""
        dense = np.zeros((len(columns), len(self.lower)))
        dense[np.arange(len(columns)), columns[:, 0]] = 1.0
        dense[:, len(self.today) : -1] = self.rows[columns[:, 1]]
        dense[:, -1] = self.covered[columns[:, 1]]
        return dense

    def _add(self, columns: list[tuple[int, int]]) -> int:
        fresh = [column for column in dict.fromkeys(columns) if column not in self._known]
        if fresh:
            self._known.update(fresh)
            own = np.array(fresh, dtype=np.int64)
            self._program.add(-self._column_costs(own), *columns_of(self._entries(own)))
        return len(fresh)

    def converge(self, budget: Budget) -> bool:
        """Add columns until none pays; False when the goal is out of reach, or time is up."""
        times = np.ones(1)
        for _ in range(MAX_ROUNDS):
            found = self._program.solve(min(LP_LIMIT_S, budget.remaining_s()))
            if found is None or budget.expired():
                return False
            worth, times, duals = found
            value = self.rows @ duals[len(self.today) : -1] + self.covered * duals[-1]
            if self._add(self._near_columns(value, duals)):
                continue
            columns, best = self._all_columns(value, duals)
            bound = -worth - float(self.count @ best)
            if bound >= self.bound:
                self.bound, self.duals = max(bound, 0.0), duals
            if not self._add(columns) or -worth - self.bound < CLOSE:
                break
        return bool(times[0] <= GRAIN_GB) and bool(self.duals.any() or self.bound == 0)

    def _near_columns(self, value: Floats, duals: Floats) -> list[tuple[int, int]]:
        """Of each kind of servers, the near columns that save most at these duals."""
        near = self.near
        profit = -near.cost - value[near.content] - duals[near.kind]
        pays = np.nonzero(profit > PAYS)[0]
        order = pays[np.lexsort((-profit[pays], near.kind[pays]))]
        kind = near.kind[order]
        rank = np.arange(len(kind)) - np.searchsorted(kind, kind)
        chosen = order[rank < PER_SERVER]
        return list(zip(near.kind[chosen].tolist(), near.content[chosen].tolist(), strict=True))

    def _all_columns(self, value: Floats, duals: Floats) -> tuple[list[tuple[int, int]], Floats]:
        """Of each kind, the column that saves most of all there are, and what it saves."""
        most, which = np.zeros(len(self.today)), np.zeros(len(self.today), dtype=np.int64)
        for part in self._chunks():
            profit = self._profits(part, value, duals)
            which[part] = profit.argmax(axis=1)
            most[part] = profit.max(axis=1)
        pays = np.nonzero(most > PAYS)[0]
        return list(zip(pays.tolist(), which[pays].tolist(), strict=True)), np.maximum(most, 0.0)

    def whole(self, budget: Budget, seed: int) -> Fewest:
        """Whole servers over the columns of least reduced cost."""
        least = _whole_above(self.bound)
        best = Fewest(least, None, 0)
        listed, profit = self._cheapest()
        for count in OFFERED:
            columns = listed[:count]
            answer = self._integral(columns, budget, seed)
            if answer.x is not None and self._covers(columns, answer.x):
                shards = round(answer.cost)
                # Columns that were not offered cost so much that none is in a better plan.
                if count >= len(profit) or self.bound - profit[count] > shards - 1 + CLOSE:
                    least = max(least, min(shards, _whole_above(answer.bound)))
                if best.placement is None or shards < best.shards:
                    times = np.rint(answer.x).astype(np.int64)
                    best = Fewest(least, self._dealt(columns, times), shards)
                best = replace(best, bound=least)
            if best.placement is not None and best.shards <= least:
                break
        return best

    def _covers(self, columns: Ints, x: Floats) -> bool:
        """Whether whole servers reach the goal: the solver's own tolerance is wider than ours."""
        covered = float(np.rint(x) @ self.covered[columns[:, 1]])
        return covered >= self.goal_gb - GRAIN_GB

    def _cheapest(self) -> tuple[Ints, Floats]:
        """The columns of least reduced cost of all there are, and what they save (0 or less)."""
        value = self.rows @ self.duals[len(self.today) : -1] + self.covered * self.duals[-1]
        columns, profits = [], []
        for part in self._chunks():
            profit = self._profits(part, value, self.duals)
            flat = profit.ravel()
            count = min(OFFERED[-1] + 1, len(flat))
            top = np.argpartition(-flat, count - 1)[:count]
            top = top[np.isfinite(flat[top])]
            kind, content = np.divmod(top, len(self.rows))
            columns.append(np.column_stack([kind + part.start, content]))
            profits.append(flat[top])
        listed, saved = np.concatenate(columns), np.concatenate(profits)
        order = np.lexsort((listed[:, 1], listed[:, 0], -saved))[: OFFERED[-1] + 1]
        return listed[order], saved[order]

    def _integral(self, columns: Ints, budget: Budget, seed: int) -> Answer:
        starts, rows, values = columns_of(self._entries(columns))
        model = Model(
            cost=self._column_costs(columns),
            upper=self.count[columns[:, 0]],
            starts=starts,
            rows=rows,
            values=values,
            row_lower=self.lower,
            row_upper=self.upper,
            integral=True,
        )
        return solve(model, budget, limit_s=WHOLE_LIMIT_S, seed=seed, max_nodes=MAX_NODES)

    def _dealt(self, columns: Ints, times: Ints) -> Ints:
        """Server of each group: residents stay where their content has a place for them."""
        of_group = self.instance.types.of_group
        placement = np.full(self.instance.num_groups, -1, dtype=np.int64)
        current = self.instance.current
        wanted = np.zeros_like(self.residents)
        turn = np.repeat(np.arange(len(columns)), times)
        turn = turn[np.argsort(columns[turn, 0], kind="stable")]
        servers = np.argsort(self.of_server, kind="stable")
        wanted[servers] = self.rows[columns[turn, 1]]
        for server, row in enumerate(wanted):
            here = np.nonzero(current == server)[0]
            for index in np.unique(of_group[here]).tolist():
                stay = here[of_group[here] == index][: int(row[index])]
                placement[stay] = server
                row[index] -= len(stay)
        for index in range(wanted.shape[1]):
            waiting = np.nonzero((of_group == index) & (placement < 0))[0]
            placement[waiting] = np.repeat(np.arange(len(wanted)), wanted[:, index])
        return placement


def _covered(instance: Instance, rows: Ints, kind: Ints) -> Floats:
    """Covered demand of each content on its server class."""
    types = instance.types
    example = np.zeros(len(types.tp), dtype=np.int64)
    example[types.of_group] = np.arange(instance.num_groups)
    content, index = np.nonzero(rows)
    copies = rows[content, index]
    content, index = np.repeat(content, copies), np.repeat(index, copies)
    held = rows.sum(axis=1)
    spot = np.arange(len(content)) - np.repeat(np.cumsum(held) - held, held)
    slots = np.full((len(rows), int(instance.servers.gpus.max())), -1, dtype=np.int64)
    slots[content, spot] = example[index]
    covered = np.zeros(len(rows))
    for place, gpus in enumerate(instance.servers.gpus.tolist()):
        table = roster(instance.tp, instance.r_gb[:, place], instance.weight, gpus)
        covered[kind == place] = covered_gb(table, slots[kind == place])
    return covered


def _whole_above(shards: float) -> int:
    """Migrations are whole shards."""
    return int(np.ceil(shards - 10 * CLOSE))
