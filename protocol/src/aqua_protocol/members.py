"""What members tell the coordinator, and what it answers.

There is one message per role, the *report*, and it always carries the member's full state. A
member sends it when something changed and at least once per heartbeat; registration is the first
report. That one rule gives three properties at once: a lost report is repaired by the next, books
lost with Redis rebuild from whatever members say, and the coordinator never has to ask.

A report is ordered by `(incarnation, revision)`: a new incarnation starts afresh, within one the
higher revision wins and an older one is refused as stale.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from aqua_protocol.errors import ErrorBody
from aqua_protocol.ids import Name
from aqua_protocol.leases import Page, SlabBytes
from aqua_protocol.wire import (
    ByteCount,
    EpochField,
    Flag,
    Milliseconds,
    PositiveBytes,
    Proof,
    Rate,
    RevisionField,
    Seconds,
    TransportKind,
    VersionNumber,
    Wire,
)

# Leases in one report: 256 GiB in leases of a single 64 MiB slab, above any GPU. Doubled, so is the
# time that one report may hold Redis.
MAX_LEASES_PER_MEMBER = 4096
# Members that share one heartbeat: a process serves the GPUs of its node. Doubled, so is that too.
MAX_MEMBERS_PER_HEARTBEAT = 256
# Finished reclaims told in one report; later ones go with the next. Doubled, so is the body.
MAX_RECLAIMS_PER_REPORT = 32
MAX_SOCKET_PATH_BYTES = 107
"""Fixed by the kernel: `sockaddr_un.sun_path` holds 108 bytes including the final zero."""

ShortText = Annotated[str, Field(min_length=1, max_length=256)]


class MemberIdentity(Wire):
    """Who reports, from where, in which version."""

    incarnation: Name = Field(description="Random name of this life of the process.")
    revision: RevisionField = Field(description="Counts this incarnation's reports, from 0.")
    books_id: Name | None = Field(
        default=None, description="Life of the books that this member has confirmed; null at first."
    )
    protocol_version: VersionNumber = Field(description="Wire protocol of the member.")
    aqualib_version: ShortText
    node: Name = Field(description="Host the process runs on.")
    domain: Name = Field(description="Scale-up domain: members of one can share memory.")
    gpu_uuid: Name = Field(description="GPU by UUID, never by index.")
    pid: int = Field(ge=1, le=1 << 32, strict=True)
    model: Name | None = Field(default=None, description="What runs there, for people.")


class HeldLease(Wire):
    """A lease whose slabs a consumer may have mapped, as the producer sees it."""

    lease_id: Name
    epoch: EpochField
    consumer_id: Name
    held_bytes: PositiveBytes = Field(description="Slabs leased, reclaiming or quarantined.")
    reclaiming_bytes: ByteCount = Field(default=0, description="Part of held that is asked back.")
    consumer_lost: Flag = Field(
        default=False, description="The channel closed or the process died."
    )
    proof: Proof | None = Field(
        default=None, description="Of the grant, from its token. Lost books take no lease without."
    )

    @model_validator(mode="after")
    def _reclaiming_is_part_of_held(self) -> Self:
        if self.reclaiming_bytes > self.held_bytes:
            raise ValueError("reclaiming_bytes must not exceed held_bytes")
        return self


class ReclaimReport(Wire):
    """One reclaim as its producer measured it."""

    reclaim_id: Name
    requested_bytes: PositiveBytes
    returned_bytes: ByteCount
    deadline_s: Seconds
    age_s: Seconds = Field(description="Time since the reclaim began, by the producer's clock.")
    first_slab_ms: Milliseconds | None = Field(default=None, description="First slab back after.")
    total_ms: Milliseconds | None = Field(default=None, description="Last slab back after.")
    escalated: Flag = Field(default=False, description="The deadline passed; see the policy.")


class LoadReport(Wire):
    """The engine's own load, as far as it reports one."""

    queue_length: int = Field(ge=0, le=1 << 31, strict=True)
    memory_used_bytes: ByteCount
    memory_total_bytes: ByteCount
    requests_per_s: Rate | None = None


class ProducerReport(MemberIdentity):
    """Full state of a producer.

    `offered_bytes` covers every slab that exists under the offer: free, leased, reclaiming and
    quarantined. Free slabs taken back leave it at once, lent ones when they are back.
    """

    producer_id: Name
    endpoint: Annotated[str, Field(min_length=1, max_length=MAX_SOCKET_PATH_BYTES)] = Field(
        description="Unix socket of the lease channel."
    )
    transport: TransportKind
    slab_bytes: SlabBytes
    offered_bytes: ByteCount
    leases: Annotated[list[HeldLease], FailFast()] = Field(
        default_factory=list, max_length=MAX_LEASES_PER_MEMBER
    )
    reclaims: Annotated[list[ReclaimReport], FailFast()] = Field(
        default_factory=list, max_length=MAX_RECLAIMS_PER_REPORT
    )
    load: LoadReport | None = None

    @model_validator(mode="after")
    def _sizes_are_whole_slabs(self) -> Self:
        sizes = [self.offered_bytes, *(lease.held_bytes for lease in self.leases)]
        if any(size % self.slab_bytes for size in sizes):
            raise ValueError("offered_bytes and held_bytes must be multiples of slab_bytes")
        if sum(lease.held_bytes for lease in self.leases) > self.offered_bytes:
            raise ValueError("held bytes must not exceed offered_bytes")
        if len({lease.lease_id for lease in self.leases}) != len(self.leases):
            raise ValueError("a lease may appear only once")
        return self


class UsedLease(Wire):
    """A lease a consumer holds and wants to keep."""

    lease_id: Name
    epoch: EpochField
    mapped_bytes: ByteCount
    link_bytes_per_s: Rate | None = Field(default=None, description="Measured at connect.")


class ConsumerReport(MemberIdentity):
    """Full state of a consumer; every lease it names is renewed."""

    consumer_id: Name
    leases: Annotated[list[UsedLease], FailFast()] = Field(
        default_factory=list, max_length=MAX_LEASES_PER_MEMBER
    )
    wanted_bytes: ByteCount = Field(default=0, description="Peer memory it would take now.")
    spilled_bytes: ByteCount = Field(default=0, description="Bytes in host memory for want of it.")


class LeaseNotice(Wire):
    """A lease whose right has ended, told to a member that still names it."""

    lease_id: Name
    epoch: EpochField = Field(
        description="Fences the lease: the end, and every epoch of it up to this one."
    )
    reason: ShortText


class ReclaimOrder(Wire):
    """An operator's wish that a producer takes memory back; the producer carries it out."""

    reclaim_id: Name
    bytes: PositiveBytes
    deadline_s: Seconds


class MemberAck(Wire):
    """The answer to any report."""

    books_id: Name = Field(description="Life of the books; echo it in the next report.")
    heartbeat_s: Seconds = Field(description="Report again within this time.")
    ended: list[LeaseNotice] = Field(default_factory=list)


class ProducerAck(MemberAck):
    """The answer to a producer's report.

    A producer whose report named other books, or none, is booked but not granted from until its
    next report echoes `books_id`: by then it refuses tokens below `min_epoch`, so no token of the
    lost books can compete with a new grant.
    """

    min_epoch: EpochField = Field(description="Refuse tokens of older epochs.")
    capability_key: str = Field(
        description="Base64 of the key that checks tokens for this producer, or of two, one after "
        "the other, while the coordinator's secret is being replaced.",
        repr=False,
    )
    grantable: bool
    reclaims: list[ReclaimOrder] = Field(default_factory=list)


class ConsumerAck(MemberAck):
    """The answer to a consumer's report."""

    available_bytes: ByteCount = Field(description="What a lease could get now, at most.")


class Heartbeat(Wire):
    """Reports of many members in one call, for a node agent that speaks for its engines."""

    producers: Annotated[list[ProducerReport], FailFast()] = Field(
        default_factory=list, max_length=MAX_MEMBERS_PER_HEARTBEAT
    )
    consumers: Annotated[list[ConsumerReport], FailFast()] = Field(
        default_factory=list, max_length=MAX_MEMBERS_PER_HEARTBEAT
    )


class HeartbeatAck(Wire):
    """Answers in the order of the reports; one bad report does not spoil the others."""

    producers: list[ProducerAck | ErrorBody]
    consumers: list[ConsumerAck | ErrorBody]


class ProducerView(Wire):
    """A producer as the books have it."""

    producer_id: Name
    node: Name
    domain: Name
    gpu_uuid: Name
    model: Name | None
    endpoint: str
    transport: TransportKind
    slab_bytes: int
    offered_bytes: int
    leased_bytes: int
    free_bytes: int
    grantable: bool
    silent_s: float = Field(description="Time since the last report.")


class ConsumerView(Wire):
    """A consumer as the books have it."""

    consumer_id: Name
    node: Name
    domain: Name
    gpu_uuid: Name
    model: Name | None
    leased_bytes: int
    wanted_bytes: int
    spilled_bytes: int
    silent_s: float = Field(description="Time since the last report.")


class OfferUpdate(Wire):
    """A change of a producer's offer without a full report; ordered by the same revision."""

    incarnation: Name
    revision: RevisionField
    offered_bytes: ByteCount


class OfferView(Wire):
    """Bytes a producer volunteers: free + leased == offered, always."""

    producer_id: Name
    domain: Name
    offered_bytes: int
    leased_bytes: int
    free_bytes: int
    grantable: bool


class ProducerPage(Page):
    """A page of producers."""

    producers: list[ProducerView]


class ConsumerPage(Page):
    """A page of consumers."""

    consumers: list[ConsumerView]


class OfferPage(Page):
    """A page of offers."""

    offers: list[OfferView]
