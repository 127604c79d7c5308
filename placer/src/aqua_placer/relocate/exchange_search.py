"""Re-placement: reach the target again with few migrations.

Starts from today's placement. Groups without a place are put where they cover most, for free. Then
exchanges of up to two groups for two are sampled and bought at a falling price: as long as a
migrated shard costs many GB of coverage only the best are worth it. The search stops as soon as the
target is reached within epsilon, or the migrations are used up. What an exchange brings is exact
(the coverage of both servers), what it costs is exact too (a shard that returns home is refunded).

The target is the bound on coverage (or the min-max value that a fresh solve finds, for those
objectives), so "within epsilon" is a promise about the optimum, not about today. How few migrations
would do is not proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.bounds.thresholds import Thresholds
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInvalidError
from aqua_placer.problem.instance import GRAIN_GB, Instance, PairServers, PerServer, Placement
from aqua_placer.search.coverage import (
    MAX_ROWS,
    Exchanges,
    MigrationCost,
    ServerCost,
    best_exchanges,
    draw_pairs,
    make,
    scarcer_side,
)
from aqua_placer.search.layout import Layout, subsets
from aqua_placer.search.repair import constrained_groups
from aqua_placer.solve.placement import repaired
from aqua_placer.value.balance import BalanceMode, worst
from aqua_placer.value.coverage import group_tables
from aqua_protocol.plan import Objective

FALLING_PRICES: Final = (40.0, 28.0, 20.0, 15.0, 11.0, 8.0, 6.0, 4.5, 3.0, 2.0, 1.2, 0.6, 0.2)
"""GB of coverage that a migrated shard costs, round by round; a pair of GPUs seldom covers more
than 60 GB. With 20 steps instead of these, plans moved as much in a tenth more time."""

FREE_PRICE: Final = 1e6
"""GB a shard; at this price, and at twice it, only groups without a home move."""

# Rounds for newcomers, and at each price while something pays; doubled, the time of each doubles
# at most.
FREE_ROUNDS: Final = 14
ROUNDS_PER_PRICE: Final = 4

MAX_TRIMS: Final = 50
"""Groups sent home again once the target is overshot; a handful is usual, so doubling is free."""

MAX_LOSING: Final = 256
"""Servers that look for a partner in a round, those that lose most first. Doubled,
half as many partners are tried with each."""

# Pairs of a round, for exchanges of single groups and of up to two. With 3,000 a limit of 1% buys
# 0.7% less coverage where signs flip, with 6,000 0.2% more in a third more time; twice as many
# take twice as long.
MAX_PAIRS: Final = 4_500
MAX_WIDE_PAIRS: Final = 64


@dataclass(frozen=True)
class Target:
    """What to reach: covered GB for coverage, the min-max value otherwise."""

    objective: Objective
    goal: float
    cnt: int
    mem_gb: float


@dataclass(frozen=True, eq=False)
class Replaced:
    """The new placement and what it took."""

    placement: Placement
    migrated_shards: int
    reached: bool


def replace_groups(
    instance: Instance, target: Target, budget: Budget, *, seed: int, max_moves: int | None
) -> Replaced:
    """A placement that reaches the target, near `instance.current`.

    Args:
        max_moves: Most shards that may leave their server; None for no limit.

    Raises:
        ProblemInvalidError: Today's placement overfills a server.
        ProblemInfeasibleError: Groups without a place cannot be placed at all.
    """
    servers, placed = instance.servers, instance.current >= 0
    used = np.bincount(instance.current[placed], instance.tp[placed], servers.count)
    if (used > servers.capacity).any():
        server = int((used > servers.capacity).argmax())
        raise ProblemInvalidError(
            f"server {servers.name(server)} holds {used[server]:.0f} shards today but has "
            f"{servers.capacity[server]} GPUs",
            remedy="Correct `current`, or leave it out for groups that are not running.",
        )
    start = repaired(instance, instance.current, budget, seed)
    frozen = constrained_groups(instance) if instance.is_constrained else None
    search = _Search(Layout(instance, start, frozen), target, max_moves, seed)
    search.settle_arrivals(budget)
    if search.reached() and not search.migrated():
        return search.result()
    return search.run(budget)


def _cost(layout: Layout, target: Target) -> ServerCost:
    """For coverage, balance may not get worse than it is; else the aim is the target's."""
    instance = layout.instance
    if target.objective is Objective.COVERAGE:
        cnt, mem = worst(instance, layout.placement(), BalanceMode.ABS)
        cnt, mem = max(cnt, target.cnt), max(mem, target.mem_gb)
        aim = Thresholds(cnt, mem, BalanceMode.ABS, instance.hbm_gb)
        return ServerCost(aim, group_tables(instance))
    mode = BalanceMode(target.objective.value)
    return ServerCost(Thresholds(target.cnt, target.mem_gb, mode, instance.hbm_gb), ())


class _Search:
    """From a layout to the target: newcomers, then sampled exchanges at a falling price.

    Exchanges are made best first, and what is made does not depend on the limit of moves: it ends
    where one would exceed it, and the best layout on the way remains, so a larger limit never gets
    less.
    """

    def __init__(self, layout: Layout, target: Target, max_moves: int | None, seed: int) -> None:
        instance = layout.instance
        self.layout, self.target = layout, target
        self.cost = _cost(layout, target)
        self.prices = np.zeros(len(layout.slots))
        self._price()
        self.home, self.size = np.append(instance.current, -1), np.append(instance.tp, 0)
        self.rng = np.random.default_rng(seed)
        self.scarce = scarcer_side(layout)
        self.tables = {order: subsets(layout.window(order), order) for order in (1, 2)}
        self.max_moves, self.is_out = max_moves, False
        self.best = np.inf, self.layout.slots

    def settle_arrivals(self, budget: Budget) -> None:
        """Let newcomers change places among themselves and with free GPUs: that costs nothing."""
        if bool((self.layout.instance.current < 0).any()):
            self.rounds(self._migration(FREE_PRICE), FREE_ROUNDS, budget)

    def run(self, budget: Budget) -> Replaced:
        """Migrate until the target is met, nothing pays or the limit is used up."""
        for price in FALLING_PRICES:
            if self.reached() or self.is_out or budget.expired():
                break
            self.rounds(self._migration(price), ROUNDS_PER_PRICE, budget)
            budget.report("re-placing", -float(self.prices.sum()), self.target.goal)
        if self.best[0] < float(self.prices.sum()):
            self.layout.slots = self.best[1]
            self._price()
        self.trim()
        return self.result()

    def result(self) -> Replaced:
        """What the layout is now."""
        return Replaced(self.layout.placement(), self.migrated(), self.reached())

    def reached(self) -> bool:
        """Whether the target is met now."""
        if self.target.objective is Objective.COVERAGE:
            return -float(self.prices.sum()) >= self.target.goal - GRAIN_GB
        mode = BalanceMode(self.target.objective.value)
        cnt, mem = worst(self.layout.instance, self.layout.placement(), mode)
        return self.layout.instance.hbm_gb * cnt + mem <= self.target.goal + GRAIN_GB

    def migrated(self) -> int:
        """Shards that are away from home now."""
        slots = self.layout.slots
        return int(self._migration(1.0).shards(slots, np.arange(len(slots))).sum())

    def _price(self) -> None:
        layout = self.layout
        self.prices[:] = self.cost.price(layout.slots, layout.class_of, *layout.sums())

    def _migration(self, gb_per_shard: float) -> MigrationCost:
        return MigrationCost(self.home, self.size, gb_per_shard)

    def rounds(self, migration: MigrationCost, count: int, budget: Budget) -> None:
        """Rounds at a price until the target is met, nothing pays or the limit cuts them short."""
        free = migration.gb_per_shard >= FREE_PRICE
        for turn in range(count):
            if budget.expired() or self.is_out or (self.reached() and not free):
                break
            made = self.round(migration, order=1 + turn % 2, everyone=free and turn % 4 == 0)
            if not made and turn % 2:
                break

    def round(self, migration: MigrationCost, *, order: int, everyone: bool) -> bool:
        """Look at pairs, find the best exchange of each, make those that pay; True if any was."""
        layout = self.layout
        layout.shuffle(self.rng, order)
        loss = self.prices.copy()
        if self.cost.tables:
            loss += self.scarce[layout.slots, layout.class_of[:, None]].sum(axis=1)
        if self.cost.tables and not everyone:
            a, b = self._worthwhile(loss, migration, MAX_WIDE_PAIRS if order > 1 else MAX_PAIRS)
        else:
            a, b = draw_pairs(loss, self.rng, everyone=everyone)
        chunk = max(1, MAX_ROWS // len(self.tables[order]) ** order)
        made = False
        for at in range(0, len(a), chunk):
            pairs = (a[at : at + chunk], b[at : at + chunk])
            exchanges = self._best(pairs, order, migration)
            if exchanges is not None:
                made = self._make(exchanges, migration) or made
                if self.is_out or (self.reached() and migration.gb_per_shard < FREE_PRICE):
                    break
        return made

    def _best(
        self, pairs: tuple[PairServers, PairServers], order: int, migration: MigrationCost
    ) -> Exchanges | None:
        state, table = (self.layout, self.cost, self.prices), self.tables[order]
        return best_exchanges(*state, pairs, table, self.rng, tolerance=0.0, migration=migration)

    def trim(self) -> None:
        """Undo what the target turns out not to need: the last exchanges overshoot it."""
        migration = self._migration(FREE_PRICE)
        layout, home = self.layout, self.home
        for _ in range(MAX_TRIMS):
            if not self.reached():
                return
            server, slot = np.nonzero(layout.slots >= 0)
            origin = home[layout.slots[server, slot]]
            away = (origin >= 0) & (origin != server)
            a, b = server[away], origin[away]
            if not len(a):
                return
            exchanges = self._best((a, b), 1, migration)
            if exchanges is None:
                return
            left, right = exchanges.a, exchanges.b
            loss = exchanges.price_a + exchanges.price_b - self.prices[left] - self.prices[right]
            kept = layout.slots.copy(), self.prices.copy()
            make(layout, self.prices, exchanges.only(int(loss.argmin())))
            if not self.reached():
                layout.slots, self.prices[:] = kept
                return

    def _worthwhile(
        self, loss: PerServer, migration: MigrationCost, most: int
    ) -> tuple[PairServers, PairServers]:
        """Pairs that could pay: an exchange wins at most what both servers lose now."""
        losing = np.argsort(-loss, kind="stable")
        losing = losing[loss[losing] > GRAIN_GB][:MAX_LOSING]
        count = min(len(loss), max(2, most // max(len(losing), 1)))
        partners = [self.rng.permutation(len(loss))[:count] for _ in losing]
        a, b = np.repeat(losing, count), np.concatenate([losing[:0], *partners])
        least = migration.gb_per_shard if migration.gb_per_shard < FREE_PRICE else 0.0
        keep = (a != b) & (loss[a] + loss[b] >= least)
        # Each pair once, also where both lose.
        a, b = np.unique(np.sort([a[keep], b[keep]], axis=0), axis=1)
        drawn = self.rng.permutation(len(a))
        return a[drawn], b[drawn]

    def _make(self, exchanges: Exchanges, migration: MigrationCost) -> bool:
        """Make exchanges by gain per migration until the target or the limit; True if any."""
        left, right = exchanges.a, exchanges.b
        slots = self.layout.slots
        gain = self.prices[left] + self.prices[right] - exchanges.price_a - exchanges.price_b
        moves = (
            migration.shards(exchanges.rows_a, left)
            + migration.shards(exchanges.rows_b, right)
            - migration.shards(slots[left], left)
            - migration.shards(slots[right], right)
        )
        order = np.argsort(-gain / np.maximum(moves, 0.5), kind="stable")
        used, touched = self.migrated(), set[int]()
        for index in order.tolist():
            both = {int(left[index]), int(right[index])}
            # A server that has changed since makes the offer stale.
            if touched & both:
                continue
            if moves[index] > 0 and self.reached():
                break
            if self.max_moves is not None and used + int(moves[index]) > self.max_moves:
                # Cheaper ones further down would make another path than a larger limit takes.
                self.is_out = True
                break
            if gain[index] < 0 and float(self.prices.sum()) < self.best[0]:
                # Kept, because it is given up for migrations that this saves.
                self.best = float(self.prices.sum()), slots.copy()
            used += int(moves[index])
            touched |= both
            make(self.layout, self.prices, exchanges.only(index))
        return bool(touched)
