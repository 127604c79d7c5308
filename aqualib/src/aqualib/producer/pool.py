"""The slab pool: which physical slab is free, which is lent, to which lease and generation.

Owns the record of one producer's physical memory and nothing else: no locks, no threads, no clock,
no sockets. Its user serialises the calls (see `aqualib.producer.producer`) and closes the
memory of the slabs that leave.

What it promises, and `audit()` checks:

- Every move is one of `aqua_protocol.slab.SLAB`; a slab is lent to at most one lease at a time.
- free + leased + reclaiming + quarantined == offered: a slab that exists is in exactly one place.
- Slab ids are never used twice, generations only go up, and an answer for an older generation
  changes nothing. A slab that was quarantined never becomes free again; it leaves.
- No memory passes from one tenant to another: that of a free slab which another tenant had is
  retired with its slab, and a new slab takes its place, to be made anew before it is handed out
  (`LentSlab.is_foreign`). `Released` is the holder's word; a holder that keeps a mapping or a
  descriptor has the retired memory, alone. It happens when the slab is lent, not when it comes
  back: the usual borrower is the one that had it before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from aqua_protocol.ids import ConsumerId, Generation, LeaseId, SlabId
from aqua_protocol.slab import HELD_STATES, SLAB, SlabEvent, SlabState

if TYPE_CHECKING:
    from aqualib.peers import ProcessIdentity
    from aqualib.transports.base import OwnedSlab


class SlabTenant(NamedTuple):
    """A consumer as the memory of slabs knows it: by more than its name, which others may use.

    Attributes:
        process: User and life of its process; where the kernel tells neither, its lease alone.
    """

    process: ProcessIdentity | LeaseId
    consumer_id: ConsumerId


@dataclass(slots=True)
class Slab:
    """One physical slab; mutable, and only the pool mutates it, but for what a handout makes anew.

    Attributes:
        slab_id: Its number within this producer process.
        memory: What the transport made.
        generation: How often it was lent; 0 for a fresh slab.
        lease_id: Lease that holds it, while it is held.
        tenant: Who could write to its memory; None means that it reads as zeros.
    """

    slab_id: SlabId
    memory: OwnedSlab
    generation: Generation
    state: SlabState = SLAB.initial
    lease_id: LeaseId | None = None
    tenant: SlabTenant | None = None


@dataclass(frozen=True, slots=True)
class LentSlab:
    """A slab as lent now.

    Attributes:
        tenant: Who could write to its memory when it was lent; None if it read as zeros.
        is_foreign: That is another tenant: its memory is made anew before it is handed out.
    """

    slab: Slab
    generation: Generation
    tenant: SlabTenant | None
    is_foreign: bool


class SlabPool:
    """The slabs of one producer, all of `slab_bytes`."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes: Final = slab_bytes
        self._slabs: dict[int, Slab] = {}
        # Keyed by slab id in the order in which they became free; the value is the slab.
        self._free: dict[int, Slab] = {}
        # Lease -> its held slabs, in the order in which they were handed out.
        self._held: dict[LeaseId, dict[int, Slab]] = {}
        self._counts: Counter[SlabState] = Counter()
        self._next_id = 0

    def __repr__(self) -> str:
        counts = ", ".join(f"{state}={self._counts[state]}" for state in SlabState)
        return f"SlabPool(slab_bytes={self.slab_bytes}, {counts})"

    # --- Counts, in slabs -----------------------------------------------------------------

    def count(self, state: SlabState) -> int:
        """Slabs in `state`; a retired slab is no longer here, so that count is always 0."""
        return self._counts[state]

    @property
    def offered_count(self) -> int:
        """Slabs that exist under the offer."""
        return len(self._slabs)

    def held_by(self, lease_id: LeaseId) -> list[Slab]:
        """Slabs that the lease's consumer may have mapped, in hand-out order."""
        return list(self._held.get(lease_id, {}).values())

    def leases(self) -> list[LeaseId]:
        """Leases that hold slabs, oldest first."""
        return list(self._held)

    # --- Moves ----------------------------------------------------------------------------

    def add(self, memory: OwnedSlab) -> Slab:
        """Take a fresh, zeroed physical slab into the offer."""
        assert memory.nbytes == self.slab_bytes, (memory.nbytes, self.slab_bytes)
        slab = Slab(SlabId(self._next_id), memory, Generation(0))
        self._next_id += 1
        self._slabs[slab.slab_id] = slab
        self._free[slab.slab_id] = slab
        self._counts[slab.state] += 1
        return slab

    def lend(self, lease_id: LeaseId, tenant: SlabTenant, count: int) -> list[LentSlab]:
        """Lend up to `count` free slabs; fewer, or none, when fewer are free.

        Those the tenant had before go first, then fresh ones; others are retired and made anew.
        """
        assert lease_id not in self._held, f"{lease_id} already holds slabs"
        order = {tenant: 0, None: 1}
        ranked = sorted(self._free.values(), key=lambda slab: order.get(slab.tenant, 2))
        loans = [self._lend_one(slab, lease_id, tenant) for slab in ranked[:count]]
        if loans:
            self._held[lease_id] = {loan.slab.slab_id: loan.slab for loan in loans}
        return loans

    def ask(self, slab: Slab) -> None:
        """Note that the slab has been asked back."""
        self._move(slab, SlabEvent.RECLAIM)

    def find(self, lease_id: LeaseId, slab_id: int, generation: int) -> Slab | None:
        """The slab that `lease_id` holds at this very generation, or None: a stale answer."""
        slab = self._held.get(lease_id, {}).get(slab_id)
        return slab if slab is not None and slab.generation == generation else None

    def take_back(self, slab: Slab) -> bool:
        """Apply the holder's answer; True when the slab is free again.

        False means that it had been quarantined and is retired: the caller closes its memory.
        """
        return self._move(slab, SlabEvent.RETURN) is SlabState.FREE

    def hand_back(self, loan: LentSlab) -> bool:
        """Undo a loan whose handle never left this process; True when the slab is free again.

        False means that it is retired: it was quarantined, or could not be made anew.
        """
        # Whether it was made anew is not known any more, so the next borrower's check decides.
        loan.slab.tenant = loan.tenant
        is_free = self.take_back(loan.slab)
        if is_free and loan.slab.memory.is_closed:
            self._move(loan.slab, SlabEvent.WITHDRAW)
            return False
        return is_free

    def quarantine(self, slab: Slab, event: SlabEvent) -> None:
        """Lock a held slab away after `DEADLINE` or `HOLDER_SILENT`; harmless when repeated."""
        assert event in {SlabEvent.DEADLINE, SlabEvent.HOLDER_SILENT}, event
        self._move(slab, event)

    def bury(self, lease_id: LeaseId) -> list[Slab]:
        """Retire everything a dead holder had; the caller closes their memory."""
        retired = self.held_by(lease_id)
        for slab in retired:
            self._move(slab, SlabEvent.HOLDER_DEAD)
        return retired

    def withdraw(self, count: int) -> list[Slab]:
        """Take up to `count` free slabs out of the offer; the caller closes their memory."""
        # Those that would have to be made anew for the next borrower are the first to go.
        ranked = sorted(self._free.values(), key=lambda slab: slab.tenant is None)
        taken = ranked[:count]
        for slab in taken:
            self._move(slab, SlabEvent.WITHDRAW)
        return taken

    def drain(self) -> list[Slab]:
        """Everything that exists, held or not, at the end of the producer; the pool is empty."""
        remaining = list(self._slabs.values())
        self._slabs.clear()
        self._free.clear()
        self._held.clear()
        self._counts.clear()
        return remaining

    def audit(self) -> None:
        """Recount everything and compare; for tests and after an unclean end."""
        recount = Counter(slab.state for slab in self._slabs.values())
        assert recount == +self._counts, (recount, self._counts)
        free = {i for i, slab in self._slabs.items() if slab.state is SlabState.FREE}
        assert free == set(self._free), (free, set(self._free))
        held = {i: lease for lease, slabs in self._held.items() for i in slabs}
        assert sum(map(len, self._held.values())) == len(held), "a slab is lent twice"
        for slab_id, slab in self._slabs.items():
            assert (slab.state in HELD_STATES) == (slab_id in held), slab
            assert slab.lease_id == held.get(slab_id), slab
            assert slab_id == slab.slab_id < self._next_id, slab

    def _lend_one(self, slab: Slab, lease_id: LeaseId, tenant: SlabTenant) -> LentSlab:
        before = slab.tenant
        is_foreign = before not in {None, tenant}
        if is_foreign:
            self._move(slab, SlabEvent.WITHDRAW)
            slab = self.add(slab.memory)
        self._move(slab, SlabEvent.LEASE)
        slab.generation = Generation(slab.generation + 1)
        slab.lease_id = lease_id
        slab.tenant = tenant
        return LentSlab(slab, slab.generation, before, is_foreign)

    def _move(self, slab: Slab, event: SlabEvent) -> SlabState:
        before, after = slab.state, SLAB.next(slab.state, event)
        assert self._slabs.get(slab.slab_id) is slab, slab
        slab.state = after
        self._counts[before] -= 1
        if before is SlabState.FREE:
            del self._free[slab.slab_id]
        if before in HELD_STATES and after not in HELD_STATES:
            self._drop_from_lease(slab)
        if after is SlabState.FREE:
            self._free[slab.slab_id] = slab
        if after in SLAB.terminal:
            del self._slabs[slab.slab_id]
        else:
            self._counts[after] += 1
        assert self._counts.total() == len(self._slabs), (self._counts, len(self._slabs))
        return after

    def _drop_from_lease(self, slab: Slab) -> None:
        assert slab.lease_id is not None, slab
        held = self._held[slab.lease_id]
        del held[slab.slab_id]
        if not held:
            del self._held[slab.lease_id]
        slab.lease_id = None
