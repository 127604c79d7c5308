"""Re-placement: reach the target again with few migrations.

Starts from today's placement. Groups without a place are put where they cover most, for free.
With few types `fewest` then says which migrations are needed. Else, and where they are limited to
less, `cycles` makes the replacements of most use; and where these do not suffice, exchanges of up
to two groups for two are sampled and bought at a falling price: as long as a migrated shard costs
many GB of coverage only the best are worth it. The search stops as soon as the target is reached
within epsilon, or the migrations are used up. What an exchange brings is exact (the coverage of
both servers), what it costs is exact too (a shard that returns home refunds its toll).

The target is the coverage that a fresh solve finds (or the min-max value, for those objectives),
so "within epsilon" is a promise about the optimum, not about today.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInvalidError
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.programs.thresholds import Mode
from aqua_placer.replan.cycles import Cycles, Spent
from aqua_placer.replan.fewest import fewest_migrations
from aqua_placer.search.dealing import first_fit, worst
from aqua_placer.search.exchange import Aim, Layout, subsets
from aqua_placer.search.packing import pack
from aqua_placer.search.pursuit import (
    MAX_ROWS,
    Judge,
    Offers,
    Toll,
    adopt,
    best_exchanges,
    draw_pairs,
    judge_for,
    scarcer_side,
)
from aqua_placer.solvers.constrained import constrained_groups, repair
from aqua_protocol.plan import Objective

FALLING_PRICES: Final = (
    *(45.0, 35.0, 28.0, 24.0, 20.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.5, 6.0, 5.0),
    *(4.0, 3.0, 2.0, 1.2, 0.7, 0.3, 0.1),
)
"""GB of coverage that a migrated shard costs, round by round; a pair of GPUs seldom covers more
than 60 GB."""

FREE_PRICE: Final = 1e6
"""At this price only groups without a home move."""

FREE_ROUNDS: Final = 14
ROUNDS_PER_PRICE: Final = 4

MAX_TRIMS: Final = 50

MAX_LOSING: Final = 256
"""Servers that look for a partner in a round, those that lose most first."""

MAX_PAIRS: Final = 6_000
MAX_WIDE_PAIRS: Final = 64
"""Pairs of a round, for exchanges of single groups and of up to two."""


@dataclass(frozen=True)
class Target:
    """What to reach: covered GB for coverage, the min-max value otherwise."""

    objective: Objective
    goal: float
    cnt: int
    mem_gb: float


@dataclass(frozen=True, eq=False)
class Replaced:
    """The new placement and what it took.

    Attributes:
        bound: Shards that migrate at least, whatever reaches the target and keeps the balance.
    """

    placement: Ints
    migrated_shards: int
    reached: bool
    bound: int = 0


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
    start = _with_arrivals(instance, budget, seed)
    frozen = constrained_groups(instance) if instance.is_constrained else None
    search = _Search(Layout(instance, start, frozen), target, max_moves, seed)
    search.settle_arrivals(budget)
    if search.reached() and not search.migrated():
        return search.result()
    fewest = None
    if target.objective is Objective.COVERAGE:
        start, aim = search.layout.placement(), search.judge.aim
        fewest = fewest_migrations(instance, start, aim, target.goal, budget, seed)
    if fewest is None:
        return search.run(budget)
    fits = fewest.placement is not None and (max_moves is None or fewest.shards <= max_moves)
    if not (fits and fewest.is_proven):
        found = replace(search.run(budget), bound=fewest.bound)
        if not fits or (found.reached and found.migrated_shards < fewest.shards):
            return found
    assert fewest.placement is not None, "only what there is fits the limit"
    return Replaced(fewest.placement, fewest.shards, reached=True, bound=fewest.bound)


def _judge(layout: Layout, target: Target) -> Judge:
    """For coverage, balance may not get worse than it is; else the aim is the target's."""
    if target.objective is Objective.COVERAGE:
        cnt, mem = worst(layout.instance, layout.placement(), Mode.ABS)
        aim = Aim(max(cnt, target.cnt), max(mem, target.mem_gb), Mode.ABS, layout.instance.hbm_gb)
        return judge_for(layout, aim)
    mode = Mode(target.objective.value)
    aim = Aim(target.cnt, target.mem_gb, mode, layout.instance.hbm_gb)
    return replace(judge_for(layout, aim), wants_coverage=False)


class _Search:
    """From a layout to the target: newcomers, then cycles, then sampled exchanges at a price.

    Exchanges are made best first, and what is made does not depend on the limit of moves: it ends
    where one would exceed it, and the best layout on the way remains, so a larger limit never gets
    less.
    """

    def __init__(self, layout: Layout, target: Target, max_moves: int | None, seed: int) -> None:
        instance = layout.instance
        self.layout, self.target = layout, target
        self.judge = _judge(layout, target)
        self.prices = np.zeros(len(layout.slots))
        self._price()
        self.home, self.size = np.append(instance.current, -1), np.append(instance.tp, 0)
        self.rng = np.random.default_rng(seed)
        self.scarce = scarcer_side(layout)
        self.tables = {order: subsets(layout.window(order), order) for order in (1, 2)}
        self.spent = Spent(max_moves)
        self.best = np.inf, self.layout.slots

    def settle_arrivals(self, budget: Budget) -> None:
        """Let newcomers change places among themselves and with free GPUs: that costs nothing."""
        if bool((self.layout.instance.current < 0).any()):
            self.rounds(self._toll(FREE_PRICE), FREE_ROUNDS, budget)

    def run(self, budget: Budget) -> Replaced:
        """Migrate until the target is met, nothing pays or the limit is used up."""
        if self.target.objective is Objective.COVERAGE and Cycles.suit(self.layout):
            self.spent.shards = self.migrated()
            cycles = Cycles(self.layout, self.judge, self.prices, self.home, self.target.goal)
            cycles.run(self.spent, budget)
        for price in FALLING_PRICES:
            if self.reached() or self.spent.is_out or budget.expired():
                break
            self.rounds(self._toll(price), ROUNDS_PER_PRICE, budget)
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
        mode = Mode(self.target.objective.value)
        cnt, mem = worst(self.layout.instance, self.layout.placement(), mode)
        return self.layout.instance.hbm_gb * cnt + mem <= self.target.goal + GRAIN_GB

    def migrated(self) -> int:
        """Shards that are away from home now."""
        slots = self.layout.slots
        return int(self._toll(1.0).shards(slots, np.arange(len(slots))).sum())

    def _price(self) -> None:
        layout = self.layout
        mem, cnt = layout.mem_gb(), layout.counts()
        self.prices[:] = self.judge.price(layout.slots, layout.class_of, mem, cnt)

    def _remember(self) -> None:
        """Keep what an exchange is about to give up for migrations that it saves."""
        total = float(self.prices.sum())
        if total < self.best[0]:
            self.best = total, self.layout.slots.copy()

    def _toll(self, gb_per_shard: float) -> Toll:
        return Toll(self.home, self.size, gb_per_shard)

    def rounds(self, toll: Toll, count: int, budget: Budget) -> None:
        """Rounds at a price until the target is met, nothing pays or the limit cuts them short."""
        free = toll.gb_per_shard >= FREE_PRICE
        for turn in range(count):
            if budget.expired() or self.spent.is_out or (self.reached() and not free):
                break
            made = self.round(toll, order=2 if turn % 2 else 1, everyone=free and turn % 4 == 0)
            if not made and turn % 2:
                break

    def round(self, toll: Toll, *, order: int, everyone: bool) -> bool:
        """Look at pairs, find the best exchange of each, make those that pay; True if any was."""
        layout = self.layout
        layout.shuffle(self.rng, order)
        loss = self.prices.copy()
        if self.judge.wants_coverage:
            loss += self.scarce[layout.slots, layout.class_of[:, None]].sum(axis=1)
        if self.judge.wants_coverage and not everyone:
            a, b = self._worthwhile(loss, toll, MAX_WIDE_PAIRS if order > 1 else MAX_PAIRS)
        else:
            a, b = draw_pairs(loss, self.rng, everyone=everyone)
        chunk = max(1, MAX_ROWS // len(self.tables[order]))
        made = False
        for at in range(0, len(a), chunk):
            pairs = (a[at : at + chunk], b[at : at + chunk])
            offers = best_exchanges(
                layout,
                self.judge,
                self.prices,
                pairs,
                self.tables[order],
                self.rng,
                tolerance=0.0,
                toll=toll,
            )
            if offers is not None:
                made = self._make(offers, *pairs, toll) or made
                if self.spent.is_out:
                    break
                if self.reached() and toll.gb_per_shard < FREE_PRICE:
                    break
        return made

    def trim(self) -> None:
        """Undo what the target turns out not to need: the last exchanges overshoot it."""
        toll = self._toll(FREE_PRICE)
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
            offers = best_exchanges(
                layout,
                self.judge,
                self.prices,
                (a, b),
                self.tables[1],
                self.rng,
                tolerance=0.0,
                toll=toll,
            )
            if offers is None:
                return
            left, right = a[offers.pair], b[offers.pair]
            loss = offers.price_a + offers.price_b - self.prices[left] - self.prices[right]
            cheapest = offers.only(int(loss.argmin()))
            kept = layout.slots.copy(), self.prices.copy()
            adopt(layout, self.prices, a[cheapest.pair], b[cheapest.pair], cheapest)
            if not self.reached():
                layout.slots, self.prices[:] = kept
                return

    def _worthwhile(self, loss: Floats, toll: Toll, most: int) -> tuple[Ints, Ints]:
        """Pairs that could pay: an exchange wins at most what both servers lose now."""
        losing = np.argsort(-loss, kind="stable")
        losing = losing[loss[losing] > GRAIN_GB][:MAX_LOSING]
        count = min(len(loss), max(2, most // max(len(losing), 1)))
        partners = [self.rng.permutation(len(loss))[:count] for _ in losing]
        a, b = np.repeat(losing, count), np.concatenate([losing[:0], *partners])
        least = toll.gb_per_shard if toll.gb_per_shard < FREE_PRICE else 0.0
        keep = (a != b) & (loss[a] + loss[b] >= least)
        return a[keep], b[keep]

    def _make(self, offers: Offers, a: Ints, b: Ints, toll: Toll) -> bool:
        """Make exchanges by gain per migration until the target or the limit; True if any."""
        left, right = a[offers.pair], b[offers.pair]
        slots = self.layout.slots
        gain = self.prices[left] + self.prices[right] - offers.price_a - offers.price_b
        moves = (
            toll.shards(offers.rows_a, left)
            + toll.shards(offers.rows_b, right)
            - toll.shards(slots[left], left)
            - toll.shards(slots[right], right)
        )
        order = np.argsort(-gain / np.maximum(moves, 0.5), kind="stable")
        used = int(toll.shards(slots, np.arange(len(slots))).sum())
        touched: set[int] = set()
        for index in order.tolist():
            both = {int(left[index]), int(right[index])}
            # A server that has changed since makes the offer stale.
            if touched & both:
                continue
            if moves[index] > 0 and self.reached():
                break
            if self.spent.limit is not None and used + int(moves[index]) > self.spent.limit:
                # Cheaper ones further down would make another path than a larger limit takes.
                self.spent.is_out = True
                break
            if gain[index] < 0:
                self._remember()
            used += int(moves[index])
            touched |= both
            one = offers.only(index)
            adopt(self.layout, self.prices, a[one.pair], b[one.pair], one)
        return bool(touched)


def _with_arrivals(instance: Instance, budget: Budget, seed: int) -> Ints:
    """Today's placement with the groups that have none put into free GPUs."""
    capacity = instance.servers.capacity
    placed = instance.current >= 0
    used = np.bincount(
        instance.current[placed], weights=instance.tp[placed], minlength=len(capacity)
    ).astype(np.int64)
    if (used > capacity).any():
        server = int((used > capacity).argmax())
        raise ProblemInvalidError(
            f"server {instance.servers.name(server)} holds {int(used[server])} shards today but "
            f"has {int(capacity[server])} GPUs",
            remedy="Correct `current`, or leave it out for groups that are not running.",
        )
    placement = instance.current.copy()
    waiting = np.nonzero(~placed)[0]
    waiting = waiting[np.argsort(-instance.tp[waiting], kind="stable")]
    free = capacity - used
    sign = np.where(instance.r_gb[:, 0] > 0, 1, -1)
    cnt = np.bincount(
        instance.current[placed], weights=(instance.tp * sign)[placed], minlength=len(capacity)
    )
    stuck = []
    for group in waiting.tolist():
        fits = np.nonzero(free >= instance.tp[group])[0]
        if not len(fits):
            stuck.append(group)
            continue
        # Producers to servers of consumers and the other way round; exchanges do the rest.
        server = int(fits[np.lexsort((free[fits], sign[group] * cnt[fits]))[0]])
        placement[group] = server
        free[server] -= instance.tp[group]
        cnt[server] += instance.tp[group] * sign[group]
    if stuck:
        placement = _make_room(instance, placement, stuck, budget)
    return repair(instance, placement, budget, seed) if instance.is_constrained else placement


def _make_room(instance: Instance, placement: Ints, stuck: list[int], budget: Budget) -> Ints:
    """Free GPUs are too scattered for large groups: empty the servers that need fewest moves."""
    placement = placement.copy()
    free = instance.servers.capacity - np.bincount(
        placement[placement >= 0],
        weights=instance.tp[placement >= 0],
        minlength=instance.servers.count,
    ).astype(np.int64)
    for group in stuck:
        size = int(instance.tp[group])
        for server in np.argsort(-free, kind="stable").tolist():
            here = np.nonzero(placement == server)[0]
            here = here[np.argsort(instance.tp[here], kind="stable")]
            trial, room = placement.copy(), free.copy()
            for other in here.tolist():
                if room[server] >= size:
                    break
                shards = int(instance.tp[other])
                fits = np.nonzero((room >= shards) & (np.arange(len(room)) != server))[0]
                if len(fits):
                    goal = int(fits[room[fits].argmin()])
                    trial[other] = goal
                    room[goal] -= shards
                    room[server] += shards
            if room[server] >= size:
                placement, free = trial, room
                placement[group] = server
                free[server] -= size
                break
        else:
            # Scattered beyond such repairs: start over from any placement that fits.
            fresh = first_fit(instance)
            return pack(instance, budget) if fresh is None else fresh
    return placement
