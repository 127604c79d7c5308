"""The informer: watches the engine's load and decides when to offer memory and when to reclaim it.

`observe` and `decide` are pure; the `Informer` is the thread that asks the engine, acts, and hands
memory that came back to the engine again.

The rule is the paper's. An LLM's profile says which request rate it sustains and how much memory
that leaves. At or below that steady state the profiled memory is offered; when the rate or the
queue rises above it, all of it is taken back at once, for latency is lost by the second. A batch
engine (images, audio) uses the same memory at any load, so it offers what it does not use, once,
and takes something back only when its own need grows.

Three things keep an offer from flapping. There are two thresholds for everything, and between them
nothing happens. Calm must last before memory is offered; pressure need not. And nothing moves by
less than a slab.

Source: Aqua sections 4.1, 6 and 9.4. Ours: the dwell time, the two thresholds and the reserve,
which the paper does not describe; and reclaims go to the consumers, not to the coordinator.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, Self

from aqua_protocol import ConfigError, TransportError, UnavailableError, format_bytes
from aqua_protocol.profile import PRODUCER_THRESHOLD_BYTES, ModelProfile, ProfileKind, ProfileLabel
from aqua_protocol.supervision import RestartPolicy, SupervisedThread, resting

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqua_protocol.members import LoadReport
    from aqualib.producer.producer import Producer
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")

RECLAIM_RATE_RATIO: Final = 1.2
"""Rate over the steady one from which memory is taken back. Figure 4: a model that sustains 2.5
requests/s misses its objective at 3. Doubled, an engine would run far beyond its objective
first."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What profiling found out about an engine, and how cautious to be.

    Attributes:
        slab_bytes: Unit of every decision.
        spare_bytes: Memory to offer in the steady state, for engines that reserve all memory for
            themselves and give it up on request (LLMs). None: whatever is not in use (batch).
        steady_requests_per_s: Highest rate within the objective; None where rate says nothing.
        steady_queue_length: Waiting requests that are normal at that rate.
        queue_margin: Waiting requests beyond it that mean pressure.
        reserve_bytes: Device memory that stays unused after an offer. When less than half of it
            is left, memory is taken back.
        least_offer_bytes: Do not begin to offer less than this.
        calm_s: How long the load must stay at or below the steady state before an offer.
    """

    slab_bytes: int
    spare_bytes: int | None = None
    steady_requests_per_s: float | None = None
    steady_queue_length: int = 0
    queue_margin: int = 2
    reserve_bytes: int = 0
    least_offer_bytes: int = PRODUCER_THRESHOLD_BYTES
    calm_s: float = 5.0

    @classmethod
    def measured(cls, measured: ModelProfile, slab_bytes: int) -> Self:
        """What `aqua-profile` found out about a producer.

        Raises:
            ConfigError: The profile is not a whole one of a producer.
        """
        if measured.partial or measured.label is not ProfileLabel.PRODUCER:
            label = "partial" if measured.partial else measured.label.value
            raise ConfigError(
                f"the profile of {measured.model!r} is {label}, so nothing is lent by it",
                remedy="Profile a producer to the end, or write the informer's profile yourself.",
            )
        least_bytes = min(measured.threshold_bytes, measured.spare_bytes or 0)
        if measured.kind is ProfileKind.BATCH:
            return cls(slab_bytes, least_offer_bytes=least_bytes)
        return cls(
            slab_bytes,
            spare_bytes=measured.spare_bytes,
            steady_requests_per_s=measured.stable_rate_per_s or None,
            least_offer_bytes=least_bytes,
        )

    def __post_init__(self) -> None:
        assert self.slab_bytes > 0, self
        assert self.steady_requests_per_s is None or self.steady_requests_per_s > 0, self
        assert min(self.reserve_bytes, self.queue_margin, self.calm_s) >= 0, self


@dataclass(frozen=True, slots=True)
class Watch:
    """What the informer remembers between two looks.

    Attributes:
        offered_bytes: Offered now, without what open reclaims are taking back.
        returning_bytes: What open reclaims are taking back.
        calm_since_s: Since when the load has been at or below the steady state.
    """

    offered_bytes: int = 0
    returning_bytes: int = 0
    calm_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class OfferBytes:
    """Have the engine give up `nbytes`, whole slabs, and offer them."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ReclaimBytes:
    """Reclaim `nbytes`, whole slabs."""

    nbytes: int


Decision = OfferBytes | ReclaimBytes


def observe(profile: Profile, load: LoadReport, watch: Watch, now_s: float) -> Watch:
    """Note since when the load has been calm."""
    if not _is_calm(profile, load):
        return replace(watch, calm_since_s=None)
    return watch if watch.calm_since_s is not None else replace(watch, calm_since_s=now_s)


def _is_calm(profile: Profile, load: LoadReport) -> bool:
    if profile.spare_bytes is None:
        # A batch engine's queue may be long for ever; only its memory says anything.
        return _unused(load) >= profile.reserve_bytes + profile.slab_bytes
    return _rate_ratio(profile, load) <= 1 and load.queue_length <= profile.steady_queue_length


def _is_pressed(profile: Profile, load: LoadReport) -> bool:
    if profile.spare_bytes is None:
        return False
    waiting = load.queue_length - profile.steady_queue_length
    return waiting > profile.queue_margin or _rate_ratio(profile, load) > RECLAIM_RATE_RATIO


def _rate_ratio(profile: Profile, load: LoadReport) -> float:
    """The rate in terms of the steady one; 0 where either is not known."""
    if load.requests_per_s is None or profile.steady_requests_per_s is None:
        return 0.0
    return load.requests_per_s / profile.steady_requests_per_s


def _unused(load: LoadReport) -> int:
    return load.memory_total_bytes - load.memory_used_bytes


def decide(profile: Profile, load: LoadReport, watch: Watch, now_s: float) -> Decision | None:
    """What to do about this load, if anything.

    Args:
        profile: The engine's.
        load: Of this moment; `memory_used_bytes` counts slabs as used.
        watch: As `observe` returned it for this load.
        now_s: Monotonic seconds.
    """
    unused = _unused(load)
    if shortage := _shortage(profile, unused, watch):
        return ReclaimBytes(min(shortage, watch.offered_bytes))
    if _is_pressed(profile, load):
        return ReclaimBytes(watch.offered_bytes) if watch.offered_bytes else None
    since_s = watch.calm_since_s
    if watch.returning_bytes or since_s is None or now_s - since_s < profile.calm_s:
        return None
    return _offer(profile, unused, watch)


def _offer(profile: Profile, unused: int, watch: Watch) -> OfferBytes | None:
    if profile.spare_bytes is None:
        more = unused - profile.reserve_bytes
    else:
        more = profile.spare_bytes - profile.reserve_bytes - watch.offered_bytes
    more -= more % profile.slab_bytes
    if more <= 0 or watch.offered_bytes + more < profile.least_offer_bytes:
        return None
    return OfferBytes(more)


def _shortage(profile: Profile, unused: int, watch: Watch) -> int:
    """Whole slabs that restore the reserve, once half of it is gone; 0 while it is not."""
    soon_unused = unused + watch.returning_bytes
    if soon_unused * 2 >= profile.reserve_bytes or not watch.offered_bytes:
        return 0
    missing = profile.reserve_bytes - soon_unused
    return -(-missing // profile.slab_bytes) * profile.slab_bytes


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


class Informer:
    """Runs one producer by its engine's load; a context manager.

    Args:
        producer: What offers and reclaims; from now on only the informer calls its `offer`.
        source: The engine.
        profile: Its profile.
        poll_s: Between two looks; memory that comes back is handed on at once.

    Attributes:
        on_reclaim: Called with the ticket of each reclaim that a look decides on.
        is_lending: While False, everything is taken back and nothing is offered.
        surrendered_bytes: What the engine gave up and has not got back. An earlier offer counts.
    """

    def __init__(
        self, producer: Producer, source: LoadSource, profile: Profile, *, poll_s: float = 0.25
    ) -> None:
        self._producer = producer
        self._source = source
        self._profile = profile
        self._poll_s = poll_s
        self.on_reclaim: Callable[[ReclaimTicket], None] | None = None
        self.is_lending = True
        self._watch = Watch()
        self.surrendered_bytes = producer.committed_bytes
        self._closing = False
        self._woken = threading.Event()
        # The engine's code may raise anything, and memory is lent on its behalf: look on, as often.
        looks = RestartPolicy(first_pause_s=poll_s, longest_pause_s=poll_s)
        self._thread = SupervisedThread(self._run, "aqua-informer", policy=looks)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to watch."""
        self._producer.on_returned = self.wake
        self._thread.start()

    def wake(self) -> None:
        """Look at once: the engine has something to say. Never waits; any thread may call it."""
        self._woken.set()

    def close(self) -> None:
        """Stop watching; the offer stays as it is. Harmless when repeated."""
        self._closing = True
        self._woken.set()
        self._thread.join()
        self._producer.on_returned = None

    def look(self, now_s: float) -> Decision | None:
        """One look: hand memory on, ask the engine, decide, act; returns the decision.

        Whatever the engine raises is raised here; the thread logs it instead.
        """
        self._hand_on()
        load = self._source.load()
        self._producer.load = load
        returning = self._producer.open_reclaim_bytes
        offered = self._producer.offered_bytes - returning
        watch = replace(self._watch, offered_bytes=offered, returning_bytes=returning)
        self._watch = observe(self._profile, load, watch, now_s)
        if self.is_lending:
            decision = decide(self._profile, load, self._watch, now_s)
        else:
            # Calm has to be seen anew before anything is offered again.
            self._watch = replace(self._watch, calm_since_s=None)
            decision = ReclaimBytes(watch.offered_bytes) if watch.offered_bytes else None
        match decision:
            case OfferBytes(nbytes):
                self._offer(nbytes)
            case ReclaimBytes(nbytes):
                reason = "load rises" if self.is_lending else "lending is off"
                logger.info("%s: reclaiming %s", reason, format_bytes(nbytes))
                ticket = self._producer.reclaim(nbytes)
                if self.on_reclaim is not None:
                    self.on_reclaim(ticket)
        return decision

    def _run(self) -> None:
        # After a look that failed, calm has to be seen anew before more is offered.
        self._watch = replace(self._watch, calm_since_s=None)
        while not self._closing:
            self.look(time.monotonic())
            with resting():
                self._woken.wait(self._poll_s)
            self._woken.clear()

    def _offer(self, nbytes: int) -> None:
        # A shrink may free less than a slab; the rest of it counts towards the next one.
        spare = self.surrendered_bytes - self._producer.committed_bytes
        if spare < nbytes:
            given = self._source.shrink(nbytes - spare)
            assert given >= 0, given
            self.surrendered_bytes += given
        room = self.surrendered_bytes - self._producer.committed_bytes
        if room < self._profile.slab_bytes:
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
        back -= back % self._profile.slab_bytes
        if back > 0:
            self._source.grow(back)
            self.surrendered_bytes -= back
