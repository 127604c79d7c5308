"""Reclaims: the tickets for memory that the producer wants back, and which leases it asks.

A reclaim counts slabs, it does not name them. Free slabs serve it at once; for the rest, holders
are asked, and whatever slab comes back first, asked or not, serves the oldest open reclaim. So a
consumer that gives up memory by itself shortens somebody's wait, and no reclaim is stuck behind
one particular holder while other memory lies free.

Which to ask: the *newest* lease first, and all of it before the next one. A rising load reclaims
again and again; taking from the same end each time touches the fewest leases, and the consumers
that have built up the most in peer memory are the last to be disturbed.

Memory counts as returned when the physical slab has been closed, not when a consumer says so: that
is the moment at which the engine can allocate it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aqua_protocol.members import ReclaimReport
from aqua_protocol.wire import MAX_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqua_protocol.ids import ReclaimId
    from aqualib.producer.pool import Slab


@dataclass(eq=False, repr=False)
class ReclaimTicket:
    """A ticket for memory; completes in the background.

    Progress is written by the producer's threads and may be read by anyone at any time.

    Attributes:
        reclaim_id: Name, for reports and packets.
        requested_bytes: What was asked for.
        slab_count: What it comes to: whole slabs, and no more than are offered.
        slab_bytes: Size of a slab.
        deadline_s: Time that holders get.
        began_at_s: Monotonic time of the request.
        returned_count: Slabs whose physical memory is back so far.
        escalated: A holder has overrun the deadline.
    """

    reclaim_id: ReclaimId
    requested_bytes: int
    slab_count: int
    slab_bytes: int
    deadline_s: float
    began_at_s: float
    returned_count: int = 0
    escalated: bool = False
    first_slab_ms: float | None = None
    total_ms: float | None = None
    _assigned: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.slab_count == 0:
            self._finish(self.began_at_s)

    def __repr__(self) -> str:
        return (
            f"ReclaimTicket({self.reclaim_id}, {self.returned_bytes}/{self.requested_bytes} bytes, "
            f"done={self.done}, escalated={self.escalated})"
        )

    @property
    def returned_bytes(self) -> int:
        """Physical memory that is back so far, in whole slabs."""
        return self.returned_count * self.slab_bytes

    @property
    def missing_count(self) -> int:
        """Slabs that still have to be found for it."""
        return self.slab_count - self._assigned

    @property
    def done(self) -> bool:
        """Whether everything is back."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is back; False when `timeout_s` passed first.

        A consumer that hangs makes this wait for ever under the `wait` policy, so give a timeout
        unless something else ends the wait.
        """
        return self._done.wait(timeout_s)

    def assign(self) -> None:
        """Count one slab as found: it has left the offer and is about to be closed."""
        self._assigned += 1
        assert self._assigned <= self.slab_count, self

    def slab_closed(self, now_s: float) -> None:
        """Count one slab as physically back."""
        self.returned_count += 1
        assert self.returned_count <= self._assigned, self
        if self.first_slab_ms is None:
            self.first_slab_ms = (now_s - self.began_at_s) * 1e3
        if self.returned_count == self.slab_count:
            self._finish(now_s)

    def report(self, now_s: float) -> ReclaimReport:
        """The wire form, for the coordinator; no time in it exceeds `MAX_SECONDS`.

        A caller that waited for the lock after it had read the clock may be earlier than the
        reclaim, whose age is 0 then.
        """
        return ReclaimReport(
            reclaim_id=self.reclaim_id,
            requested_bytes=self.requested_bytes,
            returned_bytes=self.returned_bytes,
            deadline_s=self.deadline_s,
            age_s=min(max(now_s - self.began_at_s, 0.0), MAX_SECONDS),
            first_slab_ms=_bounded(self.first_slab_ms),
            total_ms=_bounded(self.total_ms),
            escalated=self.escalated,
        )

    def _finish(self, now_s: float) -> None:
        self.total_ms = (now_s - self.began_at_s) * 1e3
        self._done.set()


@dataclass(frozen=True, slots=True)
class ReclaimTotals:
    """Reclaims that have ended, but those that found nothing offered.

    Attributes:
        count: How many.
        returned_bytes: What they brought back.
        seconds: How long they took, one added to the other.
    """

    count: int = 0
    returned_bytes: int = 0
    seconds: float = 0.0

    def plus(self, reclaim: ReclaimTicket, seconds: float) -> ReclaimTotals:
        """These and one more, which took so long."""
        assert reclaim.done, reclaim
        return ReclaimTotals(
            self.count + 1, self.returned_bytes + reclaim.returned_bytes, self.seconds + seconds
        )


def _bounded(took_ms: float | None) -> float | None:
    return None if took_ms is None else min(took_ms, 1e3 * MAX_SECONDS)


def choose(leases: Sequence[Sequence[Slab]], count: int) -> list[Slab]:
    """Up to `count` slabs to ask back.

    Args:
        leases: Slabs that can be asked for, by lease, oldest lease first, each in the order in
            which they were handed out.
        count: How many are wanted.

    Returns:
        Newest lease first, and within a lease the slab handed out last first.
    """
    newest_first = (slab for slabs in reversed(leases) for slab in reversed(slabs))
    return [slab for slab, _ in zip(newest_first, range(count), strict=False)]
