"""Why things are as they are, in plain sentences.

Pure functions of what the books say. A sentence never says more than the books know: they know who
asked for memory back, not why an engine's load rose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from aqua_coordinator.console.snapshot import Snapshot
from aqua_coordinator.store.rows import ProducerRow
from aqua_protocol import LeaseState, format_bytes
from aqua_protocol.leases import (
    EndedReclaim,
    Event,
    EventKind,
    LeaseView,
    Pairing,
    ReclaimOrigin,
    ReclaimOutcome,
    ReclaimView,
)
from aqua_protocol.members import ConsumerView

SILENT_S: Final = 3.0
"""Three heartbeats by default. Doubled, a dead member looks alive for twice as long."""
NAMED: Final = 4
"""Members that a sentence names before it counts the others. Doubled, it is harder to read."""

_LEASE: Final = {
    LeaseState.GRANTED: "{consumer} may borrow {size} from {producer}.",
    LeaseState.RECLAIMING: "{producer} asks {consumer} to give memory back.",
    LeaseState.FENCED: "{consumer} may no longer use the memory of {producer}; "
    "{size} is on its way back.",
    LeaseState.RELEASED: "{consumer} has given back all it borrowed from {producer} on one lease.",
    LeaseState.LOST: "{producer} is gone, and with it what {consumer} borrowed there.",
}
_EVENT: Final = {
    EventKind.PRODUCER_JOINED: "{producer} joins and offers {size}.",
    EventKind.PRODUCER_LOST: "{producer} leaves: it said goodbye, or was silent for too long.",
    EventKind.CONSUMER_JOINED: "{consumer} joins.",
    EventKind.CONSUMER_LOST: "{consumer} leaves: it said goodbye, or was silent for too long.",
    EventKind.OFFER_CHANGED: "{producer} offers {size} now.",
    EventKind.PLACEMENT_CHANGED: "An operator has put a new plan in force; it decides who borrows "
    "from whom.",
    EventKind.BOOKS_CREATED: "New books are opened; members report what they hold.",
}


def event_sentence(event: Event) -> str | None:
    """What happened; None for what says nothing new to a person."""
    words = {
        "producer": event.producer_id,
        "consumer": event.consumer_id,
        "size": format_bytes(event.bytes) if event.bytes else "nothing",
    }
    if event.kind is EventKind.LEASE_CHANGED:
        text = None if event.state is None else _LEASE.get(event.state)
        return None if text is None else text.format(**words)
    if event.kind is EventKind.RECLAIM_OPENED:
        return f"{event.producer_id} begins to take back {words['size']}."
    if event.kind is EventKind.RECLAIM_CLOSED:
        return None if event.reclaim is None else reclaim_sentence(event.reclaim)
    return _EVENT[event.kind].format(**words)


def reclaim_sentence(reclaim: EndedReclaim) -> str:
    """How a reclaim went, and who wanted it."""
    why = _who_asked(reclaim)
    size = format_bytes(reclaim.returned_bytes)
    if reclaim.outcome is ReclaimOutcome.PRODUCER_LOST:
        return f"{reclaim.producer_id} left while it took memory back."
    if reclaim.outcome is ReclaimOutcome.DROPPED:
        return f"{reclaim.producer_id} stopped taking memory back after {size}; {why}."
    took = "" if reclaim.total_ms is None else f" in {duration(reclaim.total_ms)}"
    first = (
        ""
        if reclaim.first_slab_ms is None
        else f", the first of it after {duration(reclaim.first_slab_ms)}"
    )
    late = (
        f" That was past its deadline of {reclaim.deadline_s:g} s."
        if reclaim.outcome is ReclaimOutcome.ESCALATED
        else ""
    )
    return f"{reclaim.producer_id} took back {size}{took}{first}; {why}.{late}"


def producer_reasons(snapshot: Snapshot, row: ProducerRow) -> Iterator[str]:
    """Everything there is to say of a producer."""
    yield _where("producer", row)
    total = row.memory_total_bytes
    of_total = "" if total is None else f" of the {format_bytes(total)} of its GPU"
    if row.offered_bytes:
        yield f"It offers {format_bytes(row.offered_bytes)}{of_total} and keeps the rest."
    elif row.queue_length:
        yield f"It offers nothing: {row.queue_length} requests wait in its own engine."
    else:
        yield "It offers nothing now: its own engine needs its memory, or lending is off."
    held = [lease for lease in snapshot.leases if lease.producer_id == row.producer_id]
    if held:
        yield f"{_listed(held, lambda lease: lease.consumer_id, 'lent to')}."
    elif row.leased_bytes:
        yield f"{format_bytes(row.leased_bytes)} of it is lent to others."
    elif row.offered_bytes:
        yield "No consumer borrows from it now."
    if not row.grantable:
        yield (
            "Nothing new is granted of it yet: it has to confirm the books first, which takes a "
            "heartbeat after a start."
        )
    for reclaim in snapshot.reclaims:
        if reclaim.producer_id == row.producer_id:
            yield reclaim_under_way(reclaim)
    yield from _silence(row.silent_s)


def consumer_reasons(snapshot: Snapshot, row: ConsumerView) -> Iterator[str]:
    """Everything there is to say of a consumer."""
    yield _where("consumer", row)
    held = [lease for lease in snapshot.leases if lease.consumer_id == row.consumer_id]
    yield (
        f"{_listed(held, lambda lease: lease.producer_id, 'borrowed from')}."
        if held
        else "It borrows nothing now."
    )
    if row.spilled_bytes:
        yield (
            f"{format_bytes(row.spilled_bytes)} of its pages is in the memory of its host, "
            "which is slower."
        )
    why = why_not_more(snapshot, row)
    if why is not None:
        yield why
    pairing = snapshot.pairings.get(row.consumer_id)
    if pairing is not None:
        reason = f" The placer says: {pairing.reason}" if pairing.reason else ""
        yield f"The plan in force lets it borrow from {_names(pairing.producers)}.{reason}"
    yield from _silence(row.silent_s)


def why_not_more(snapshot: Snapshot, row: ConsumerView) -> str | None:
    """Why a consumer does not have what it wants; None when it wants no more."""
    if not row.wanted_bytes:
        return None
    return (
        f"{row.consumer_id} would take {format_bytes(row.wanted_bytes)} more: "
        f"{_obstacle(snapshot, row)}."
    )


def _obstacle(snapshot: Snapshot, row: ConsumerView) -> str:
    quota = next(iter(snapshot.quotas), None)
    if quota is not None and quota.available_bytes == 0:
        return "the quota of its tenant is used up"
    rows = [one for one in snapshot.producers if one.domain == row.domain]
    pairing = snapshot.pairings.get(row.consumer_id)
    # A tenant does not see all producers that its plan may name.
    if pairing is not None and not snapshot.tenant:
        return _obstacle_in_plan(pairing, rows)
    free_bytes = snapshot.free_by_domain[row.domain]
    if free_bytes:
        size = format_bytes(free_bytes)
        return f"{size} is free in {row.domain}, and it asks again within seconds"
    if any(one.free_bytes for one in rows):
        return f"what is free in {row.domain} waits until its producers have confirmed the books"
    if any(one.offered_bytes for one in rows):
        return f"all that is offered in {row.domain} is lent"
    return f"no producer in {row.domain} offers memory now"


def _obstacle_in_plan(pairing: Pairing, rows: Sequence[ProducerRow]) -> str:
    free = {one.producer_id: one.free_bytes if one.grantable else 0 for one in rows}
    planned = [name for name in pairing.producers if name in free]
    if not planned:
        return f"the plan pairs it with {_names(pairing.producers)}, not in its domain now"
    if not any(free[name] for name in planned):
        return f"the plan pairs it with {_names(planned)}, with nothing free"
    return "memory is free where the plan pairs it, and it asks again within seconds"


def reclaim_under_way(reclaim: ReclaimView) -> str:
    """How far a reclaim has got."""
    late = " It is past its deadline." if reclaim.escalated else ""
    return (
        f"{reclaim.producer_id} is taking back {format_bytes(reclaim.requested_bytes)}, of which "
        f"{format_bytes(reclaim.returned_bytes)} is back; {_who_asked(reclaim)}.{late}"
    )


def duration(milliseconds: float) -> str:
    """A time, as short as it can be said."""
    if milliseconds < 10:  # noqa: PLR2004 - one digit before the point
        return f"{milliseconds:.1f} ms"
    if milliseconds < 1000:  # noqa: PLR2004 - below a second
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1e3:.1f} s"


def _who_asked(reclaim: ReclaimView) -> str:
    if reclaim.origin is ReclaimOrigin.OPERATOR:
        return "an operator asked for it"
    return "its own engine needed it"


def _where(role: str, row: ProducerRow | ConsumerView) -> str:
    model = f"runs {row.model}" if row.model else f"is a {role}"
    return f"It {model} on node {row.node}, GPU {row.gpu_uuid}, in domain {row.domain}."


def _silence(silent_s: float) -> Iterator[str]:
    if silent_s > SILENT_S:
        yield f"It has not reported for {silent_s:.0f} s; if that goes on, it leaves the books."


def _listed(leases: Iterable[LeaseView], other: Callable[[LeaseView], str], verb: str) -> str:
    sums = Counter[str]()
    for lease in leases:
        sums[other(lease)] += lease.bytes
    parts = [f"{format_bytes(size)} {verb} {name}" for name, size in sums.items()]
    return _names(parts)


def _names(names: Sequence[str]) -> str:
    shown = list(names[:NAMED])
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
