"""The informer: watches the engine's load, and offers memory and reclaims it as the rule says.

It is the thread that asks the engine, acts on what `offer_rule` decides, and hands memory that came
back to the engine again. The profile may be given, or be the one that the books have of the model
(`profile_follower`): then what the rule goes by changes whenever that does.

An engine that also borrows does one of the two at a time. It borrows while it lends nothing; when
its load has been low for long enough to lend, it first gives back what it borrowed, and it borrows
again when it has all of its own memory. So no byte is lent that its lender has to replace by a
borrowed one.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, Self, runtime_checkable

from aqua_protocol import TransportError, UnavailableError, format_bytes
from aqua_protocol.supervision import RestartPolicy, SupervisedThread, resting
from aqualib.producer.arrivals import ArrivalWatch
from aqualib.producer.offer_rule import (
    Decision,
    OfferBytes,
    Pressure,
    ReclaimBytes,
    Watch,
    decide,
    observe,
)
from aqualib.producer.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqua_protocol.members import LoadReport
    from aqua_protocol.profile import ModelProfile
    from aqualib.producer.lender import Borrower, MemoryLender
    from aqualib.producer.profile import ProfileRule
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")

LONGEST_POLL_S: Final = 0.25
"""Seconds between two looks at most: a twentieth of the time in which a doubled rate shows at 2.5
requests/s. Doubled, a rise is noticed 0.1 s later."""

SHORTEST_POLL_S: Final = 0.02
"""Seconds between two looks at least: each takes 0.1 ms from an engine of one process. Doubled, at
100 requests/s a rise is noticed 0.01 s later."""


class LoadSource(Protocol):
    """An engine, as the informer sees it. Called on the informer's thread only.

    A method may raise: the informer logs it once, does not count what was asked as done, and asks
    again at its next look. Until then the offer stays as it is, and what was reclaimed comes back.
    """

    def load(self) -> LoadReport:
        """The engine's load now; slabs count as used memory."""

    def shrink(self, nbytes: int) -> int:
        """Give up to `nbytes` of memory to the device, and say how much it was.

        Less, or nothing, is a fine answer: the informer asks again at its next look.
        """

    def grow(self, nbytes: int) -> None:
        """`nbytes` given up before are free on the device again: the engine may take them."""


@runtime_checkable
class TimedSource(Protocol):
    """A source that can say how long its steps take: seconds and their kind, on its own thread."""

    on_step: Callable[[float, str], None] | None


@runtime_checkable
class StepListener(Protocol):
    """A lender that paces its consumers by the steps of its engine."""

    def step_ended(self, seconds: float, kind: str = "") -> None:
        """Hear how long a step took."""


class Informer:
    """Runs one producer by its engine's load; a context manager.

    Args:
        producer: What offers and reclaims; from now on only the informer calls its `offer`.
        source: The engine.
        profile: Its profile; or how it follows from what the producer finds in the books, which may
            come later, change, and go. If left out, `Profile.followed`.
        poll_s: Between two looks; by default as short as the steady rate makes it worth. Memory
            that comes back is handed on at once.
        borrower: What the engine borrows with, if it does: kept from it while anything is lent.

    Attributes:
        on_reclaim: Called with the ticket of each reclaim that a look decides on.
        is_lending: While False, everything is taken back and nothing is offered.
        profile: What it goes by now.
        surrendered_bytes: What the engine gave up and has not got back. An earlier offer counts.
    """

    def __init__(
        self,
        producer: MemoryLender,
        source: LoadSource,
        profile: Profile | ProfileRule | None = None,
        *,
        poll_s: float | None = None,
        borrower: Borrower | None = None,
    ) -> None:
        self._producer = producer
        self._source = source
        self._rule = profile if profile is not None else self._followed
        self._measured = producer.measured_profile
        self.profile = self._by_rule()
        self._poll_s = poll_s
        self._borrower = borrower
        self.on_reclaim: Callable[[ReclaimTicket], None] | None = None
        self.is_lending = True
        self._watch = Watch()
        self.surrendered_bytes = producer.committed_bytes
        self._closing = False
        self._woken = threading.Event()
        # The engine's code may raise anything, and memory is lent on its behalf: look on, as often.
        pause_s = poll_s or LONGEST_POLL_S
        looks = RestartPolicy(first_pause_s=pause_s, longest_pause_s=pause_s)
        self._thread = SupervisedThread(self._run, "aqua-informer", policy=looks)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to watch."""
        self._producer.on_returned = self.wake
        if isinstance(self._source, TimedSource) and isinstance(self._producer, StepListener):
            self._source.on_step = self._producer.step_ended
        self._thread.start()

    def wake(self) -> None:
        """Look at once: the engine has something to say. Never waits; any thread may call it."""
        self._woken.set()

    def close(self) -> None:
        """Stop watching; the offer stays as it is. Harmless when repeated."""
        self._closing = True
        self._woken.set()
        self._thread.join()
        if isinstance(self._source, TimedSource):
            self._source.on_step = None
        self._producer.on_returned = None

    def look(self, now_s: float) -> Decision | None:
        """One look: hand memory on, ask the engine, decide, act; returns the decision.

        Whatever the engine raises is raised here; the thread logs it instead.
        """
        self._hand_on()
        self._follow()
        load = self._source.load()
        self._producer.load = load
        returning = self._producer.open_reclaim_bytes
        offered = self._producer.offered_bytes - returning
        watch = replace(self._watch, offered_bytes=offered, returning_bytes=returning)
        self._watch = observe(self.profile, load, watch, now_s)
        if self.is_lending:
            decision = decide(self.profile, load, self._watch, now_s)
        else:
            # Calm has to be seen anew before anything is offered again.
            self._watch = replace(self._watch, calm_since_s=None)
            decision = ReclaimBytes(watch.offered_bytes) if watch.offered_bytes else None
        match decision:
            case OfferBytes(nbytes):
                self._offer(nbytes)
            case ReclaimBytes(nbytes):
                reason = "lending is off"
                if self.is_lending:
                    cause = self._watch.pressure or Pressure.MEMORY
                    self._producer.pressures[cause] += 1
                    reason = f"load rises ({cause})"
                logger.info("%s: reclaiming %s", reason, format_bytes(nbytes))
                ticket = self._producer.reclaim(nbytes)
                if self.on_reclaim is not None:
                    self.on_reclaim(ticket)
            case None if self._borrower is not None and not self._has_lent:
                self._borrower.may_borrow = True
        return decision

    def _run(self) -> None:
        # After a look that failed, calm has to be seen anew before more is offered.
        self._watch = replace(self._watch, calm_since_s=None)
        while not self._closing:
            self.look(time.monotonic())
            with resting():
                self._woken.wait(self._poll_s or self._worthwhile_poll_s())
            self._woken.clear()

    def _followed(self, measured: ModelProfile | None) -> Profile:
        return Profile.followed(measured, self._producer.slab_bytes)

    def _by_rule(self) -> Profile:
        return self._rule if isinstance(self._rule, Profile) else self._rule(self._measured)

    def _follow(self) -> None:
        """Go by what the books say now."""
        measured = self._producer.measured_profile
        if measured is not self._measured:
            self._measured = measured
            self.profile = self._by_rule()
            # Evidence is in terms of the steady rate.
            self._watch = replace(self._watch, arrivals=ArrivalWatch())

    def _worthwhile_poll_s(self) -> float:
        """About one arrival at the steady rate."""
        rate_per_s = self.profile.steady_requests_per_s or 0.0
        return max(SHORTEST_POLL_S, min(LONGEST_POLL_S, 1 / max(rate_per_s, 1.0)))

    @property
    def _has_lent(self) -> bool:
        """Whether memory of the engine's is lent, offered, or on its way back."""
        return self.surrendered_bytes + self._producer.committed_bytes > 0

    def _offer(self, nbytes: int) -> None:
        if self._borrower is not None:
            self._borrower.may_borrow = False
            if self._borrower.is_borrowing:
                return  # What it borrowed goes back first; the next look asks again.
        # A shrink may free less than a slab; the rest of it counts towards the next one.
        spare = self.surrendered_bytes - self._producer.committed_bytes
        if spare < nbytes:
            given = self._source.shrink(nbytes - spare)
            assert given >= 0, given
            self.surrendered_bytes += given
        room = self.surrendered_bytes - self._producer.committed_bytes
        if room < self.profile.slab_bytes:
            return
        goal = self._producer.offered_bytes + room
        try:
            offered = self._producer.offer(goal)
        except TransportError as error:
            logger.warning("could not offer %s: %s", format_bytes(nbytes), error)
            self._hand_on()
        except UnavailableError:
            return  # The producer is closing.
        else:
            logger.info("load is steady: offering %s", format_bytes(offered))

    def _hand_on(self) -> None:
        """Tell the engine about memory that no slab has any more."""
        back = self.surrendered_bytes - self._producer.committed_bytes
        back -= back % self.profile.slab_bytes
        if back > 0:
            self._source.grow(back)
            self.surrendered_bytes -= back
