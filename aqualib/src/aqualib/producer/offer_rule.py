"""When to offer memory and when to take it back, by an engine's load and its profile; pure.

The rule is the paper's. An LLM's profile says which request rate it sustains and how much memory
that leaves. At or below that steady state the profiled memory is offered; when the rate or the
queue rises above it, all of it is taken back at once, for latency is lost by the second. A batch
engine (images, audio) uses the same memory at any load, so it offers what it does not use, once,
and takes something back only when its own need grows. What an engine has swapped out is need, too:
it counts against what is offered and against what is free.

An engine that counts its arrivals is judged by the counts (`arrivals`), which tell a change from
chance; one that knows only a rate, by two thresholds. Requests that wait are judged by the queue
that the profile saw at the steady rate: more of them than chance brings once an hour are pressure,
and without such a queue any more than `queue_margin`.

Four things keep an offer from flapping. There are two thresholds for everything, and between them
nothing happens. Calm must last before memory is offered; pressure need not. Nothing moves by less
than a slab. And where requests wait again and again although no more arrive than the profile says
the engine sustains, the profile is wrong: calm has to last twice as long each time.

Source: Aqua sections 4, 4.1, 6 and 9.4. Ours: the charts, the dwell time, the two thresholds and
the reserve, which the paper does not describe; and reclaims go to the consumers, not to the
coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from aqua_protocol.members import LoadReport
from aqua_protocol.wire import ByteCount
from aqualib.producer.arrivals import FALSE_ALARM_SPACING_S, ArrivalWatch
from aqualib.producer.profile import Profile

RECLAIM_RATE_RATIO: Final = 1.2
"""Rate over the steady one from which memory is taken back. Figure 4: a model that sustains 2.5
requests/s misses its objective at 3. For engines that do not count their arrivals. Doubled, an
engine would run far beyond its objective first."""

MAX_CALM_S: Final = 600.0
"""How long calm has to last at most where the profile proved wrong. Doubled, memory changes hands
half as often there."""


class Pressure(StrEnum):
    """Why memory is taken back."""

    RATE = "rate"
    """More requests arrive than the engine sustains."""
    QUEUE = "queue"
    """More requests wait than at the steady rate."""
    STARVED = "starved"
    """Requests wait for nothing but memory."""
    MEMORY = "memory"
    """The reserve is used up, or the engine has swapped out what would fit."""


class ObservedLoad(LoadReport):
    """A load as an engine knows it that counts for itself; the books are told a `LoadReport`.

    Attributes:
        arrived_count: Requests that have arrived since the engine began; None: it does not count.
        swapped_bytes: State that it has paged out for want of memory.
        is_starved: Requests wait although the engine would take them up, had it the memory.
    """

    arrived_count: int | None = None
    swapped_bytes: ByteCount = 0
    is_starved: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """What the informer remembers between two looks.

    Attributes:
        offered_bytes: Offered now, without what open reclaims are taking back.
        returning_bytes: What open reclaims are taking back.
        calm_since_s: Since when the load has been at or below the steady state.
        arrivals: Of an engine that counts them.
        pressure: Why the load is above the steady state, if it is.
        offered_since_s: Since when something has been offered.
        doubt_s: How long calm has to last at least, since the profile proved wrong.
    """

    offered_bytes: int = 0
    returning_bytes: int = 0
    calm_since_s: float | None = None
    arrivals: ArrivalWatch = field(default_factory=ArrivalWatch)
    pressure: Pressure | None = None
    offered_since_s: float | None = None
    doubt_s: float = 0.0


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
    """Note what the load says: since when it has been calm, or why it is not."""
    seen = _observed(load)
    steady, arrived = profile.steady_requests_per_s, seen.arrived_count
    arrivals = watch.arrivals
    is_counted = steady is not None and arrived is not None
    if steady is not None and arrived is not None:
        arrivals = arrivals.seen(arrived, steady, now_s)
    pressure = _pressure(profile, seen, arrivals)
    is_calm = pressure is None and _is_calm(profile, seen, arrivals)
    offered_since_s = _since(watch.offered_since_s, now_s) if watch.offered_bytes else None
    doubt_s = watch.doubt_s
    is_doubtful = is_counted and pressure in {Pressure.QUEUE, Pressure.STARVED}
    if offered_since_s is not None and is_doubtful:
        is_soon = now_s - offered_since_s < FALSE_ALARM_SPACING_S
        doubt_s = min(2 * max(doubt_s, profile.calm_s), MAX_CALM_S) if is_soon else 0.0
    return replace(
        watch,
        calm_since_s=_since(watch.calm_since_s, now_s) if is_calm else None,
        arrivals=arrivals,
        pressure=pressure,
        offered_since_s=offered_since_s,
        doubt_s=doubt_s,
    )


def _since(before_s: float | None, now_s: float) -> float:
    return now_s if before_s is None else before_s


def _observed(load: LoadReport) -> ObservedLoad:
    return load if isinstance(load, ObservedLoad) else ObservedLoad(**load.model_dump())


def _is_calm(profile: Profile, load: ObservedLoad, arrivals: ArrivalWatch) -> bool:
    if profile.spare_bytes is None:
        # A batch engine's queue may be long for ever; only its memory says anything.
        return _unused(load) >= profile.reserve_bytes + profile.slab_bytes
    if arrivals.is_fast or load.queue_length > profile.steady_queue_length:
        return False
    return load.arrived_count is not None or _rate_ratio(profile, load) <= 1


def _pressure(profile: Profile, load: ObservedLoad, arrivals: ArrivalWatch) -> Pressure | None:
    if profile.spare_bytes is None:
        return None
    if arrivals.is_fast:
        return Pressure.RATE
    if load.is_starved:
        return Pressure.STARVED
    if load.queue_length - profile.steady_queue_length > profile.queue_margin:
        return Pressure.QUEUE
    if load.arrived_count is None and _rate_ratio(profile, load) > RECLAIM_RATE_RATIO:
        return Pressure.RATE
    return None


def _rate_ratio(profile: Profile, load: LoadReport) -> float:
    """The rate in terms of the steady one; 0 where either is not known."""
    if load.requests_per_s is None or profile.steady_requests_per_s is None:
        return 0.0
    return load.requests_per_s / profile.steady_requests_per_s


def _unused(load: ObservedLoad) -> int:
    """Free memory; less than nothing where more than that is swapped out."""
    return load.memory_total_bytes - load.memory_used_bytes - load.swapped_bytes


def decide(profile: Profile, load: LoadReport, watch: Watch, now_s: float) -> Decision | None:
    """What to do about this load, if anything.

    Args:
        profile: The engine's.
        load: Of this moment; `memory_used_bytes` counts slabs as used.
        watch: As `observe` returned it for this load.
        now_s: Monotonic seconds.
    """
    seen = _observed(load)
    if shortage := _shortage(profile, _unused(seen), watch):
        return ReclaimBytes(min(shortage, watch.offered_bytes))
    if watch.pressure is not None:
        return ReclaimBytes(watch.offered_bytes) if watch.offered_bytes else None
    since_s = watch.calm_since_s
    calm_s = max(profile.calm_s, watch.doubt_s)
    if watch.returning_bytes or since_s is None or now_s - since_s < calm_s:
        return None
    return _offer(profile, seen, watch)


def _offer(profile: Profile, load: ObservedLoad, watch: Watch) -> OfferBytes | None:
    if profile.spare_bytes is None:
        more = _unused(load) - profile.reserve_bytes
    else:
        spare = profile.spare_bytes - profile.reserve_bytes - load.swapped_bytes
        more = spare - watch.offered_bytes
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
