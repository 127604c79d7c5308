"""What scripts answer, as wire models and small records.

Redis speaks bytes and integers; everything above this module speaks the models of
`aqua_protocol`. Field by field, in the order that each script's header names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from pydantic import Field

from aqua_coordinator.store.scripts import RIGHTFUL_STATES
from aqua_protocol import TransportKind
from aqua_protocol.errors import ERRORS_BY_CODE, AquaError, BooksRebuildingError
from aqua_protocol.lease import LEASE, LeaseState
from aqua_protocol.leases import (
    EndedReclaim,
    Event,
    EventKind,
    LeaseView,
    Pairing,
    PlacementPlan,
    QuarantinedRecord,
    QuotaView,
    ReclaimView,
)
from aqua_protocol.members import ConsumerView, LeaseNotice, OfferView, ProducerView, ReclaimOrder

log = structlog.get_logger(__name__)

RowT = TypeVar("RowT")

ROLES: Final = ("producer", "consumer")
STOPS: Final = ("absence", "refusal", "silence")
MICROSECONDS: Final = 1e6
"""In a second; fixed by the unit in which scripts count time."""
REBUILDING_RETRY_S: Final = 1.0
"""A heartbeat by default: then members have confirmed the books. Doubled, a consumer waits a second
longer for memory after a loss."""
_COUNTS: Final = ("_bytes", "_count", "epoch", "revision")
"""Ends of the names of details that are numbers; an id may consist of digits and is none."""

OPEN_KINDS: Final = {
    *(EventKind.PRODUCER_JOINED, EventKind.PRODUCER_LOST, EventKind.OFFER_CHANGED),
    *(EventKind.PLACEMENT_CHANGED, EventKind.BOOKS_CREATED),
}
"""What a token of any tenant sees, as in `/v1/offers`; of the others, its own tenant's."""

_MEMBER: Final = ("node", "domain", "gpu_uuid", "model")
_PRODUCER: Final = (
    *("producer_id", "silent_us", *_MEMBER, "endpoint", "transport"),
    *("slab_bytes", "offered_bytes", "leased_bytes", "grantable", "queue_length"),
    "memory_total_bytes",
)
_CONSUMER: Final = (
    *("consumer_id", "silent_us", *_MEMBER, "wanted_bytes", "spilled_bytes", "leased_bytes"),
)
_OFFER: Final = ("producer_id", "domain", "offered_bytes", "leased_bytes", "grantable")
_QUOTA: Final = (
    *("tenant", "cohort", "nominal_bytes", "borrowing_limit_bytes", "lending_limit_bytes"),
    *("consumer_limit_bytes", "leased_bytes", "available_bytes"),
)
_RECLAIM: Final = (
    *("reclaim_id", "producer_id", "origin", "requested_bytes", "returned_bytes", "deadline_s"),
    *("done", "escalated", "first_slab_ms", "total_ms"),
)
"""Rows as the headers of `read_*.lua` and `update_offer.lua` name them."""


@dataclass(frozen=True, slots=True)
class CurrentBooks:
    """The books that are open now."""

    books_id: str
    secret: bytes = field(repr=False)


class Grant(NamedTuple):
    """A lease as granted, and what its capability token is made of.

    Attributes:
        lease: As the books had it at the moment of the grant.
        books_id: Books that granted it; their secret signs the token.
        incarnation: Life of the producer that will check the token.
        not_after_s: Unix time by Redis, in seconds, after which no consumer attaches.
        endpoint, transport, slab_bytes: Of the producer.
    """

    lease: LeaseView
    books_id: str
    incarnation: str
    not_after_s: float
    endpoint: str
    transport: TransportKind
    slab_bytes: int


class ClosedReclaim(NamedTuple):
    """How a reclaim ended, and how long all of it and its first slab took, as far as it got."""

    outcome: str
    total_s: float | None
    first_slab_s: float | None


@dataclass(frozen=True, slots=True)
class ProducerBooked:
    """What a producer's report did to the books.

    Attributes:
        books_id, min_epoch, grantable, ended, orders: For the answer to the producer.
        attached_s: Seconds from grant to attachment, for leases attached just now.
        reclaimed: Reclaims closed just now.
    """

    books_id: str
    min_epoch: int
    grantable: bool
    ended: list[LeaseNotice]
    orders: list[ReclaimOrder]
    attached_s: list[float]
    reclaimed: list[ClosedReclaim]


@dataclass(frozen=True, slots=True)
class ConsumerBooked:
    """What a consumer's report did to the books."""

    books_id: str
    available_bytes: int
    ended: list[LeaseNotice]


class TenantEvent(Event):
    """An event as the API shows it, and whose it is, if it is one tenant's."""

    tenant: str = Field(default="", exclude=True)

    def is_visible(self, as_tenant: str) -> bool:
        """Whether a token of a tenant, '' for none, may see it: the open ones, and its own."""
        return self.kind in OPEN_KINDS or as_tenant in {"", self.tenant}


class ProducerRow(ProducerView):
    """A producer as the API shows it, and what its engine says of its load."""

    queue_length: int | None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BooksSummary:
    """The books as a whole, and sums over a part of their members.

    Attributes:
        member_counts, longest_silence_s: By role; the latter is that of the member which has not
            reported for longest.
        stood_s: How long the clock stood, by reason.
        rightful_count: Leases that a clock can end.
        has_quotas: Whether any were written to them, and not lost since.
        sums: Over the part, by field; leases by state, too, but for the initial one.
        after: Where the next part begins, by role; as given when there was nothing left.
    """

    books_id: str
    open_reclaim_count: int
    rightful_count: int
    quarantined_count: int
    has_quotas: bool
    member_counts: dict[str, int]
    longest_silence_s: dict[str, float]
    stood_s: dict[str, float]
    sums: dict[str, int]
    after: tuple[str, str]

    def leases_by_state(self, sums: Mapping[str, int]) -> dict[LeaseState, int]:
        """Leases by state; where all members are not one part, by sums over all."""
        by_state = {state: sums.get(state, 0) for state in LeaseState}
        attached = sum(by_state[state] for state in RIGHTFUL_STATES)
        by_state[LEASE.initial] = max(0, self.rightful_count - attached)
        return by_state


def refusal(answer: Sequence[Any]) -> AquaError:
    """The typed error of `{'refused', code, message, name, value, ...}`."""
    code, message, *rest = (text(part) for part in answer[1:])
    error = ERRORS_BY_CODE[code](message)
    error.details = {
        name: int(value) if name.endswith(_COUNTS) else value
        for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if isinstance(error, BooksRebuildingError):
        error.retry_after_s = REBUILDING_RETRY_S
    return error


def one(read: Callable[[Any], RowT]) -> Callable[[Sequence[Any]], RowT]:
    """Read an answer that is one row."""
    return lambda answer: read(answer[1])


def rows(read: Callable[[Any], RowT]) -> Callable[[Sequence[Any]], list[RowT]]:
    """Read an answer that is a list of rows."""
    return lambda answer: _readable(read, answer[1])


def page(read: Callable[[Any], RowT]) -> Callable[[Sequence[Any]], tuple[list[RowT], str | None]]:
    """Read an answer that is a list of rows, and the cursor to go on from (None at the end)."""
    return lambda answer: (_readable(read, answer[1]), text(answer[2]) or None)


def _readable(read: Callable[[Any], RowT], answer: Sequence[Any]) -> list[RowT]:
    """All rows but those that are not what they should be: one of these hides no other."""
    found = []
    for row in answer:
        try:
            found.append(read(row))
        except ValueError as error:
            log.warning("an unreadable row of the books is left out", error=str(error))
    return found


def entries(read: Callable[[bytes, Sequence[bytes]], RowT], found: Sequence[Any]) -> list[RowT]:
    """Entries of a stream but those that are not what they should be: a stream goes on behind."""
    readable = []
    for each in found:
        with contextlib.suppress(ValueError):
            readable.append(read(*each))
    return readable


def nothing(_: Sequence[Any]) -> None:
    """Read the answer of a step that says no more than that it is done."""


def text(raw: bytes | None) -> str:
    """Read text; none is empty."""
    return raw.decode(errors="replace") if raw else ""


def opened(answer: Sequence[Any]) -> CurrentBooks:
    """Read the answer of `create_books`."""
    return CurrentBooks(text(answer[1]), bytes.fromhex(text(answer[2])))


def lease(row: Sequence[Any]) -> LeaseView:
    """Read a `lease_row`."""
    return LeaseView(
        lease_id=text(row[0]),
        epoch=row[1],
        state=LeaseState(text(row[2])),
        producer_id=text(row[3]),
        consumer_id=text(row[4]),
        bytes=row[5],
        expires_in_s=row[6] / MICROSECONDS,
    )


def grant(answer: Sequence[Any]) -> Grant:
    """Read the answer of `grant_lease`."""
    fields = text(answer[2]).split("\n", 10)
    return Grant(
        lease=LeaseView(
            lease_id=fields[0],
            epoch=int(fields[1]),
            state=LeaseState.GRANTED,
            producer_id=fields[2],
            consumer_id=fields[4],
            bytes=int(fields[5]),
            expires_in_s=int(fields[6]) / MICROSECONDS,
        ),
        books_id=text(answer[1]),
        incarnation=fields[3],
        not_after_s=int(fields[7]) / MICROSECONDS,
        transport=TransportKind(fields[8]),
        slab_bytes=int(fields[9]),
        endpoint=fields[10],
    )


def producer_booked(answer: Sequence[Any]) -> ProducerBooked | list[str]:
    """Read the answer of `report_producer`: what it did, or leases whose proofs it asks for."""
    if len(answer) == 2:  # noqa: PLR2004 - 'ok' and the leases
        return [text(name) for name in answer[1]]
    _, books_id, min_epoch, grantable, ended, orders, attached_us, reclaimed = answer
    return ProducerBooked(
        books_id=text(books_id),
        min_epoch=min_epoch,
        grantable=bool(grantable),
        ended=[_notice(row) for row in ended],
        orders=[
            ReclaimOrder(reclaim_id=text(name), bytes=size, deadline_s=float(deadline))
            for name, size, deadline in orders
        ],
        attached_s=[wait / MICROSECONDS for wait in attached_us],
        reclaimed=[
            ClosedReclaim(text(outcome), *(float(ms) / 1e3 if ms else None for ms in took_ms))
            for outcome, *took_ms in reclaimed
        ],
    )


def consumer_booked(answer: Sequence[Any]) -> ConsumerBooked:
    """Read the answer of `report_consumer`."""
    _, books_id, available, ended = answer
    return ConsumerBooked(text(books_id), available, [_notice(row) for row in ended])


def durations(answer: Sequence[Any]) -> list[float]:
    """Read an answer that is times in microseconds, as seconds."""
    return [duration / MICROSECONDS for duration in answer[1:]]


def producer(row: Sequence[Any]) -> ProducerRow:
    """Read a row of `read_producers`."""
    fields = _fields(_PRODUCER, row)
    fields["silent_s"] = fields.pop("silent_us") / MICROSECONDS
    fields["free_bytes"] = int(fields["offered_bytes"]) - int(fields["leased_bytes"])
    return ProducerRow.model_validate(fields)


def offer(answer: Sequence[Any]) -> OfferView:
    """Read the answer of `update_offer`."""
    fields = _fields(_OFFER, answer[1:])
    fields["free_bytes"] = fields["offered_bytes"] - fields["leased_bytes"]
    return OfferView.model_validate(fields)


def consumer(row: Sequence[Any]) -> ConsumerView:
    """Read a row of `read_consumers`."""
    fields = _fields(_CONSUMER, row)
    fields["silent_s"] = fields.pop("silent_us") / MICROSECONDS
    return ConsumerView.model_validate(fields)


def reclaim(row: Sequence[Any]) -> ReclaimView:
    """Read a `reclaim_row`."""
    return ReclaimView.model_validate(_fields(_RECLAIM, row))


def quota(row: Sequence[Any]) -> QuotaView:
    """Read a row of `read_quotas`."""
    fields = _fields(_QUOTA, row)
    if fields["nominal_bytes"] is not None:
        over = int(fields["leased_bytes"]) - int(fields["nominal_bytes"])
        fields["borrowed_bytes"] = max(0, over)
    return QuotaView.model_validate(fields)


def placements(answer: Sequence[Any]) -> tuple[PlacementPlan, int, str | None]:
    """Read `read_placements`: a page, how many pairings the plan has, and where to go on."""
    _, plan_hash, count, pairings, after = answer

    def pairing(row: Sequence[bytes]) -> Pairing:
        name, producers, reason = map(text, row)
        return Pairing(consumer_id=name, producers=producers.split(), reason=reason)

    page = PlacementPlan(plan_hash=text(plan_hash)[:128], pairings=_readable(pairing, pairings))
    return page, count, text(after) or None


def summary(answer: Sequence[Any]) -> BooksSummary:
    """Read the answer of `read_books`."""
    _, books_id, *flat, producers_after, consumers_after = answer
    counts, sums = (
        {text(what): int(number) for what, number in zip(row[::2], row[1::2], strict=True)}
        for row in flat
    )
    return BooksSummary(
        books_id=text(books_id),
        rightful_count=counts["rightful"],
        quarantined_count=counts["quarantined"],
        has_quotas=counts["quotas"] == 1,
        open_reclaim_count=counts["reclaims"],
        member_counts={role: counts[role] for role in ROLES},
        longest_silence_s={role: counts[f"{role}_silence_us"] / MICROSECONDS for role in ROLES},
        stood_s={reason: counts[f"stood_{reason}_us"] / MICROSECONDS for reason in STOPS},
        sums=sums,
        after=(text(producers_after), text(consumers_after)),
    )


def event(event_id: bytes, fields: Sequence[bytes]) -> TenantEvent:
    """Read an entry of the event stream, see `emit` in `writes.lua`.

    Raises:
        ValueError: It is no event.
    """
    found = entry(fields)
    kind, producer_id, consumer_id, lease_id, state, size = found.get("event", "").split(" ")
    return TenantEvent(
        tenant=found.get("tenant", ""),
        event_id=event_id.decode(),
        at_s=entry_at_s(event_id),
        kind=EventKind(kind),
        producer_id=producer_id or None,
        consumer_id=consumer_id or None,
        lease_id=lease_id or None,
        state=LeaseState(state) if state else None,
        bytes=int(size) if size else None,
        reclaim=ended_reclaim(found["reclaim"]) if found.get("reclaim") else None,
    )


def ended_reclaim(figures: str) -> EndedReclaim:
    """Read a `reclaim_row` and its outcome, as `close_reclaim` writes them.

    Raises:
        ValueError: They are not.
    """
    *row, outcome = figures.split(" ")
    fields = {name: word or None for name, word in zip(_RECLAIM, row, strict=True)}
    return EndedReclaim.model_validate(fields | {"outcome": outcome})


def entry(fields: Sequence[bytes]) -> dict[str, str]:
    """Fields of a stream's entry by name.

    Raises:
        ValueError: One is no text.
    """
    words = [word.decode() for word in fields]
    return dict(zip(words[::2], words[1::2], strict=True))


def entry_at_s(entry_id: bytes) -> float:
    """Unix time by Redis of a stream's entry."""
    return int(entry_id.partition(b"-")[0]) / 1e3


def quarantined(entry_id: bytes, fields: Sequence[bytes]) -> QuarantinedRecord:
    """Read an entry of the quarantine, see `set_aside` in `quarantine.lua`."""
    found = dict(zip(map(text, fields[::2]), map(text, fields[1::2]), strict=True))
    return QuarantinedRecord(
        position=entry_id.decode(),
        at_s=entry_at_s(entry_id),
        key=found.get("key", ""),
        reason=found.get("reason", ""),
        record=found.get("record", ""),
    )


def _notice(row: Sequence[Any]) -> LeaseNotice:
    return LeaseNotice(lease_id=text(row[0]), epoch=row[1], reason=text(row[2]) or "ended")


def _fields(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row by name; what is empty is None. Text becomes numbers in the wire model."""
    return {
        name: (value.decode() or None) if isinstance(value, bytes) else value
        for name, value in zip(names, row, strict=True)
    }
