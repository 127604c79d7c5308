"""The handshake: from a grant on paper to slabs in this process's address space.

What is checked before the token is sent: producer and socket are of users that may hold this
consumer's pages. Before a slab is used: the producer speaks our protocol, says that it is who the
coordinator named, lends under the lease and epoch that we hold, by our transport and in our slab
size, no slab twice, and each descriptor is what the transport says a slab is.

A handshake that fails here, for want of address space say, is finished politely: every slab on its
way is declined, or the producer would have to lock it away for as long as this process lives.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from aqua_protocol import (
    PROTOCOL_VERSION,
    ConfigError,
    ProtocolError,
    TransportError,
    require_protocol_version,
)
from aqua_protocol.channel import (
    PACED,
    PRODUCER_MESSAGES,
    Hello,
    ProducerMessage,
    Refused,
    SlabHandle,
    Slabs,
    Welcome,
)
from aqua_protocol.errors import error_from_body
from aqualib.channel import Channel, ChannelClosedError, DescriptorsLostError, connect
from aqualib.leasing.attachment import Attachment
from aqualib.memory.frame import PeerSlab
from aqualib.transports.base import Handle
from aqualib.version import AQUALIB_VERSION

if TYPE_CHECKING:
    from aqua_client.tracing import Tracer
    from aqua_protocol.leases import LeaseGrant
    from aqualib.transports.base import Transport

HANDSHAKE_TIMEOUT_S: Final = 30.0
"""Seconds for all of it. The producer makes slabs of other tenants anew before it hands them out,
which can take a second for 4 GiB. Doubled, a producer that hangs keeps the leasing thread for a
minute."""


def attach(
    grant: LeaseGrant,
    *,
    consumer_id: str,
    transport: Transport,
    slab_bytes: int,
    allowed_uids: Iterable[int] | None = None,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    tracer: Tracer | None = None,
) -> Attachment:
    """Connect to the producer, prove the lease and map its slabs.

    The result is not listened to yet, and its slabs belong to no frame. `consumer_id` is the name
    that the lease was granted to, `slab_bytes` the size of this store's frames, and
    `allowed_uids` are whose producers are trusted, beside those of this process's user and root.
    With a `tracer` the producer is told of this side's span; one of the version before refuses
    that, and is greeted once more without.

    Raises:
        ConfigError: The producer's transport, slab size or socket directory is not fit for us.
        UntrustedPeerError: Its process or its socket is of a user that is not trusted.
        CapabilityError: The producer refuses the token.
        VersionMismatchError: It speaks another protocol.
        SocketPathTooLongError: The endpoint does not fit into a Unix address.
        TransportError: It cannot be reached, or its slabs cannot be mapped here.
        ProtocolError: It does not keep to the protocol.
    """
    _require_ours(grant, transport, slab_bytes)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        aqualib_version=AQUALIB_VERSION + PACED,
        consumer_id=consumer_id,
        token=grant.token,
    )
    begin = partial(_attach, grant, transport, allowed_uids, timeout_s, tracer)
    if tracer is None:
        return begin(hello)
    lease = grant.lease
    named: dict[str, str | int] = {
        "aqua.lease.id": lease.lease_id,
        "aqua.producer.id": lease.producer_id,
        "aqua.bytes": lease.bytes,
    }
    with tracer.span("attach", kind="client", attributes=named) as span:
        try:
            traced = hello.model_copy(update={"traceparent": tracer.traceparent_of(span)})
            attachment = begin(traced)
        except _HelloRefusedError:
            attachment = begin(hello)
    attachment.trace = span
    return attachment


class _HelloRefusedError(ProtocolError):
    """The producer did not understand the greeting."""


def _attach(
    grant: LeaseGrant,
    transport: Transport,
    allowed_uids: Iterable[int] | None,
    timeout_s: float,
    tracer: Tracer | None,
    hello: Hello,
) -> Attachment:
    sock = connect(Path(grant.endpoint), allowed_uids=allowed_uids, timeout_s=timeout_s)
    channel = Channel(sock, PRODUCER_MESSAGES)
    try:
        attachment = Attachment(grant, channel, allowed_uids=allowed_uids, tracer=tracer)
    except BaseException:
        channel.close()
        raise
    incoming = _Incoming(channel, grant.lease.producer_id, time.monotonic() + timeout_s)
    try:
        with suppress(ChannelClosedError):  # One that refused at once has said why: it is read.
            channel.send(hello)
        try:
            welcome = incoming.welcome()
        except ProtocolError as refusal:
            if hello.traceparent is not None and type(refusal) is ProtocolError:
                raise _HelloRefusedError(refusal.message) from refusal
            raise
        _check_welcome(welcome, grant)
        _map_slabs(incoming.slabs(welcome.slab_count), attachment, transport)
    except BaseException:
        for slab in attachment.slabs:
            slab.memory.close()
            attachment.take_back(slab)
        attachment.disconnect()
        raise
    return attachment


class _Incoming:
    """The producer's half of the handshake, bounded in time."""

    def __init__(
        self, channel: Channel[ProducerMessage], producer_id: str, deadline_s: float
    ) -> None:
        self._channel = channel
        self._producer_id = producer_id
        self._deadline_s = deadline_s

    def welcome(self) -> Welcome:
        message, fds = self._next()
        _close_all(fds)
        if not isinstance(message, Welcome):
            raise ProtocolError(f"{self._producer_id} sent {message.type} before its welcome")
        return message

    def slabs(self, count: int) -> Iterator[tuple[SlabHandle, int | None]]:
        """`count` handles with their descriptors, which are the receiver's from then on."""
        seen: set[int] = set()
        is_last = False
        while not is_last:
            try:
                message, fds = self._next()
                is_whole = True
            except DescriptorsLostError as error:  # Then none of its slabs can be opened.
                message, fds, is_whole = cast("ProducerMessage", error.said), [], False
            try:
                if not isinstance(message, Slabs):
                    raise self._fault(f"sent {message.type} instead of slabs")
                if is_whole and sum(handle.fd_count for handle in message.slabs) != len(fds):
                    raise self._fault("sent slabs without their descriptors")
                expected = len(seen) + len(message.slabs)
                seen.update(handle.slab_id for handle in message.slabs)
                if len(seen) != expected:
                    raise self._fault("lent a slab twice")
                if len(seen) > count or (message.last and len(seen) < count):
                    raise self._fault(f"announced {count} slabs, not {len(seen)}")
            except ProtocolError:
                _close_all(fds)
                raise
            for handle in message.slabs:
                yield handle, fds.pop(0) if handle.fd_count and is_whole else None
            is_last = message.last

    def _next(self) -> tuple[ProducerMessage, list[int]]:
        if not self._channel.wait(max(self._deadline_s - time.monotonic(), 0.0)):
            raise ChannelClosedError(
                f"{self._producer_id} accepted the connection and does not answer",
                remedy="Look at the producer process: it is stopped or overloaded.",
            )
        message, fds = self._channel.receive()
        if isinstance(message, Refused):
            _close_all(fds)
            raise error_from_body(message.error)
        return message, fds

    def _fault(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._producer_id} {what}")


def _map_slabs(
    lent: Iterator[tuple[SlabHandle, int | None]], attachment: Attachment, transport: Transport
) -> None:
    failure: Exception | None = None
    for handle, fd in lent:
        if failure is None:
            try:
                attachment.note_lent(_open(handle, fd, attachment, transport))
                continue
            except Exception as error:  # noqa: BLE001 - raised below, when all are declined
                failure = error
        elif fd is not None:
            os.close(fd)
        attachment.decline(handle)
    if failure is not None:
        raise failure


def _open(
    handle: SlabHandle, fd: int | None, attachment: Attachment, transport: Transport
) -> PeerSlab:
    if handle.fd_count and fd is None:
        raise TransportError(
            f"no descriptor is left for a slab of {attachment.producer_id}",
            remedy="Raise the limit of open files of this process (ulimit -n).",
        )
    try:
        payload = base64.b64decode(handle.payload, validate=True)
    except ValueError as error:  # Of other than ASCII it is no `binascii.Error`.
        if fd is not None:
            os.close(fd)
        raise ProtocolError(f"{attachment.producer_id} sent a malformed slab handle") from error
    memory = transport.open(Handle(payload=payload, fd=fd), attachment.slab_bytes)
    return PeerSlab(handle.slab_id, handle.generation, memory, attachment)


def _require_ours(grant: LeaseGrant, transport: Transport, slab_bytes: int) -> None:
    producer_id = grant.lease.producer_id
    if grant.transport is not transport.kind:
        raise ConfigError(
            f"{producer_id} lends by {grant.transport}, this process pages by {transport.kind}",
            remedy="Give producers and consumers of one domain the same transport.",
        )
    if grant.slab_bytes != slab_bytes:
        raise ConfigError(
            f"{producer_id} lends slabs of {grant.slab_bytes} bytes, this store is made of frames "
            f"of {slab_bytes}",
            remedy="Give producers and consumers of one domain the same slab size.",
        )


def _check_welcome(welcome: Welcome, grant: LeaseGrant) -> None:
    lease = grant.lease
    require_protocol_version(welcome.protocol_version, who=lease.producer_id)
    if welcome.slab_count * welcome.slab_bytes > lease.bytes:
        raise ProtocolError(
            f"{lease.producer_id} lends {welcome.slab_count} slabs, more than was granted"
        )
    granted = (lease.producer_id, lease.lease_id, lease.epoch, grant.transport, grant.slab_bytes)
    said = (
        welcome.producer_id,
        welcome.lease_id,
        welcome.epoch,
        welcome.transport,
        welcome.slab_bytes,
    )
    if said != granted:
        raise ProtocolError(
            f"{grant.endpoint} welcomes under {said}, the coordinator granted {granted}",
            remedy="The producer has changed meanwhile; ask for a new lease.",
        )


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
