"""The lending state: everything a producer decides, as one state machine without I/O.

Events come in (a consumer attached, released, fell silent, died; the engine wants memory; time
passed) and `Effects` come out (slabs to ask for, memory to close, processes to kill). The state has
no threads, sockets or clocks of its own, so every history can be replayed in a test; its caller
serialises the calls under one lock and carries the effects out.

What it adds to the pool: leases and their holders, reclaims and their deadlines, and the rule for
every slab that comes back. A slab that is free again serves the oldest open reclaim, or stays
offered. A slab that had to be retired serves the oldest open reclaim as well, since its memory
does come back; otherwise the offer still covers it and a new physical slab is owed in its place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from aqua_protocol import CapacityError, ConfigError
from aqua_protocol.ids import ConsumerId, Epoch, LeaseId, ReclaimId
from aqua_protocol.members import MAX_LEASES_PER_MEMBER, MAX_RECLAIMS_PER_REPORT, HeldLease
from aqua_protocol.slab import SlabEvent, SlabState
from aqualib.producer.escalation import Escalation, PendingReturn
from aqualib.producer.pool import SlabPool, SlabTenant
from aqualib.producer.reclaims import ReclaimTicket, ReclaimTotals, choose

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqua_protocol.capability import Claims
    from aqua_protocol.ids import Generation, SlabId
    from aqua_protocol.members import ProducerReport, ReclaimOrder, ReclaimReport
    from aqualib.peers import ProcessIdentity
    from aqualib.producer.pool import LentSlab, Slab
    from aqualib.transports.base import OwnedSlab


# Seconds; the bounds are fixed by `aqua_protocol.channel.Deadline`.
MIN_DEADLINE_S: Final = 1e-3
MAX_DEADLINE_S: Final = 600.0

MAX_REMEMBERED_ORDERS: Final = 256
"""Orders that are carried out only once. One is repeated until a report names it, so a few would
do. Doubled, a few kilobytes more."""


def require_deadline(deadline_s: float) -> float:
    """The deadline, if a consumer may be given it.

    Raises:
        ConfigError: It is out of bounds.
    """
    if not MIN_DEADLINE_S <= deadline_s <= MAX_DEADLINE_S:
        raise ConfigError(
            f"a deadline of {deadline_s:g} s is out of bounds",
            remedy=f"Choose between {MIN_DEADLINE_S:g} and {MAX_DEADLINE_S:g} seconds.",
        )
    return deadline_s


@dataclass(slots=True)
class Holder:
    """A consumer under one lease, from attach until it holds nothing.

    Attributes:
        silent: Its channel closed while it held slabs; its process may still have them mapped.
        ended: Its right has ended, and everything was asked back.
        known: The books have seen it attached.
        proof: Of the grant, for books that have been lost.
    """

    lease_id: LeaseId
    epoch: Epoch
    consumer_id: ConsumerId
    silent: bool = False
    ended: bool = False
    known: bool = False
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class ReclaimNotice:
    """Slabs to ask one holder for: becomes `Reclaim` packets."""

    lease_id: LeaseId
    reclaim_id: ReclaimId
    deadline_s: float
    slabs: list[tuple[SlabId, Generation]]


@dataclass(frozen=True, slots=True)
class RetiredSlab:
    """A slab that has left the pool: close its memory, then tell the reclaim it serves."""

    slab: Slab
    reclaim: ReclaimTicket | None


@dataclass(slots=True)
class Effects:
    """What to do about an event, in any order.

    Attributes:
        notices: Slabs to ask holders for.
        retired: Memory to close; a slab without a reclaim may be owed a replacement.
        kills: Leases whose holder's process is to be ended.
        finished: Leases that hold nothing any more.
    """

    notices: list[ReclaimNotice] = field(default_factory=list)
    retired: list[RetiredSlab] = field(default_factory=list)
    kills: list[LeaseId] = field(default_factory=list)
    finished: list[LeaseId] = field(default_factory=list)


class LendingState:
    """One producer's lending, without I/O; not thread-safe.

    Times are monotonic seconds.

    Args:
        slab_bytes: Size of every slab.
        policy: What to do about holders that overrun a deadline.
        grace_s: Time between a passed deadline and a kill.
    """

    def __init__(self, slab_bytes: int, policy: Escalation, grace_s: float) -> None:
        self.pool: Final = SlabPool(slab_bytes)
        self.owed_count = 0
        self._is_replacing = True
        self.ended_reclaims = ReclaimTotals()
        self._grace_s = grace_s if policy is Escalation.KILL else float("inf")
        self._holders: dict[LeaseId, Holder] = {}
        # Leases that ended before any books saw them attached.
        self._fleeting: dict[LeaseId, Holder] = {}
        self._asks: list[PendingReturn] = []
        # Open reclaims, and finished ones until a report about them was acknowledged.
        self._reclaims: dict[ReclaimId, ReclaimTicket] = {}
        self._orders: deque[ReclaimId] = deque(maxlen=MAX_REMEMBERED_ORDERS)

    # --- The offer ------------------------------------------------------------------------

    @property
    def missing_count(self) -> int:
        """Slabs that open reclaims still have to find."""
        return sum(reclaim.missing_count for reclaim in self._reclaims.values())

    @property
    def lasting_count(self) -> int:
        """Slabs that stay offered after open reclaims, with those that are owed."""
        return self.pool.offered_count - self.missing_count + self.owed_count

    def shortfall(self, nbytes: int) -> int:
        """Slabs to add so that `nbytes`, in whole slabs, stay offered after open reclaims."""
        return max(0, nbytes // self.pool.slab_bytes - self.lasting_count)

    def reclaim(
        self, reclaim_id: ReclaimId, nbytes: int, deadline_s: float, now_s: float
    ) -> tuple[ReclaimTicket, Effects]:
        """Take `nbytes`, rounded up to slabs, out of the offer; less when less is offered."""
        assert reclaim_id not in self._reclaims, reclaim_id
        wanted = -(-nbytes // self.pool.slab_bytes)
        count = min(wanted, self.pool.offered_count - self.missing_count)
        # What exceeds the offer may still be on its way into it: do not make it.
        self.owed_count -= min(self.owed_count, wanted - count)
        reclaim = ReclaimTicket(
            reclaim_id,
            requested_bytes=nbytes,
            slab_count=count,
            slab_bytes=self.pool.slab_bytes,
            deadline_s=deadline_s,
            began_at_s=now_s,
        )
        self._forget_old_reclaims()
        self._reclaims[reclaim_id] = reclaim
        effects = Effects()
        for slab in self.pool.withdraw(count):
            reclaim.assign()
            effects.retired.append(RetiredSlab(slab, reclaim))
        self._ask_for(reclaim, now_s, effects)
        return reclaim, effects

    def slab_closed(self, reclaim: ReclaimTicket, now_s: float) -> None:
        """A slab that was taken out for this reclaim is physically back."""
        if not reclaim.done:  # Else it was told before, and could not be summed up.
            reclaim.slab_closed(now_s)
        if reclaim.total_ms is not None:
            self.ended_reclaims = self.ended_reclaims.plus(reclaim, reclaim.total_ms / 1e3)

    def stop_replacing(self) -> None:
        """Owe nothing from now on: the producer is leaving."""
        self._is_replacing, self.owed_count = False, 0

    def deliver(self, memory: OwnedSlab) -> bool:
        """Take a replacement into the offer; False when it is not owed any more."""
        if not self.owed_count:
            return False
        self.owed_count -= 1
        self.pool.add(memory)
        return True

    def order(self, order: ReclaimOrder, now_s: float) -> Effects:
        """Carry out an operator's order, once, however often it is repeated."""
        reclaim_id = ReclaimId(order.reclaim_id)
        if reclaim_id in self._orders:
            return Effects()
        self._orders.append(reclaim_id)
        deadline_s = min(max(order.deadline_s, MIN_DEADLINE_S), MAX_DEADLINE_S)
        return self.reclaim(reclaim_id, order.bytes, deadline_s, now_s)[1]

    # --- Holders --------------------------------------------------------------------------

    def lend(self, claims: Claims, process: ProcessIdentity | None = None) -> list[LentSlab]:
        """Lend what the claims grant, or what is free if that is less.

        Args:
            process: The consumer's; one that is unknown shares its slabs' memory with no other.

        Raises:
            CapacityError: Nothing is free, or too many leases are held.
        """
        lease_id, consumer_id = LeaseId(claims.lease_id), ConsumerId(claims.consumer_id)
        if len(self._holders) >= MAX_LEASES_PER_MEMBER:
            raise CapacityError(f"{MAX_LEASES_PER_MEMBER} leases hold slabs here already")
        tenant = SlabTenant(process or lease_id, consumer_id)
        loans = self.pool.lend(lease_id, tenant, claims.bytes // self.pool.slab_bytes)
        if not loans:
            raise CapacityError(
                "the producer took its memory back before the lease was attached", lease_id=lease_id
            )
        holder = Holder(lease_id, Epoch(claims.epoch), consumer_id, proof=claims.proof)
        self._holders[lease_id] = holder
        return loans

    def released(self, lease_id: LeaseId, slab_id: int, generation: int) -> Effects:
        """The holder has unmapped a slab. An answer for an older generation changes nothing."""
        effects = Effects()
        if (slab := self.pool.find(lease_id, slab_id, generation)) is not None:
            self._settle(slab)
            self._came_back(slab, effects, free=self.pool.take_back(slab))
            self._finish_if_empty(lease_id, effects)
        return effects

    def hand_back(self, lease_id: LeaseId, loans: Iterable[LentSlab]) -> Effects:
        """These loans never reached the holder, so there is nothing to unmap."""
        effects = Effects()
        for loan in loans:
            self._settle(loan.slab)
            self._came_back(loan.slab, effects, free=self.pool.hand_back(loan))
        self._finish_if_empty(lease_id, effects)
        return effects

    def silent(self, lease_id: LeaseId) -> Effects:
        """The channel closed. Slabs still held are quarantined until the process is dead."""
        effects = Effects()
        if (holder := self._holders.get(lease_id)) is not None:
            holder.silent = True
            for slab in self.pool.held_by(lease_id):
                self.pool.quarantine(slab, SlabEvent.HOLDER_SILENT)
        return effects

    def dead(self, lease_id: LeaseId) -> Effects:
        """The kernel says that the holder's process is gone; its mappings are, too."""
        effects = Effects()
        for slab in self.pool.bury(lease_id):
            self._settle(slab)
            self._part(slab, effects)
        self._finish_if_empty(lease_id, effects)
        return effects

    def end(self, lease_id: LeaseId, epoch: int, deadline_s: float, now_s: float) -> Effects:
        """The books hold the lease ended: ask for all of it back, once. It stays offered.

        `epoch` is that of its fence, which ends this and every earlier epoch of the lease.
        """
        effects = Effects()
        holder = self._holders.get(lease_id)
        if holder is None or holder.epoch > epoch or holder.ended:
            return effects
        holder.ended = True
        slabs = [s for s in self.pool.held_by(lease_id) if s.state is SlabState.LEASED]
        self._ask(slabs, ReclaimId(f"end-{epoch}"), deadline_s, now_s, None, effects)
        return effects

    # --- Time -----------------------------------------------------------------------------

    def tick(self, now_s: float) -> Effects:
        """Escalate the asks whose deadline has passed."""
        effects = Effects()
        for ask in self._asks:
            if now_s < ask.due_at_s:
                continue
            if ask.overdue:
                effects.kills.append(ask.lease_id)
                ask.due_at_s = float("inf")
                continue
            ask.overdue = True
            ask.due_at_s = now_s + self._grace_s
            if ask.reclaim is not None and not ask.reclaim.done:
                ask.reclaim.escalated = True
            for slab in self.pool.held_by(ask.lease_id):
                if slab.slab_id in ask.pending:
                    self.pool.quarantine(slab, SlabEvent.DEADLINE)
        return effects

    def due_at_s(self) -> float:
        """When `tick` has to be called next; infinity when nothing is pending."""
        return min((ask.due_at_s for ask in self._asks), default=float("inf"))

    # --- Reports --------------------------------------------------------------------------

    def held_leases(self) -> list[HeldLease]:
        """Every lease with slabs that may be mapped, as the coordinator wants it.

        Books see the end of a lease only if they saw it attached; one that came and went between
        two reports would stay granted until its time to attach runs out. So it is reported once,
        as if its last slab were still on the way back.
        """
        held = [self._held_lease(holder) for holder in self._holders.values()]
        room = self.pool.offered_count * self.pool.slab_bytes - sum(h.held_bytes for h in held)
        count = min(room // self.pool.slab_bytes, MAX_LEASES_PER_MEMBER - len(held))
        fleeting = islice(self._fleeting.values(), max(0, count))
        nbytes = self.pool.slab_bytes
        return held + [_as_held(holder, nbytes, nbytes) for holder in fleeting]

    def reclaim_reports(self, now_s: float) -> list[ReclaimReport]:
        """The oldest reclaims that the coordinator has not seen finished."""
        oldest = list(self._reclaims.values())[:MAX_RECLAIMS_PER_REPORT]
        return [reclaim.report(now_s) for reclaim in oldest]

    def acknowledged(self, report: ProducerReport) -> None:
        """The books know this report: what it told as finished need not be told again."""
        for told in report.reclaims:
            if told.total_ms is not None:
                self._reclaims.pop(ReclaimId(told.reclaim_id), None)
        for lease in report.leases:
            self._fleeting.pop(LeaseId(lease.lease_id), None)
            if (holder := self._holders.get(LeaseId(lease.lease_id))) is not None:
                holder.known = True

    # --- Inside ---------------------------------------------------------------------------

    def _held_lease(self, holder: Holder) -> HeldLease:
        slabs = self.pool.held_by(holder.lease_id)
        asked = {number for ask in self._asks for number in ask.pending}
        reclaiming_bytes = sum(s.slab_id in asked for s in slabs) * self.pool.slab_bytes
        held_bytes = len(slabs) * self.pool.slab_bytes
        return _as_held(holder, held_bytes, reclaiming_bytes, consumer_lost=holder.silent)

    def _ask_for(self, reclaim: ReclaimTicket, now_s: float, effects: Effects) -> None:
        """Ask holders for what a reclaim still misses."""
        count = reclaim.missing_count
        leases = [self.pool.held_by(lease_id) for lease_id in self.pool.leases()]
        chosen = choose(
            [[s for s in slabs if s.state is SlabState.LEASED] for slabs in leases], count
        )
        # The rest has been asked back for another reason, or is quarantined. Nothing is sent for
        # it, but this reclaim's deadline counts for it, and so does the policy.
        covered = {n for ask in self._asks if ask.reclaim is not None for n in ask.pending}
        covered |= {slab.slab_id for slab in chosen}
        chosen += choose(
            [[s for s in slabs if s.slab_id not in covered] for slabs in leases],
            count - len(chosen),
        )
        by_lease: dict[LeaseId, list[Slab]] = {}
        for slab in chosen:
            assert slab.lease_id is not None, slab
            by_lease.setdefault(slab.lease_id, []).append(slab)
        for slabs in by_lease.values():
            self._ask(slabs, reclaim.reclaim_id, reclaim.deadline_s, now_s, reclaim, effects)

    def _ask(
        self,
        slabs: list[Slab],
        reclaim_id: ReclaimId,
        deadline_s: float,
        now_s: float,
        reclaim: ReclaimTicket | None,
        effects: Effects,
    ) -> None:
        """Ask one lease for `slabs`; those not leased are only waited for."""
        if not slabs:
            return
        lease_id = slabs[0].lease_id
        assert lease_id is not None, slabs[0]
        pending: set[int] = {slab.slab_id for slab in slabs}
        self._asks.append(PendingReturn(lease_id, now_s + deadline_s, pending, reclaim))
        fresh = [slab for slab in slabs if slab.state is SlabState.LEASED]
        for slab in fresh:
            self.pool.ask(slab)
        if fresh:
            refs = [(slab.slab_id, slab.generation) for slab in fresh]
            effects.notices.append(ReclaimNotice(lease_id, reclaim_id, deadline_s, refs))

    def _oldest_open(self) -> ReclaimTicket | None:
        return next((r for r in self._reclaims.values() if r.missing_count), None)

    def _settle(self, slab: Slab) -> None:
        """The slab is back: no ask waits for it any more."""
        for ask in self._asks:
            ask.pending.discard(slab.slab_id)
        self._asks = [ask for ask in self._asks if ask.pending]

    def _came_back(self, slab: Slab, effects: Effects, *, free: bool) -> None:
        if not free:
            self._part(slab, effects)
        elif (reclaim := self._oldest_open()) is not None:
            reclaim.assign()
            effects.retired += [RetiredSlab(taken, reclaim) for taken in self.pool.withdraw(1)]

    def _part(self, slab: Slab, effects: Effects) -> None:
        """A slab was retired: it serves the oldest reclaim, or is to be replaced."""
        if (reclaim := self._oldest_open()) is not None:
            reclaim.assign()
        elif self._is_replacing:
            self.owed_count += 1
        effects.retired.append(RetiredSlab(slab, reclaim))

    def _finish_if_empty(self, lease_id: LeaseId, effects: Effects) -> None:
        if lease_id not in self._holders or self.pool.held_by(lease_id):
            return
        holder = self._holders.pop(lease_id)
        effects.finished.append(lease_id)
        if not holder.known:
            self._fleeting[lease_id] = holder
            if len(self._fleeting) > MAX_LEASES_PER_MEMBER:
                # The coordinator has been away for long; its books let these expire.
                del self._fleeting[next(iter(self._fleeting))]

    def _forget_old_reclaims(self) -> None:
        """Keep a bounded number of finished reclaims while no coordinator asks for them."""
        finished = [r.reclaim_id for r in self._reclaims.values() if r.done]
        for reclaim_id in finished[: max(0, len(finished) - MAX_RECLAIMS_PER_REPORT + 1)]:
            del self._reclaims[reclaim_id]


def _as_held(
    holder: Holder, held_bytes: int, reclaiming_bytes: int = 0, *, consumer_lost: bool = False
) -> HeldLease:
    return HeldLease(
        lease_id=holder.lease_id,
        epoch=holder.epoch,
        consumer_id=holder.consumer_id,
        held_bytes=held_bytes,
        reclaiming_bytes=reclaiming_bytes,
        consumer_lost=consumer_lost,
        proof=holder.proof,
    )
