"""Groups by server as a table that exchanges change, and which exchanges a round looks at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Int64

from aqua_placer.problem.instance import (
    Contents,
    Instance,
    PairServers,
    PerRow,
    PerServer,
    Placement,
    SlotSets,
)

# Slots per server that one round exchanges between, for exchanges of single groups and of more;
# the groups of wider servers take turns at random. The exchanges of a pair of servers grow with
# the fourth power of the slots that pairs of groups are taken from: twice as many take 16 times
# as long.
WINDOW: Final = 16
PAIR_WINDOW: Final = 8

Servers: TypeAlias = slice | Int64[np.ndarray, " servers"]
EVERY: Final = slice(None)


class Layout:
    """Groups by server: a mutable table that only exchanges change.

    Attributes:
        slots: Group index per server and slot, -1 for an unused slot, (num_servers, width).
        frozen: Groups that no exchange may touch.
    """

    def __init__(
        self,
        instance: Instance,
        placement: Placement,
        frozen: Bool[np.ndarray, " groups"] | None = None,
    ) -> None:
        self.instance = instance
        # As columns below, one entry more for the empty slot; None when every group may move.
        self.frozen = None if frozen is None else np.append(frozen, False)
        servers = instance.servers
        self.class_of = servers.class_of
        order = np.argsort(placement, kind="stable")
        held = np.bincount(placement, minlength=servers.count)
        width = int(servers.gpus.max())
        self.slots = np.full((servers.count, width), -1, dtype=np.int64)
        first = np.cumsum(held) - held
        self.slots[placement[order], np.arange(len(order)) - first[placement[order]]] = order
        # One row more than groups: index -1 reads the empty slot.
        self.size = np.append(instance.tp, 0)
        self.mem = np.vstack(
            [instance.tp[:, None] * instance.r_gb, np.zeros((1, len(servers.counts)))]
        )
        self.cnt = np.vstack(
            [instance.tp[:, None] * instance.sign, np.zeros((1, len(servers.counts)), np.int64)]
        )

    def window(self, order: int) -> int:
        """Slots of a server that a round of exchanges of `order` groups looks at."""
        return min(self.slots.shape[1], WINDOW if order == 1 else PAIR_WINDOW)

    def shuffle(self, rng: np.random.Generator, order: int) -> None:
        """Bring other groups of wide servers into the window; narrow servers stay as they are."""
        if self.slots.shape[1] > self.window(order):
            drawn = np.argsort(rng.random(self.slots.shape), axis=1)
            self.slots = np.take_along_axis(self.slots, drawn, axis=1)

    def placement(self) -> Placement:
        """Server of each group."""
        result = np.full(self.instance.num_groups, -1, dtype=np.int64)
        server, slot = np.nonzero(self.slots >= 0)
        result[self.slots[server, slot]] = server
        return result

    def sums(self, servers: Servers = EVERY) -> tuple[PerServer, Int64[np.ndarray, " servers"]]:
        """Signed memory (GB), and producer minus consumer shards, per server."""
        return self.sums_of(self.slots[servers], self.class_of[servers])

    def sums_of(
        self, rows: Contents, kind: Int64[np.ndarray, " rows"]
    ) -> tuple[PerRow, Int64[np.ndarray, " rows"]]:
        """The same of contents on servers of class `kind`."""
        return self.mem[rows, kind[:, None]].sum(axis=1), self.cnt[rows, kind[:, None]].sum(axis=1)

    def put(self, servers: PairServers, rows: Int64[np.ndarray, "pairs wider"]) -> None:
        """Give servers these contents, groups first and empty slots cut off."""
        order = np.argsort(rows < 0, axis=1, kind="stable")
        packed = np.take_along_axis(rows, order, axis=1)
        self.slots[servers] = packed[:, : self.slots.shape[1]]

    def free(self, servers: Servers = EVERY) -> Int64[np.ndarray, " servers"]:
        """Unused GPUs per server."""
        used: Int64[np.ndarray, " servers"] = self.size[self.slots[servers]].sum(axis=1)
        unused: Int64[np.ndarray, " servers"] = self.instance.servers.capacity[servers] - used
        return unused


def subsets(width: int, order: int) -> SlotSets:
    """All sets of at most `order` slots, padded with the extra slot `width`, (num_sets, order)."""
    rows = [
        chosen + (width,) * (order - count)
        for count in range(order + 1)
        for chosen in combinations(range(width), count)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, order)


@dataclass(frozen=True)
class Effort:
    """How long to search, in rounds: the same on every machine.

    Attributes:
        order: Most groups of a server that one exchange takes.
        patience: Rounds without progress before giving up.
        tolerance: By how much a pair may get worse on the way, in the unit of its cost.
    """

    rounds: int
    order: int
    patience: int = 30
    tolerance: float = 0.0


@dataclass(frozen=True, eq=False)
class ExchangeNeighbourhood:
    """Pairs of servers (a[i], b[i]) and every set of groups that they could exchange.

    Attributes:
        sets_a: The groups of each set of slots of `a`, -1 for none; `sets_b` likewise.
        fits: Whether the n-th set of `a` can be exchanged for the m-th of `b`.
    """

    layout: Layout
    a: PairServers
    b: PairServers
    table: SlotSets
    sets_a: Int64[np.ndarray, "pairs sets order"]
    sets_b: Int64[np.ndarray, "pairs sets order"]
    fits: Bool[np.ndarray, "pairs sets sets"]

    @classmethod
    def between(
        cls, layout: Layout, a: PairServers, b: PairServers, table: SlotSets
    ) -> ExchangeNeighbourhood:
        """Sets of slots as `subsets` lists them; one that names an unused slot fits nowhere."""
        window = layout.window(table.shape[1])
        real = table < window
        sets, free, may = [], [], []
        for server in (a, b):
            slots = layout.slots[server]
            pad = np.full((len(server), 1), -1, dtype=np.int64)
            groups = np.concatenate([slots[:, :window], pad], axis=1)[:, table]
            movable = ((groups >= 0) == real).all(axis=2)
            if layout.frozen is not None:
                movable &= ~layout.frozen[groups].any(axis=2)
            sets.append(groups)
            free.append(layout.free(server)[:, None, None])
            may.append(movable)
        size_a, size_b = (layout.size[groups].sum(axis=2) for groups in sets)
        grow = size_b[:, None, :] - size_a[:, :, None]
        fits = (grow <= free[0]) & (-grow <= free[1]) & may[0][:, :, None] & may[1][:, None, :]
        return cls(layout, a, b, table, sets[0], sets[1], fits)

    def contents(
        self,
        pair: Int64[np.ndarray, " exchanges"],
        i: Int64[np.ndarray, " exchanges"],
        j: Int64[np.ndarray, " exchanges"],
    ) -> tuple[Int64[np.ndarray, "exchanges wider"], Int64[np.ndarray, "exchanges wider"]]:
        """Contents of both servers after the exchange of set `i` of a pair's `a` for set `j`."""
        return (
            self._after(self.a[pair], self.table[i], self.sets_b[pair, j]),
            self._after(self.b[pair], self.table[j], self.sets_a[pair, i]),
        )

    def _after(
        self,
        server: PairServers,
        gone: Int64[np.ndarray, "rows order"],
        arriving: Int64[np.ndarray, "rows order"],
    ) -> Int64[np.ndarray, "rows wider"]:
        """Contents after an exchange, wider than a server's slots by the arrivals."""
        # The slot after the last stands for none.
        held = self.layout.slots[server]
        rows = np.concatenate([held, np.full((len(held), 1), -1)], axis=1)
        gone = np.where(gone == self.layout.window(self.table.shape[1]), held.shape[1], gone)
        rows[np.arange(len(held))[:, None], gone] = -1
        return np.concatenate([rows[:, :-1], arriving], axis=1)
