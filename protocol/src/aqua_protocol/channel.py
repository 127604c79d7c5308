"""The lease channel: what a producer and one of its consumers say to each other.

One SOCK_SEQPACKET Unix connection carries one lease. Every packet is one JSON message below;
file descriptors ride along as SCM_RIGHTS with the `Slabs` packet that names them.

    consumer                              producer
       | -- (connects) ---------------------> |  each checks the other's user (SO_PEERCRED)
       | -- Hello(token) -------------------> |  token, protocol version
       | <------------------ Welcome ---------|  or Refused(error)
       | <------------------ Slabs + fds -----|  repeated until `last`
       |  ... pages in and out, alone ...     |
       | <------------------ Pace ------------|  how fast to copy, for a while; answered by Pong
       | <------------------ Reclaim ---------|  slabs asked back, with a deadline
       | -- Released(slab, generation) -----> |  one per slab, as soon as it is unmapped
       | -- Goodbye ------------------------> |  everything released; closes

A consumer that traces names its span in `Hello`. Producers of the version before know no such field
and refuse it: then the consumer says `Hello` once more without.

A consumer whose channel is lost although both live drains what it has mapped, and says `Released`
over another connection, as the first word there: the kernel tells the producer that it is the same
process. A producer of the version before refuses that, and waits for the end of the process.

Time on the channel is relative (`deadline_s` counts from receipt), since two processes need not
agree on a clock. A closed channel is not a return: see `aqua_protocol.slab`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from aqua_protocol.errors import ErrorBody
from aqua_protocol.ids import MAX_EPOCH, Name
from aqua_protocol.wire import (
    EpochField,
    Flag,
    PositiveBytes,
    Rate,
    Seconds,
    TraceParent,
    TransportKind,
    VersionNumber,
    Wire,
)

MAX_PACKET_BYTES: Final = 64 * 1024
"""Below the default `net.core.wmem_max` of 212,992 bytes, so that a packet is never refused.
Doubled, it still fits; four times as much would not."""

MAX_SLABS_PER_PACKET: Final = 64
"""Far below the kernel's 253 descriptors a message, and the JSON stays within a packet.
Doubled, attaching 8 GiB takes one packet where it takes two."""

PACED: Final = "+paced"
"""End of the `aqualib_version` of a consumer that knows `Pace`. Only those are told: a consumer of
0.1.0 ends its lease over a message that it does not know, and a producer of 0.1.0 refuses a `Hello`
with a field that it does not know."""

SlabNumber = Annotated[int, Field(ge=0, le=MAX_EPOCH, strict=True)]
GenerationNumber = Annotated[int, Field(ge=1, le=MAX_EPOCH, strict=True)]
Deadline = Annotated[float, Field(gt=0, le=600, strict=True)]


class SlabRef(Wire):
    """A slab at one generation."""

    slab_id: SlabNumber
    generation: GenerationNumber


class SlabHandle(SlabRef):
    """A slab as handed out: how to open it."""

    payload: Annotated[str, Field(max_length=512)] = Field(
        default="", description="Transport-specific, base64; empty when a descriptor says all."
    )
    fd_count: Annotated[int, Field(ge=0, le=1, strict=True)] = Field(
        description="Descriptors of this packet that belong to the slab, in order."
    )


class Hello(Wire):
    """The consumer proves itself."""

    type: Literal["hello"] = "hello"
    protocol_version: VersionNumber
    aqualib_version: Annotated[str, Field(max_length=64)]
    consumer_id: Name
    token: Annotated[str, Field(max_length=4096, repr=False)]
    traceparent: TraceParent | None = None


class Welcome(Wire):
    """The producer accepts; slabs follow."""

    type: Literal["welcome"] = "welcome"
    protocol_version: VersionNumber
    producer_id: Name
    lease_id: Name
    epoch: EpochField
    transport: TransportKind
    slab_bytes: PositiveBytes
    slab_count: Annotated[int, Field(ge=1, le=1 << 24, strict=True)] = Field(
        description="Slabs that follow; fewer than the lease when memory ran short meanwhile."
    )


class Slabs(Wire):
    """Slabs handed out, their descriptors with them."""

    type: Literal["slabs"] = "slabs"
    slabs: list[SlabHandle] = Field(min_length=1, max_length=MAX_SLABS_PER_PACKET)
    last: Flag


class Reclaim(Wire):
    """The producer wants slabs back, in this order."""

    type: Literal["reclaim"] = "reclaim"
    reclaim_id: Name
    slabs: list[SlabRef] = Field(min_length=1, max_length=MAX_SLABS_PER_PACKET)
    deadline_s: Deadline


class Pace(Wire):
    """How fast this consumer may copy to and from the producer's memory.

    Only copies that no request waits for are held back.
    """

    type: Literal["pace"] = "pace"
    bytes_per_s: Rate = Field(description="Of all copies together; 0 holds back what can wait.")
    lasts_s: Seconds = Field(description="How long it holds, from receipt; unlimited after that.")


class Released(Wire):
    """A slab is unmapped here and may be reused there."""

    type: Literal["released"] = "released"
    slab_id: SlabNumber
    generation: GenerationNumber


class Ping(Wire):
    """Asks for a `Pong` with the same number: liveness and round-trip time."""

    type: Literal["ping"] = "ping"
    number: SlabNumber


class Pong(Wire):
    """Answers a `Ping`."""

    type: Literal["pong"] = "pong"
    number: SlabNumber


class Refused(Wire):
    """The producer refuses; it closes the channel afterwards."""

    type: Literal["refused"] = "refused"
    error: ErrorBody


class Goodbye(Wire):
    """A clean end: the sender holds nothing of the other any more."""

    type: Literal["goodbye"] = "goodbye"


ConsumerMessage = Annotated[Hello | Released | Ping | Pong | Goodbye, Field(discriminator="type")]
ProducerMessage = Annotated[
    Welcome | Slabs | Reclaim | Pace | Ping | Pong | Refused | Goodbye, Field(discriminator="type")
]

CONSUMER_MESSAGES: Final[TypeAdapter[ConsumerMessage]] = TypeAdapter(ConsumerMessage)
"""Parses what a producer receives."""
PRODUCER_MESSAGES: Final[TypeAdapter[ProducerMessage]] = TypeAdapter(ProducerMessage)
"""Parses what a consumer receives."""
