"""What scripts answer, as wire models and small records.

Redis speaks bytes and integers; everything above this module speaks the models of
`aqua_protocol`. Field by field, in the order that each script's header names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aqua_protocol import BooksRebuildingError, TransportKind
from aqua_protocol.errors import ERRORS_BY_CODE, AquaError
from aqua_protocol.lease import LEASE, LeaseState
from aqua_protocol.leases import (
    Event,
    EventKind,
    LeaseView,
    Pairing,
    PlacementPlan,
    ReclaimView,
)
from aqua_protocol.members import ConsumerView, LeaseNotice, OfferView, ProducerView, ReclaimOrder
from aqua_protocol.profile import ModelProfile

MICROSECONDS: Final = 1e6
_COUNTS: Final = ("_bytes", "epoch", "revision")
"""Ends of the names of details that are numbers; an id may consist of digits and is none."""
REBUILDING_RETRY_S: Final = 1.0
"""A heartbeat by default: then members have confirmed the books."""

_MEMBER: Final = ("node", "domain", "gpu_uuid", "model")
_PRODUCER: Final = (
    *("producer_id", "silent_us", *_MEMBER, "endpoint", "transport"),
    *("slab_bytes", "offered_bytes", "leased_bytes", "grantable", "queue_length"),
)
_CONSUMER: Final = (
    *("consumer_id", "silent_us", "leased_bytes", *_MEMBER, "wanted_bytes", "spilled_bytes"),
)
_OFFER: Final = ("producer_id", "domain", "offered_bytes", "leased_bytes", "grantable")
_RECLAIM: Final = (
    *("reclaim_id", "producer_id", "origin", "requested_bytes", "returned_bytes", "deadline_s"),
    *("done", "escalated", "first_slab_ms", "total_ms"),
)
"""Rows as the headers of `read_*.lua` and `update_offer.lua` name them."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The books that are open now."""

    books_id: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class Grant:
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


@dataclass(frozen=True, slots=True)
class ProducerBooked:
    """What a producer's report did to the books.

    Attributes:
        books_id, min_epoch, grantable, ended, orders: For the answer to the producer.
        attached_s: Seconds from grant to attachment, for leases attached just now.
        reclaimed: (outcome, seconds or None) of reclaims closed just now.
    """

    books_id: str
    min_epoch: int
    grantable: bool
    ended: list[LeaseNotice]
    orders: list[ReclaimOrder]
    attached_s: list[float]
    reclaimed: list[tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class ConsumerBooked:
    """What a consumer's report did to the books."""

    books_id: str
    available_bytes: int
    ended: list[LeaseNotice]


@dataclass(frozen=True, slots=True)
class ProducerRow:
    """A producer and what its engine says of its load."""

    view: ProducerView
    queue_length: int | None


@dataclass(frozen=True, slots=True)
class BooksSummary:
    """The books as a whole."""

    books_id: str
    plan_hash: str
    leases_by_state: dict[LeaseState, int]
    producer_count: int
    consumer_count: int
    open_reclaim_count: int


def refusal(answer: Sequence[Any]) -> AquaError:
    """The typed error of `{'refused', code, message, name, value, ...}`."""
    code, message, *rest = (_text(part) for part in answer[1:])
    error = ERRORS_BY_CODE[code](message)
    error.details = {
        name: int(value) if name.endswith(_COUNTS) else value
        for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if isinstance(error, BooksRebuildingError):
        error.retry_after_s = REBUILDING_RETRY_S
    return error


def nothing(_: Sequence[Any]) -> None:
    """Of a step that says no more than that it is done."""


def count(answer: Sequence[Any]) -> int:
    """Of a step of the sweep: how many it handled."""
    return int(answer[1])


def faults(answer: Sequence[Any]) -> list[str]:
    """Of an `audit_books` answer."""
    return [_text(fault) for fault in answer[1]]


def opened(answer: Sequence[Any]) -> Opened:
    """Of a `create_books` answer."""
    return Opened(_text(answer[1]), bytes.fromhex(_text(answer[2])))


def lease_view(answer: Sequence[Any]) -> LeaseView:
    """Of a step that answers with one `lease_row`."""
    return _lease(answer[1])


def lease_page(answer: Sequence[Any]) -> tuple[list[LeaseView], str | None]:
    """Of a `read_leases` answer."""
    return [_lease(row) for row in answer[1]], _text(answer[2]) or None


def _lease(row: Sequence[Any]) -> LeaseView:
    return LeaseView(
        lease_id=_text(row[0]),
        epoch=row[1],
        state=LeaseState(_text(row[2])),
        producer_id=_text(row[3]),
        consumer_id=_text(row[4]),
        bytes=row[5],
        expires_in_s=row[6] / MICROSECONDS,
    )


def grant(answer: Sequence[Any]) -> Grant:
    """Of a `grant_lease` answer."""
    fields = _text(answer[2]).split("\n", 10)
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
        books_id=_text(answer[1]),
        incarnation=fields[3],
        not_after_s=int(fields[7]) / MICROSECONDS,
        transport=TransportKind(fields[8]),
        slab_bytes=int(fields[9]),
        endpoint=fields[10],
    )


def producer_booked(answer: Sequence[Any]) -> ProducerBooked:
    """Of a `report_producer` answer."""
    _, books_id, min_epoch, grantable, ended, orders, attached_us, reclaimed = answer
    return ProducerBooked(
        books_id=_text(books_id),
        min_epoch=min_epoch,
        grantable=bool(grantable),
        ended=[_notice(row) for row in ended],
        orders=[
            ReclaimOrder(reclaim_id=_text(name), bytes=size, deadline_s=float(deadline))
            for name, size, deadline in orders
        ],
        attached_s=[wait / MICROSECONDS for wait in attached_us],
        reclaimed=[
            (_text(outcome), float(total_ms) / 1e3 if total_ms else None)
            for outcome, total_ms in reclaimed
        ],
    )


def consumer_booked(answer: Sequence[Any]) -> ConsumerBooked:
    """Of a `report_consumer` answer."""
    _, books_id, available, ended = answer
    return ConsumerBooked(_text(books_id), available, [_notice(row) for row in ended])


def producer_rows(answer: Sequence[Any]) -> list[ProducerRow]:
    """Of a `read_producers` answer."""
    return [_producer(row) for row in answer[1]]


def _producer(row: Sequence[Any]) -> ProducerRow:
    fields = _fields(_PRODUCER, row)
    queue_length = fields.pop("queue_length")
    fields["silent_s"] = fields.pop("silent_us") / MICROSECONDS
    fields["free_bytes"] = int(fields["offered_bytes"]) - int(fields["leased_bytes"])
    view = ProducerView.model_validate(fields)
    return ProducerRow(view, None if queue_length is None else int(queue_length))


def offer_of(view: ProducerView) -> OfferView:
    """The part of a producer that it volunteers."""
    return OfferView(
        producer_id=view.producer_id,
        domain=view.domain,
        offered_bytes=view.offered_bytes,
        leased_bytes=view.leased_bytes,
        free_bytes=view.free_bytes,
        grantable=view.grantable,
    )


def offer_view(answer: Sequence[Any]) -> OfferView:
    """Of an `update_offer` answer."""
    fields = _fields(_OFFER, answer[1:])
    fields["free_bytes"] = fields["offered_bytes"] - fields["leased_bytes"]
    return OfferView.model_validate(fields)


def consumer_views(answer: Sequence[Any]) -> list[ConsumerView]:
    """Of a `read_consumers` answer."""
    return [_consumer(row) for row in answer[1]]


def _consumer(row: Sequence[Any]) -> ConsumerView:
    fields = _fields(_CONSUMER, row)
    fields["silent_s"] = fields.pop("silent_us") / MICROSECONDS
    return ConsumerView.model_validate(fields)


def reclaim_view(answer: Sequence[Any]) -> ReclaimView:
    """Of a step that answers with one `reclaim_row`."""
    return _reclaim(answer[1])


def reclaim_page(answer: Sequence[Any]) -> tuple[list[ReclaimView], int | None]:
    """Of a `read_reclaims` answer."""
    return [_reclaim(row) for row in answer[1]], int(float(answer[2])) if answer[2] else None


def _reclaim(row: Sequence[Any]) -> ReclaimView:
    return ReclaimView.model_validate(_fields(_RECLAIM, row))


def placements(answer: Sequence[Any]) -> PlacementPlan:
    """Of a `read_placements` answer."""
    _, plan_hash, pairings, reasons = answer
    reason_of = dict(zip(reasons[::2], reasons[1::2], strict=True))
    return PlacementPlan(
        plan_hash=_text(plan_hash),
        pairings=[
            Pairing(
                consumer_id=_text(name),
                producers=_text(producers).split(),
                reason=_text(reason_of.get(name)),
            )
            for name, producers in sorted(zip(pairings[::2], pairings[1::2], strict=True))
        ],
    )


def profiles(answer: Sequence[Any]) -> list[ModelProfile]:
    """Of a `read_profiles` answer, by model."""
    found = (ModelProfile.model_validate_json(text) for text in answer[1])
    return sorted(found, key=lambda profile: profile.model)


def summary(answer: Sequence[Any]) -> BooksSummary:
    """Of a `read_books` answer."""
    _, books_id, plan_hash, booked, counts, producers, consumers, open_reclaims = answer
    by_state = dict.fromkeys(LeaseState, 0)
    for state, count in zip(counts[::2], counts[1::2], strict=True):
        by_state[LeaseState(_text(state))] = int(count)
    by_state[LEASE.initial] = booked - sum(by_state.values())
    return BooksSummary(
        _text(books_id), _text(plan_hash), by_state, producers, consumers, open_reclaims
    )


def event(event_id: bytes, text: bytes) -> Event:
    """Of an entry of the event stream, see `emit` in `writes.lua`."""
    kind, producer_id, consumer_id, lease_id, state, size = text.decode().split(" ")
    return Event(
        event_id=event_id.decode(),
        at_s=int(event_id.partition(b"-")[0]) / 1e3,
        kind=EventKind(kind),
        producer_id=producer_id or None,
        consumer_id=consumer_id or None,
        lease_id=lease_id or None,
        state=LeaseState(state) if state else None,
        bytes=int(size) if size else None,
    )


def _notice(row: Sequence[Any]) -> LeaseNotice:
    return LeaseNotice(lease_id=_text(row[0]), epoch=row[1], reason=_text(row[2]) or "ended")


def _fields(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row by name; what is empty is None. Text becomes numbers in the wire model."""
    return {
        name: (value.decode() or None) if isinstance(value, bytes) else value
        for name, value in zip(names, row, strict=True)
    }


def _text(raw: bytes | None) -> str:
    return raw.decode() if raw else ""
