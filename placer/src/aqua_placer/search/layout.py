"""Groups by server as a table that exchanges change, and which exchanges a round looks at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_placer.problem.instance import Instance, Placement

WINDOW: Final = 16
PAIR_WINDOW: Final = 8
"""Slots per server that one round exchanges between, for exchanges of single groups and of more;
the groups of wider servers take turns at random. The exchanges of a pair of servers grow with the
fourth power of the slots that pairs of groups are taken from: twice as many take 16 times as
long."""


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

    def mem_gb(self) -> Float64[np.ndarray, " servers"]:
        """Signed memory per server."""
        total: Float64[np.ndarray, " servers"] = self.mem[self.slots, self.class_of[:, None]].sum(
            axis=1
        )
        return total

    def counts(self) -> Int64[np.ndarray, " servers"]:
        """Producer minus consumer shards per server."""
        total: Int64[np.ndarray, " servers"] = self.cnt[self.slots, self.class_of[:, None]].sum(
            axis=1
        )
        return total

    def free(self) -> Int64[np.ndarray, " servers"]:
        """Unused GPUs per server."""
        used: Int64[np.ndarray, " servers"] = self.size[self.slots].sum(axis=1)
        unused: Int64[np.ndarray, " servers"] = self.instance.servers.capacity - used
        return unused


def subsets(width: int, order: int) -> Int64[np.ndarray, "sets order"]:
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
