"""What an informer needs of what lends and borrows: one of each, or those of an engine's ranks.

Each name means what it means of `Producer`, which is a lender, and of `Aqua`, which borrows.
"""

# ruff: noqa: D102 - see above.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from aqua_protocol import AquaError
    from aqua_protocol.members import LoadReport
    from aqua_protocol.profile import ModelProfile
    from aqualib.producer.offer_rule import Pressure
    from aqualib.producer.profile_follower import ProfileFollower
    from aqualib.producer.reclaims import ReclaimTicket, ReclaimTotals
    from aqualib.reporter import Identity


class Borrower(Protocol):
    """Borrows memory while it may."""

    @property
    def may_borrow(self) -> bool: ...
    @may_borrow.setter
    def may_borrow(self, may_borrow: bool) -> None: ...
    @property
    def is_borrowing(self) -> bool: ...


class MemoryLender(Protocol):
    """Offers memory and takes it back."""

    load: LoadReport | None
    on_returned: Callable[[], None] | None

    @property
    def producer_id(self) -> str: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def pressures(self) -> Counter[Pressure]: ...
    @property
    def profile_follower(self) -> ProfileFollower | None: ...
    @property
    def measured_profile(self) -> ModelProfile | None: ...
    @property
    def offered_bytes(self) -> int: ...
    @property
    def leased_bytes(self) -> int: ...
    @property
    def quarantined_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def open_reclaim_bytes(self) -> int: ...
    @property
    def ended_reclaims(self) -> ReclaimTotals: ...
    @property
    def coordinator_error(self) -> AquaError | None: ...
    def offer(self, nbytes: int) -> int: ...
    def reclaim(self, nbytes: int, deadline_s: float | None = None) -> ReclaimTicket: ...
