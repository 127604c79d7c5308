"""The producers of an engine's ranks as one, for an informer that knows one.

Each rank is a member of the books by itself: its slabs are on its device, and consumers lease from
each. What they share is the decision: all offer as much, and all take back as much. So amounts are
those of one rank, and where ranks differ for a moment the informer sees the one that is furthest
from done: memory is back when it is back on every rank.

A rank can offer less than the others for a reason of its own: its device refused, or an operator
has taken memory back there. The engine has no use for a block of which a rank lacks its piece, nor
for a piece beyond what the others give; so at the next look the others go down to the same level.

Nor does a rank have steps of its own to find out what copies cost: each waits for the others in
every layer or for what the stage before hands on, so copies at one lengthen the steps of all. One
limit, from the engine's steps, holds the consumers of all ranks back and lets them go on together.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aqua_protocol import AquaError, TransportError, UnavailableError
from aqua_protocol.ids import ReclaimId
from aqualib.engines.vllm.lending.rank_memory import require_all
from aqualib.engines.vllm.lending.rank_messages import OrderKind, RankFigures
from aqualib.producer.copy_limit import HARM_SHARE, CopyLimit
from aqualib.producer.reclaims import ReclaimTicket, ReclaimTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqua_protocol.members import LoadReport
    from aqua_protocol.profile import ModelProfile
    from aqualib.engines.vllm.lending.remote_rank import RemoteRank
    from aqualib.producer.copy_limit import CopyRate
    from aqualib.producer.offer_rule import Pressure
    from aqualib.producer.profile_follower import ProfileFollower
    from aqualib.reporter import Identity


class RankProducers:
    """The producers of all ranks, and what they borrow with; orders are the informer's thread's.

    Satisfies `MemoryLender` and `Borrower`.

    Args:
        ranks: By number.
        producer_id: Of the engine; the ranks' names begin with it.
        identity: Of the engine.
        profile_follower: Reads what the books say of the model, if anything does.
        harm_share: Of the engine's time, how much consumers' copies in the background may cost.

    Attributes:
        on_returned: Called when lent memory of any rank is back.
    """

    def __init__(
        self,
        ranks: Sequence[RemoteRank],
        *,
        producer_id: str,
        identity: Identity,
        profile_follower: ProfileFollower | None = None,
        harm_share: float = HARM_SHARE,
    ) -> None:
        self._ranks = ranks
        self.producer_id: Final = producer_id
        self.identity: Final = identity
        self.slab_bytes: Final = ranks[0].layout.slab_bytes
        self.profile_follower: Final = profile_follower
        self.pressures: Final[Counter[Pressure]] = Counter()
        self.on_returned: Callable[[], None] | None = None
        self.ended_reclaims = ReclaimTotals()
        self._load: LoadReport | None = None
        self._may_borrow = True
        self._copy_limit = CopyLimit(harm_share)
        self._untold: CopyRate | None = None
        self._lock = threading.Lock()
        self._open: list[tuple[ReclaimTicket, dict[RemoteRank, int]]] = []
        for rank in ranks:
            rank.on_returned = self._returned

    def __repr__(self) -> str:
        return f"RankProducers({self.producer_id}, {self._ranks})"

    # --- What the informer does -----------------------------------------------------------

    @property
    def load(self) -> LoadReport | None:
        """The engine's load; to set it asks every rank how it stands."""
        return self._load

    @load.setter
    def load(self, load: LoadReport | None) -> None:
        self._load = load
        self._tell_all({rank: {"load": load} for rank in self._ranks}, OrderKind.LOOK)
        self._settle()
        lowest = min(figures.lasting_bytes for figures in self._figures())
        if any(figures.lasting_bytes > lowest for figures in self._figures()):
            self._reclaim_to(lowest)

    def offer(self, nbytes: int) -> int:
        """Have each rank offer `nbytes`, as far as its memory has been given up.

        Raises:
            TransportError: A rank could not.
        """
        surrendered = nbytes - self.offered_bytes + self.committed_bytes
        self._tell_all({rank: {"nbytes": surrendered} for rank in self._ranks}, OrderKind.OFFER)
        return self.offered_bytes

    def reclaim(self, nbytes: int, deadline_s: float | None = None) -> ReclaimTicket:
        """Have each rank take `nbytes` back; complete when it is back on every rank.

        Raises:
            TransportError: A rank has not been told.
        """
        del deadline_s  # That of the settings, in each rank's process.
        highest = max(figures.lasting_bytes for figures in self._figures())
        return self._reclaim_to(max(0, highest - nbytes))

    @property
    def may_borrow(self) -> bool:
        """See `Aqua.may_borrow`; to set it tells every rank, and raises if one has not heard."""
        return self._may_borrow

    @may_borrow.setter
    def may_borrow(self, may_borrow: bool) -> None:
        if may_borrow != self._may_borrow:
            told = {rank: {"may_borrow": may_borrow} for rank in self._ranks}
            self._tell_all(told, OrderKind.BORROW)
            self._may_borrow = may_borrow

    def close(self) -> None:
        """Have every rank take back what it can, and leave; harmless when repeated."""
        there: dict[RemoteRank, dict[str, Any]] = {
            rank: {} for rank in self._ranks if not rank.is_lost
        }
        with suppress(TransportError):
            self._tell_all(there, OrderKind.CLOSE)
        for rank in self._ranks:
            rank.close()

    # --- The engine's thread --------------------------------------------------------------

    def step_ended(self, seconds: float, kind: str = "") -> None:
        """Hear how long a step of the engine took; see `CopyPacer.step_ended`."""
        if not self.leased_bytes:
            return
        rate = self._copy_limit.stepped(seconds, time.monotonic(), kind)
        if rate is not None:
            self._untold = rate

    def take_pace(self) -> CopyRate | None:
        """What the next step is to tell the ranks of how fast consumers may copy, if anything."""
        rate, self._untold = self._untold, None
        return rate

    # --- What can be seen -----------------------------------------------------------------

    @property
    def measured_profile(self) -> ModelProfile | None:
        """See `Producer.measured_profile`."""
        return None if self.profile_follower is None else self.profile_follower.profile

    @property
    def offered_bytes(self) -> int:
        """What a rank offers, the one that offers most."""
        return max(f.lasting_bytes for f in self._figures()) + self.open_reclaim_bytes

    @property
    def open_reclaim_bytes(self) -> int:
        """What open reclaims have still to find on a rank, at most."""
        return max(figures.returning_bytes for figures in self._figures())

    @property
    def committed_bytes(self) -> int:
        """What slabs have of a rank's device, at most."""
        return max(figures.committed_bytes for figures in self._figures())

    @property
    def is_borrowing(self) -> bool:
        """Whether any rank holds memory of others, or asks for some."""
        return any(figures.is_borrowing for figures in self._figures())

    @property
    def leased_bytes(self) -> int:
        """What consumers hold of a rank, at most."""
        return max(figures.leased_bytes for figures in self._figures())

    @property
    def quarantined_bytes(self) -> int:
        """What is kept past a deadline of a rank, at most."""
        return max(figures.quarantined_bytes for figures in self._figures())

    @property
    def coordinator_error(self) -> AquaError | None:
        """Says so if any rank's reports go unanswered."""
        if all(figures.is_coordinated for figures in self._figures()):
            return None
        return UnavailableError("no coordinator answers the reports of a rank")

    # --- Inside ---------------------------------------------------------------------------

    def _figures(self) -> list[RankFigures]:
        return [rank.figures for rank in self._ranks]

    def _tell_all(
        self, orders: dict[RemoteRank, dict[str, Any]], kind: OrderKind
    ) -> dict[RemoteRank, int]:
        """Tell ranks something and wait for all of them; returns the numbers of the orders."""
        told = {rank: rank.tell(kind, **details) for rank, details in orders.items()}
        numbers: dict[RemoteRank, int] = {}

        def take(rank: RemoteRank) -> None:
            numbers[rank] = told[rank]().number

        require_all(partial(take, rank) for rank in told)
        return numbers

    def _reclaim_to(self, level: int) -> ReclaimTicket:
        """Have ranks take back what they offer above a level."""
        excess = {rank: rank.figures.lasting_bytes - level for rank in self._ranks}
        most = max(0, *excess.values())
        ticket = ReclaimTicket(
            ReclaimId(f"reclaim-{self.producer_id}-{time.monotonic_ns()}"),
            requested_bytes=most,
            slab_count=-(-most // self.slab_bytes),
            slab_bytes=self.slab_bytes,
            deadline_s=0.0,
            began_at_s=time.monotonic(),
        )
        orders = {rank: {"nbytes": nbytes} for rank, nbytes in excess.items() if nbytes > 0}
        numbers = self._tell_all(orders, OrderKind.RECLAIM)
        with self._lock:
            self._open.append((ticket, numbers))
        self._settle()
        return ticket

    def _returned(self) -> None:
        """A rank says that memory is back; on that rank's thread."""
        self._settle()
        if (tell := self.on_returned) is not None:
            tell()

    def _settle(self) -> None:
        """Complete the reclaims that are complete on every rank."""
        now_s = time.monotonic()
        with self._lock:
            still_open = []
            for ticket, numbers in self._open:
                if any(number in rank.figures.open_reclaims for rank, number in numbers.items()):
                    still_open.append((ticket, numbers))
                    continue
                for _ in range(ticket.slab_count - ticket.returned_count):
                    ticket.assign()
                    ticket.slab_closed(now_s)
                self.ended_reclaims = self.ended_reclaims.plus(ticket, now_s - ticket.began_at_s)
            self._open = still_open
