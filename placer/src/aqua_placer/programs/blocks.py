"""Which consumers get which producers: a program over blocks, columns made as they are needed.

Rows are kinds of groups, not servers: every consumer is served at most once, every producer shard
lent at most once, and blocks and the groups left alone make up servers (`compositions`). A column
is one block (`lending`) on one server class. Its worth knows that a group in lockstep cannot be
cut; the layer cake (`covering.layer_bound_gb`) does not, nor that a producer lent to a heavy
consumer of little need is gone for all others.

Thousands of sizes are merged with their neighbours. The bound is then made from the prices of the
merged program for all sizes there are, and the groups of a kind are served in the order of size,
so little is lost in either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.coverage.lending import Prices, Pricing, bound_at, mixed, sides, spread
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance, sign_of
from aqua_placer.programs.compositions import Compositions, Items, compositions, items_of
from aqua_placer.programs.linear import GrowingProgram, Model, solve

GRAINS: Final = ((24, 48), (80, 160), (240, 360))
"""Kinds of producers and of consumers in the program, in turn: beyond, neighbours in size are
merged. The prices of the coarse program tell the fine one which columns to begin with."""

FINEST: Final = (600, 900)
MANY_GROUPS: Final = 4_000
"""One grain more, a second or two, where thousands of groups would be merged into a few hundred
kinds: half a thousandth of the coverage, which exchanges could not regain in that time."""

MAX_ROUNDS: Final = 80
SMOOTHING: Final = 0.7
"""Share of the best known prices in those that columns are made at."""

TRACE: Final = 1e-9
WORTHWHILE_GB: Final = 1e-7

REPEATED: Final = 8
"""Blocks per kind of consumer that a program begins with when nothing is known."""

PER_BORROWER: Final = 3
"""Columns that a kind of consumer adds in one round."""

CLOSE: Final = 2e-5
"""Relative distance of the program to its bound at which no further column is worth its time."""

WIDENED: Final = 30
"""Columns per kind of consumer that whole blocks are chosen from beyond those of the program."""

OFFERED_BLOCKS: Final = 2_000
OFFERED_COMPOSITIONS: Final = 500
"""Columns of least reduced cost that the integer program chooses from."""

MAX_NODES: Final = 200
WHOLE_GAP: Final = 1e-4
WHOLE_LIMIT_S: Final = 5.0
LP_LIMIT_S: Final = 5.0

Block: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Kind of consumer, server class, kinds of the producer shards, the weakest last."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """What the program found.

    Attributes:
        bound_gb: No placement covers more.
        order: Consumer groups to serve, those with the best producers first.
        kind: Server class of each.
    """

    bound_gb: float
    order: Ints
    kind: Ints


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The linear program's optimum: its worth, how often each block, the duals of the rows."""

    worth: float
    times: Floats
    duals: Floats


class BlockProgram:
    """The program of one instance: grows by columns, then is rounded to whole blocks."""

    def __init__(
        self, instance: Instance, most: tuple[int, int], most_cnt: int | None = None
    ) -> None:
        self.instance = instance
        self.lenders, self.borrowers = sides(instance, most)
        self.sizes = np.unique(self.borrowers.tp).tolist()
        # A group that lends on one class and borrows on another has no place among the items.
        sign = sign_of(instance.r_gb)
        same_sign = bool((sign == sign[:, :1]).all())
        self.items: Items | None = items_of(instance) if same_sign else None
        self.made: Compositions | None = None
        self._number_rows()
        if self.items is not None:
            self.made = compositions(instance, self.items, most_cnt)
            self._of_compositions = self._composition_columns(self.items, self.made)
        self.columns: list[Block] = []
        self._known: set[Block] = set()
        self._worth: list[float] = []
        self._program = GrowingProgram(self.row_lower, self.row_upper)
        if self.made is not None:
            self._program.add(np.zeros(len(self.made.kind)), *self._of_compositions)

    def _number_rows(self) -> None:
        """Rows: borrowers, lenders, GPUs or servers of a class, items, blocks per class."""
        servers = self.instance.servers
        first_lender = len(self.borrowers.count)
        first_class = first_lender + len(self.lenders.count)
        self.first_lender, self.first_class = first_lender, first_class
        lower = [np.full(first_class, -np.inf)]
        upper = [self.borrowers.count, self.lenders.count]
        lower.append(np.full(len(servers.counts), -np.inf))
        upper.append(servers.counts.astype(np.float64))
        self.first_item = first_class + len(servers.counts)
        if self.items is not None:
            available = self.items.available.astype(np.float64)
            lower.append(available)
            upper.append(available)
        count = 0 if self.items is None else len(self.items.gpus)
        self.block_row = {}
        at = self.first_item + count
        for kind, gpus in enumerate(servers.gpus.tolist()):
            for size in self.sizes:
                if 2 * size <= gpus:
                    self.block_row[kind, size] = at
                    at += 1
        balanced = np.zeros(len(self.block_row))
        self.row_lower = np.concatenate([*lower, balanced])
        self.row_upper = np.concatenate([*upper, balanced])
        if self.items is None:
            self.row_lower[self.first_item :] = -np.inf
            self.row_upper[self.first_item :] = np.inf

    def _composition_columns(self, items: Items, made: Compositions) -> tuple[Ints, Ints, Floats]:
        """Column form of the compositions: a share of a server, its items, minus its blocks."""
        count = len(made.kind)
        position = {at: size for size, at in items.block_of.items()}
        column, item = np.nonzero(made.rows)
        values = made.rows[column, item].astype(np.float64)
        row = self.first_item + item
        is_block = np.isin(item, list(position))
        for index in np.nonzero(is_block)[0].tolist():
            key = (int(made.kind[column[index]]), position[int(item[index])])
            row[index] = self.block_row[key]
            values[index] = -values[index]
        column = np.concatenate([np.arange(count), column])
        row = np.concatenate([self.first_class + made.kind, row])
        values = np.concatenate([made.share, values])
        order = np.argsort(column, kind="stable")
        starts = np.searchsorted(column[order], np.arange(count + 1))
        return starts, row[order], values[order]

    def _entries(self, column: Block) -> dict[int, float]:
        """Rows of a block and what it takes of them."""
        borrower, kind, shards = column
        size = len(shards)
        entries = {borrower: 1.0}
        for lender in shards:
            row = self.first_lender + lender
            entries[row] = entries.get(row, 0.0) + 1.0
        if self.items is None:
            gpus = int(self.instance.servers.gpus[kind])
            entries[self.first_class + kind] = 2 * size / gpus
            return entries
        entries[self.first_item + self.items.single] = float(size)
        entries[self.first_item + self.items.alone[size]] = 1.0
        entries[self.block_row[kind, size]] = 1.0
        return entries

    def add(self, columns: list[Block]) -> int:
        """Add the blocks that are new; returns how many."""
        fresh = [column for column in dict.fromkeys(columns) if column not in self._known]
        if not fresh:
            return 0
        self._known.update(fresh)
        starts, rows, values, worth = [0], [], [], []
        for column in fresh:
            entries = self._entries(column)
            rows += list(entries)
            values += list(entries.values())
            starts.append(len(rows))
            borrower, kind, shards = column
            weakest = min(float(self.lenders.size_gb[lender, kind]) for lender in shards)
            covered = min(float(self.borrowers.size_gb[borrower, kind]), weakest)
            worth.append(float(self.borrowers.weight[borrower]) * len(shards) * covered)
        self.columns += fresh
        self._worth += worth
        self._program.add(np.array(worth), np.array(starts), np.array(rows), np.array(values))
        return len(fresh)

    def zipped(self, order: Ints, kind: Ints) -> list[Block]:
        """Blocks of the kinds of consumers in `order`, each with the best shards that are left."""
        found: list[Block] = []
        left = self.lenders.count.copy()
        lenders = [np.argsort(-column, kind="stable").tolist() for column in self.lenders.size_gb.T]
        at = [0] * len(lenders)
        for borrower, place in zip(order.tolist(), kind.tolist(), strict=True):
            size = int(self.borrowers.tp[borrower])
            ranked = lenders[place]
            shards: list[int] = []
            while at[place] < len(ranked) and len(shards) < size:
                lender = ranked[at[place]]
                taken = int(min(left[lender], size - len(shards)))
                shards += [lender] * taken
                left[lender] -= taken
                at[place] += left[lender] <= 0
            if len(shards) == size and self.lenders.size_gb[shards[-1], place] > 0:
                found.append((borrower, place, tuple(shards)))
        return found

    def first_blocks(self) -> list[Block]:
        """Blocks to begin with: the neediest get the best, heavy ones first, on every class."""
        found = []
        for kind, gpus in enumerate(self.instance.servers.gpus.tolist()):
            need = self.borrowers.size_gb[:, kind]
            order = np.lexsort((-need, -self.borrowers.weight))
            order = order[(need[order] > 0) & (2 * self.borrowers.tp[order] <= gpus)]
            order = np.repeat(order, np.minimum(self.borrowers.count[order], REPEATED).astype(int))
            found += self.zipped(order, np.full(len(order), kind))
        return found

    def relaxed(self, limit_s: float) -> Relaxed | None:
        """The linear program's optimum over the columns so far; None where there is none."""
        found = self._program.solve(limit_s)
        if found is None:
            return None
        worth, times, duals = found
        made = 0 if self.made is None else len(self.made.kind)
        return Relaxed(worth, times[made:], duals)

    @property
    def is_merged(self) -> bool:
        """Whether sizes that differ are one kind."""
        return self.lenders.is_merged or self.borrowers.is_merged

    def prices(self, duals: Floats) -> Prices:
        """Prices from the duals of the rows; those of servers such that no composition is left."""
        servers = self.instance.servers
        lender = np.maximum(duals[self.first_lender : self.first_class], 0.0)
        if self.items is None:
            per_server = np.maximum(duals[self.first_class : self.first_item], 0.0)
            block = {
                (kind, size): float(per_server[kind]) * 2 * size / int(servers.gpus[kind])
                for kind, size in self.block_row
            }
            return Prices(lender, block, float(per_server @ servers.counts))
        assert self.made is not None, "made where there are items"
        single = duals[self.first_item + self.items.single]
        block = {
            (kind, size): float(
                duals[row] + size * single + duals[self.first_item + self.items.alone[size]]
            )
            for (kind, size), row in self.block_row.items()
        }
        starts, rows, values = self._of_compositions
        is_item = rows >= self.first_item
        owed = np.add.reduceat(np.where(is_item, values * duals[rows], 0.0), starts[:-1])
        per_server = np.zeros(len(servers.counts))
        np.maximum.at(per_server, self.made.kind, -owed / self.made.share)
        items = duals[self.first_item : self.first_item + len(self.items.gpus)]
        constant = float(per_server @ servers.counts + items @ self.items.available)
        return Prices(lender, block, constant)

    def best_columns(self, prices: Prices, own: Floats | None, count: int) -> list[Block]:
        """For each borrower the blocks that gain most, where its `own` price is asked more."""
        found = []
        for kind, gpus in enumerate(self.instance.servers.gpus.tolist()):
            pricing = Pricing(self.lenders, kind, prices.lender, self.sizes)
            if not len(pricing.spare):
                continue
            for size in self.sizes:
                if 2 * size > gpus:
                    continue
                members = np.nonzero(self.borrowers.tp == size)[0]
                gains = pricing.gains(self.borrowers, members, kind)
                if own is not None:
                    gains -= prices.block.get((kind, size), 0.0) + own[members][:, None]
                most = min(count, gains.shape[1])
                best = np.argpartition(-gains, most - 1, axis=1)[:, :most]
                least = -np.inf if own is None else WORTHWHILE_GB
                worthwhile = np.take_along_axis(gains, best, axis=1) > least
                for row, at in zip(*np.nonzero(worthwhile), strict=True):
                    shards = pricing.shards(size, int(best[row, at]))
                    found.append((int(members[row]), kind, shards))
        return found

    def whole(self, duals: Floats, budget: Budget, seed: int) -> list[tuple[Block, int]]:
        """Whole blocks and how often each, by an integer program; empty when it found none."""
        worth = np.array(self._worth)
        entries = [self._entries(column) for column in self.columns]
        columns = np.repeat(np.arange(len(entries)), [len(entry) for entry in entries])
        rows = np.array([row for entry in entries for row in entry], dtype=np.int64)
        values = np.array([value for entry in entries for value in entry.values()])
        owed = np.bincount(columns, weights=values * duals[rows], minlength=len(entries))
        picked = np.sort(np.argsort(owed - worth, kind="stable")[:OFFERED_BLOCKS])
        starts, row_parts, value_parts = [0], [], []
        for index in picked.tolist():
            row_parts += list(entries[index])
            value_parts += list(entries[index].values())
            starts.append(len(row_parts))
        made = 0
        if self.made is not None:
            at, made_rows, made_values = self._of_compositions
            price = np.add.reduceat(made_values * duals[made_rows], at[:-1])
            offered = np.sort(np.argsort(price, kind="stable")[:OFFERED_COMPOSITIONS])
            made = len(offered)
            for index in offered.tolist():
                own = slice(int(at[index]), int(at[index + 1]))
                row_parts += made_rows[own].tolist()
                value_parts += made_values[own].tolist()
                starts.append(len(row_parts))
        # Shares of a server are no whole numbers: racks need only their blocks whole.
        listed = np.ones(made, dtype=np.int64)
        if self.made is not None:
            listed = (self.made.share[offered] == 1).astype(np.int64)
        model = Model(
            cost=np.concatenate([-worth[picked], np.zeros(made)]),
            upper=np.full(len(picked) + made, float(self.instance.servers.total_gpus)),
            starts=np.array(starts),
            rows=np.array(row_parts, dtype=np.int64),
            values=np.array(value_parts),
            row_lower=self.row_lower,
            row_upper=self.row_upper,
            integral=np.concatenate([np.ones(len(picked), dtype=np.int64), listed]),
        )
        answer = solve(
            model, budget, limit_s=WHOLE_LIMIT_S, gap=WHOLE_GAP, seed=seed, max_nodes=MAX_NODES
        )
        if answer.x is None:
            return []
        times = np.rint(answer.x[: len(picked)]).astype(np.int64)
        return [
            (self.columns[index], count)
            for index, count in zip(picked.tolist(), times.tolist(), strict=True)
            if count
        ]

    def largest_parts(self, times: Floats) -> list[tuple[Block, int]]:
        """The fractional solution by numbers per kind of consumer, the largest remainders up.

        With thousands of groups that is all the integer program could do, too.
        """
        found = []
        borrower = np.array([block[0] for block in self.columns[: len(times)]], dtype=np.int64)
        for kind in np.unique(borrower[times > TRACE]).tolist():
            own = np.nonzero((borrower == kind) & (times > TRACE))[0]
            whole = np.floor(times[own] + 1e-6).astype(np.int64)
            missing = round(float(times[own].sum())) - int(whole.sum())
            up = np.argsort(whole - times[own], kind="stable")[: max(missing, 0)]
            whole[up] += 1
            found += [
                (self.columns[index], count)
                for index, count in zip(own.tolist(), whole.tolist(), strict=True)
                if count
            ]
        return found

    def order_of(self, chosen: list[tuple[Block, int]]) -> tuple[Ints, Ints]:
        """Consumer groups to serve, those with the best producers first, and their class.

        Within a kind the neediest group gets the block of most spare.
        """
        found: list[tuple[float, float, int, int]] = []
        need = -self.instance.r_gb.min(axis=1)
        blocks: dict[int, list[tuple[float, int]]] = {}
        for (borrower, kind, shards), count in chosen:
            weakest = min(float(self.lenders.size_gb[lender, kind]) for lender in shards)
            blocks.setdefault(borrower, []).extend([(weakest, kind)] * count)
        for borrower, own in blocks.items():
            members = np.nonzero(self.borrowers.of_group == borrower)[0]
            members = members[np.argsort(-need[members], kind="stable")]
            own.sort(key=lambda block: -block[0])
            found += [
                (-weakest, -float(need[group]), group, kind)
                for group, (weakest, kind) in zip(members.tolist(), own, strict=False)
            ]
        found.sort()
        groups = np.array([group for _, _, group, _ in found], dtype=np.int64)
        return groups, np.array([kind for *_, kind in found], dtype=np.int64)


def solve_blocks(
    instance: Instance, budget: Budget, *, most_cnt: int | None = None, seed: int = 0
) -> Blocks | None:
    """The most that blocks cover, and whole blocks that nearly do.

    Args:
        most_cnt: Producers minus consumers of a server, at most; the bound then holds for such
            placements only.

    Returns:
        None when the program has no solution (or none in time).
    """
    program = BlockProgram(instance, GRAINS[0], most_cnt)
    if not len(program.borrowers.count) or not len(program.lenders.count):
        nobody = np.zeros(0, dtype=np.int64)
        return Blocks(0.0, nobody, nobody)
    program.add(program.first_blocks())
    found = _converged(program, budget, None)
    finer = (FINEST,) if instance.num_groups > MANY_GROUPS else ()
    for grain in (*GRAINS[1:], *finer):
        if found is None or not program.is_merged or budget.expired():
            break
        relaxed, prices, _ = found
        order, kind = program.order_of(program.largest_parts(relaxed.times))
        known = program.lenders
        program = BlockProgram(instance, grain, most_cnt)
        center = spread(prices, known, program.lenders)
        program.add(program.zipped(program.borrowers.of_group[order], kind))
        program.add(program.best_columns(center, None, PER_BORROWER))
        found = _converged(program, budget, center)
    if found is None:
        return None
    relaxed, prices, bound = found
    chosen = program.largest_parts(relaxed.times)
    if program.is_merged:
        fine = sides(instance)
        bound = bound_at(instance, spread(prices, program.lenders, fine[0]), fine)
    elif len(program.columns) <= 2 * OFFERED_BLOCKS:
        program.add(program.best_columns(prices, None, WIDENED))
        chosen = program.whole(relaxed.duals, budget, seed) or chosen
    order, kind = program.order_of(chosen)
    return Blocks(bound + GRAIN_GB, order, kind)


def _converged(
    program: BlockProgram, budget: Budget, center: Prices | None
) -> tuple[Relaxed, Prices, float] | None:
    """The program with the columns that it needs, its best prices, and the bound at these.

    Prices of a program with few columns jump about; columns are made at prices between those and
    the best known ones (Wentges's smoothing), which takes a tenth of the rounds.
    """
    sides_ = program.lenders, program.borrowers
    last = None
    bound = np.inf if center is None else bound_at(program.instance, center, sides_)
    for _ in range(MAX_ROUNDS):
        relaxed = program.relaxed(min(LP_LIMIT_S, budget.remaining_s()))
        if relaxed is None:
            break
        last = relaxed
        own = np.maximum(relaxed.duals[: program.first_lender], 0.0)
        prices = program.prices(relaxed.duals)
        asked = [prices] if center is None else [mixed(center, prices, SMOOTHING), prices]
        added = 0
        for price in asked:
            here = bound_at(program.instance, price, sides_)
            if here < bound:
                bound, center = here, price
            asking = own if price is prices else None
            added = program.add(program.best_columns(price, asking, PER_BORROWER))
            if added:
                break
        if bound <= relaxed.worth * (1 + CLOSE) + GRAIN_GB or budget.expired() or not added:
            break
    return None if last is None or center is None else (last, center, bound)
