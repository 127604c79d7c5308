"""Peer memory in a simulated cluster: offers, leases and reclaims on the real lease table.

A lender offers part of its HBM; a borrower's page store lives in what it is granted. Every lease
walks `aqua_protocol.lease.LEASE`, event by event, and the books keep the protocol's rule: bytes
leave them only when the lender has its slabs back, so free + leased == offered at any moment.

Times are those of the data plane, not of the coordinator: a grant costs nothing here, a reclaim
takes as long as the borrower needs to move what it stored over its link to host memory, slab by
slab.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aqua_protocol.errors import CapacityError
from aqua_protocol.lease import BOOKED_STATES, LEASE, LeaseEvent, LeaseState
from aqua_protocol.units import DEFAULT_SLAB_BYTES


@dataclass(slots=True)
class Lease:
    """A borrower's right to slabs of one lender."""

    lease_id: int
    lender: str
    borrower: str
    granted_bytes: int
    state: LeaseState = LEASE.initial


@dataclass(slots=True)
class LeaseLedger:
    """Offers and leases of a cluster, in whole slabs.

    Attributes:
        offered_bytes: By lender.
        history: (time, lease id, event, state after) of every transition, in order.
    """

    slab_bytes: int = DEFAULT_SLAB_BYTES
    offered_bytes: dict[str, int] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    history: list[tuple[float, int, LeaseEvent, LeaseState]] = field(default_factory=list)

    def offer(self, lender: str, wanted_bytes: int) -> None:
        """Set a lender's offer, rounded down to slabs; it cannot fall below what is leased.

        Raises:
            CapacityError: More is leased than the new offer.
        """
        whole = wanted_bytes // self.slab_bytes * self.slab_bytes
        if whole < self.leased_bytes(lender):
            raise CapacityError(
                f"{lender} has leased out {self.leased_bytes(lender)} bytes, cannot offer {whole}",
                remedy="Reclaim first.",
            )
        self.offered_bytes[lender] = whole

    def leased_bytes(self, lender: str) -> int:
        """Bytes booked with a lender."""
        return sum(
            lease.granted_bytes
            for lease in self.leases.values()
            if lease.lender == lender and lease.state in BOOKED_STATES
        )

    def free_bytes(self, lender: str) -> int:
        """Offered and not booked."""
        return self.offered_bytes[lender] - self.leased_bytes(lender)

    def grant(self, borrower: str, wanted_bytes: int, now_s: float) -> Lease:
        """Lease from the lender with most to spare, as much as it has up to `wanted_bytes`.

        Raises:
            CapacityError: No lender has a slab to spare.
        """
        by_room = sorted(self.offered_bytes, key=lambda name: (-self.free_bytes(name), name))
        room = self.free_bytes(by_room[0]) if by_room else 0
        granted = min(room, wanted_bytes) // self.slab_bytes * self.slab_bytes
        if granted == 0:
            raise CapacityError("no lender has a slab to spare")
        lease = Lease(len(self.leases), by_room[0], borrower, granted)
        self.leases[lease.lease_id] = lease
        self.follow(lease, LeaseEvent.ATTACH, now_s)
        return lease

    def follow(self, lease: Lease, event: LeaseEvent, now_s: float) -> None:
        """Take a lease along the table; its slabs stay booked until the lender has them back.

        Raises:
            InvalidTransitionError: The table refuses the event.
        """
        lease.state = LEASE.next(lease.state, event)
        self.history.append((now_s, lease.lease_id, event, lease.state))
