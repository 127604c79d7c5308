"""Wire messages about leases, reclaims, placements and events."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from aqua_protocol.ids import Name
from aqua_protocol.lease import LeaseState
from aqua_protocol.units import MIN_SLAB_BYTES
from aqua_protocol.wire import ByteCount, EpochField, PositiveBytes, Seconds, TransportKind, Wire

# A plan of the largest cluster that the placer is measured on, one pairing a GPU. Doubled, one
# request may take 8 MB and block Redis for twice the time.
MAX_PAIRINGS = 65_536
# Producers that a consumer prefers, best first: a scale-up domain has at most 72 GPUs. Doubled,
# matching tries twice as many before it gives up.
MAX_PRODUCERS_PER_PAIRING = 64

SlabBytes = Annotated[int, Field(ge=MIN_SLAB_BYTES, le=1 << 40, strict=True)]
TtlSeconds = Annotated[float, Field(ge=1, le=3600, strict=True)]
DeadlineSeconds = Annotated[float, Field(gt=0, le=600, strict=True)]


class LeaseRequest(Wire):
    """Ask for peer memory.

    One lease is one producer. The books grant `bytes` rounded up to whole slabs when a producer
    has them; otherwise the most one has, if that is at least `min_bytes` (by default all or
    nothing). `transport`, `slab_bytes`, `node` and `exclude` are terms that the producer must meet.
    """

    consumer_id: Name
    bytes: PositiveBytes
    min_bytes: PositiveBytes | None = None
    ttl_s: TtlSeconds = 30.0
    transport: TransportKind | None = Field(default=None, description="Only by this one.")
    slab_bytes: SlabBytes | None = Field(default=None, description="Only slabs of this size.")
    node: Name | None = Field(default=None, description="Only of a producer on this host.")
    exclude: list[Name] | None = Field(
        default=None, max_length=MAX_PRODUCERS_PER_PAIRING, description="Not of these producers."
    )

    @model_validator(mode="after")
    def _min_is_not_above_bytes(self) -> Self:
        if self.min_bytes is not None and self.min_bytes > self.bytes:
            raise ValueError("min_bytes must not exceed bytes")
        return self


class LeaseView(Wire):
    """A lease as the books have it."""

    lease_id: Name
    epoch: EpochField
    state: LeaseState
    producer_id: Name
    consumer_id: Name
    bytes: ByteCount = Field(description="Bytes booked now.")
    expires_in_s: float = Field(description="Until it expires unless renewed.")


class LeaseGrant(Wire):
    """A fresh lease and everything needed to attach to its producer."""

    lease: LeaseView
    token: str = Field(
        description="Capability for the producer's lease channel; a secret.", repr=False
    )
    endpoint: str = Field(description="Unix socket of the producer's lease channel.")
    transport: TransportKind
    slab_bytes: int


class LeaseAction(Wire):
    """Renew, release or revoke under the epoch that the caller knows."""

    epoch: EpochField


class AttachFailure(StrEnum):
    """Why a consumer gives up a lease that it has not come to use."""

    UNREACHABLE = "unreachable"
    """Nothing answers at the producer's endpoint."""
    UNUSABLE = "unusable"
    """The producer answers, but its memory cannot be used by this consumer."""


class LeaseRelease(LeaseAction):
    """Give up a lease; `failure` says why it was not attached, and grants avoid its producer."""

    failure: AttachFailure | None = None


class LeaseRenewal(LeaseAction):
    """Renew one lease, outside of a report."""

    ttl_s: TtlSeconds = 30.0


class ReclaimRequest(Wire):
    """An operator asks a producer to take memory back from its consumers.

    A producer under load needs no permission: it reclaims first and reports afterwards.
    """

    producer_id: Name
    bytes: PositiveBytes
    deadline_s: DeadlineSeconds = 5.0


class ReclaimOrigin(StrEnum):
    """Who wanted the memory back."""

    PRODUCER = "producer"
    OPERATOR = "operator"


class ReclaimView(Wire):
    """A reclaim as the books have it."""

    reclaim_id: Name
    producer_id: Name
    origin: ReclaimOrigin
    requested_bytes: int
    returned_bytes: int
    deadline_s: float
    done: bool
    escalated: bool
    first_slab_ms: float | None
    total_ms: float | None


class ReclaimOutcome(StrEnum):
    """How a reclaim ended."""

    RETURNED = "returned"
    ESCALATED = "escalated"
    """All is back, after the deadline."""
    DROPPED = "dropped"
    """Its producer has stopped naming it."""
    PRODUCER_LOST = "producer_lost"
    """Its producer is gone."""


class EndedReclaim(ReclaimView):
    """A reclaim at its end."""

    outcome: ReclaimOutcome


class Pairing(Wire):
    """The placer's answer for one consumer: these producers, best first, and no others."""

    consumer_id: Name
    producers: list[Name] = Field(min_length=1, max_length=MAX_PRODUCERS_PER_PAIRING)
    reason: str = Field(default="", max_length=512)

    @model_validator(mode="after")
    def _producers_are_distinct(self) -> Self:
        if len(set(self.producers)) != len(self.producers):
            raise ValueError("a producer may appear only once in a pairing")
        return self


class PlacementPlan(Wire):
    """A whole set of pairings; replaces the one before. An empty list frees every consumer."""

    plan_hash: Annotated[str, Field(max_length=128)] = ""
    pairings: Annotated[list[Pairing], FailFast()] = Field(max_length=MAX_PAIRINGS)

    @model_validator(mode="after")
    def _consumers_are_distinct(self) -> Self:
        names = [pairing.consumer_id for pairing in self.pairings]
        if len(set(names)) != len(names):
            raise ValueError("a consumer may appear only once in a plan")
        return self


class PlacementPage(PlacementPlan):
    """A part of a plan; the whole of one without a cursor."""

    next_cursor: Name | None = Field(default=None, description="The next page begins after it.")


class EventKind(StrEnum):
    """What the event stream tells."""

    PRODUCER_JOINED = "producer_joined"
    PRODUCER_LOST = "producer_lost"
    CONSUMER_JOINED = "consumer_joined"
    CONSUMER_LOST = "consumer_lost"
    OFFER_CHANGED = "offer_changed"
    LEASE_CHANGED = "lease_changed"
    RECLAIM_OPENED = "reclaim_opened"
    RECLAIM_CLOSED = "reclaim_closed"
    PLACEMENT_CHANGED = "placement_changed"
    BOOKS_CREATED = "books_created"


class Event(Wire):
    """One entry of the event stream."""

    event_id: str = Field(description="Position; send it as Last-Event-ID to go on from there.")
    at_s: Annotated[float, Field(ge=0)] = Field(description="Unix time by Redis, in seconds.")
    kind: EventKind
    producer_id: Name | None = None
    consumer_id: Name | None = None
    lease_id: Name | None = None
    state: LeaseState | None = None
    bytes: ByteCount | None = None
    reclaim: EndedReclaim | None = Field(default=None, description="That was closed.")


class Health(Wire):
    """Liveness and readiness; what has its default is left out of an answer to `/readyz`."""

    status: str
    version: str
    books_id: str | None = None
    uptime_s: float = 0.0
    heartbeat_s: Seconds = Field(
        default=1.0, description="How often each member is asked to report, at least."
    )


class Page(Wire):
    """Where a listing goes on."""

    next_cursor: str | None = Field(default=None, description="Pass as `cursor`; null at the end.")


class LeasePage(Page):
    """A page of leases."""

    leases: list[LeaseView]


class ReclaimPage(Page):
    """A page of reclaims."""

    reclaims: list[ReclaimView]


class QuotaView(Wire):
    """What a tenant may have on lease, and has; null where there is no limit."""

    tenant: Name
    cohort: Name | None
    nominal_bytes: int | None = Field(description="Its own.")
    borrowing_limit_bytes: int | None = Field(description="Beyond its own, from its cohort.")
    lending_limit_bytes: int | None = Field(description="Of its own, to its cohort.")
    consumer_limit_bytes: int | None = Field(description="Of each of its consumers.")
    leased_bytes: int
    available_bytes: int | None = Field(description="What it could lease now, memory permitting.")
    borrowed_bytes: int = Field(default=0, description="On lease beyond its own.")


class QuotaPage(Page):
    """A page of quotas."""

    quotas: list[QuotaView]


class QuarantinedRecord(Wire):
    """What was in the books and could not be right, or disagreed with the rest."""

    position: str = Field(description="In the quarantine.")
    at_s: Annotated[float, Field(ge=0)] = Field(description="Unix time by Redis, in seconds.")
    key: str = Field(description="Where in Redis it was.")
    reason: str
    record: str = Field(description="The beginning of what was there, if it was text.")


class QuarantinePage(Page):
    """A page of the quarantine."""

    records: list[QuarantinedRecord]
