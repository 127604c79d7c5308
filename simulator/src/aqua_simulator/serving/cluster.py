"""Several engines on one clock, a router before them, and memory lent between them.

The cluster owns the order of events: arrivals, reclaims and engine steps happen in virtual time,
ties in the order of engine names, so that a run is the same run every time. The router decides
once, on arrival: to the engine with the fewest requests, or by turns.

Lending follows `lending.LeaseLedger`: an engine that lends shrinks its own KV memory by what it
lends; an engine that borrows has a page store of that size behind its NVLink, and preempted
requests page out into it instead of being computed again. A reclaim takes the store's room at once
(no new page outs), moves what is stored to host memory over the borrower's link, and only then
gives the lender its blocks back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from aqua_protocol.errors import ConfigError
from aqua_protocol.lease import LeaseEvent, LeaseState
from aqua_simulator.serving.engine import Engine
from aqua_simulator.serving.lending import Lease, LeaseLedger
from aqua_simulator.serving.paging import PageStore
from aqua_simulator.serving.request import Arrival, Served


class Routing(StrEnum):
    """How the router picks an engine."""

    LEAST_REQUESTS = "least-requests"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class PlannedReclaim:
    """A lender wants everything back at `at_s`."""

    at_s: float
    lender: str


@dataclass(slots=True)
class _Return:
    """Slabs that arrive back at a lender."""

    at_s: float
    lease: Lease


@dataclass
class Cluster:
    """Engines, router and books.

    Attributes:
        host_bytes_per_s: Rate at which a borrower moves stored contexts to host memory.
    """

    engines: Sequence[Engine]
    routing: Routing = Routing.LEAST_REQUESTS
    books: LeaseLedger = field(default_factory=LeaseLedger)
    host_bytes_per_s: float = 32e9
    _turn: int = 0
    _lent_blocks: dict[int, int] = field(default_factory=dict)
    _returns: list[_Return] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engines]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a cluster needs engines with names of their own")

    def engine(self, name: str) -> Engine:
        """The engine of that name."""
        return next(engine for engine in self.engines if engine.name == name)

    def lend(self, lender: str, borrower: str, nbytes: int, *, link_bytes_per_s: float) -> Lease:
        """Take memory from one engine's KV cache and put a page store of another into it.

        Raises:
            ConfigError: The lender uses what it should lend.
            CapacityError: Less than a slab.
        """
        giver, taker = self.engine(lender), self.engine(borrower)
        self.books.offer(lender, nbytes + self.books.leased_bytes(lender))
        lease = self.books.grant(borrower, nbytes, giver.now_s)
        per_block = giver.settings.kv_bytes_per_token * giver.memory.block_tokens
        blocks = -(-lease.granted_bytes // per_block)
        if not giver.memory.resize(giver.memory.block_count - blocks):
            raise ConfigError(f"{lender} uses the memory that it should lend")
        self._lent_blocks[lease.lease_id] = blocks
        capacity = lease.granted_bytes // taker.settings.kv_bytes_per_token
        taker.store = PageStore(f"{lender} for {borrower}", capacity, link_bytes_per_s)
        return lease

    def run(
        self, arrivals: Iterable[Arrival], reclaims: Iterable[PlannedReclaim] = ()
    ) -> list[Served]:
        """Serve everything; requests in the order of their last token."""
        queue = sorted(arrivals, key=lambda each: each.arrival_s)[::-1]
        wanted = sorted(reclaims, key=lambda each: each.at_s)[::-1]
        while True:
            arrival_s = queue[-1].arrival_s if queue else inf
            reclaim_s = wanted[-1].at_s if wanted else inf
            return_s = min((each.at_s for each in self._returns), default=inf)
            engine = min(self.engines, key=lambda each: (each.next_event_s, each.name))
            now_s = min(arrival_s, reclaim_s, return_s, engine.next_event_s)
            if now_s == inf:
                break
            if return_s == now_s:
                self._finish_returns(now_s)
            elif reclaim_s == now_s:
                self._reclaim(wanted.pop())
            elif arrival_s == now_s:
                self._route(queue.pop())
            else:
                engine.advance()
        served = [each for engine in self.engines for each in engine.finished]
        return sorted(served, key=lambda each: (each.last_token_s, each.request_id))

    def _route(self, arrival: Arrival) -> None:
        if self.routing is Routing.ROUND_ROBIN:
            engine = self.engines[self._turn % len(self.engines)]
            self._turn += 1
        else:
            engine = min(
                self.engines, key=lambda each: (each.queue_length + each.running_count, each.name)
            )
        engine.submit(arrival)

    def _reclaim(self, reclaim: PlannedReclaim) -> None:
        for lease in list(self.books.leases.values()):
            if lease.lender != reclaim.lender or lease.state is not LeaseState.ACTIVE:
                continue
            self.books.follow(lease, LeaseEvent.RECLAIM, reclaim.at_s)
            taker = self.engine(lease.borrower)
            stored = 0
            if taker.store is not None:
                # What is stored moves to host memory and stays usable there, behind its link.
                stored = taker.store.used_tokens * taker.settings.kv_bytes_per_token
                taker.store.capacity_tokens = taker.store.used_tokens
                taker.store.link_bytes_per_s = self.host_bytes_per_s
            self._returns.append(_Return(reclaim.at_s + stored / self.host_bytes_per_s, lease))

    def _finish_returns(self, now_s: float) -> None:
        for each in [each for each in self._returns if each.at_s <= now_s]:
            self._returns.remove(each)
            self.books.follow(each.lease, LeaseEvent.RETURN_ALL, now_s)
            giver = self.engine(each.lease.lender)
            blocks = self._lent_blocks.pop(each.lease.lease_id)
            giver.memory.resize(giver.memory.block_count + blocks)
