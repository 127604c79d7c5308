"""A consumer that speaks the lease channel by hand, without the consumer library.

`RawConsumer` does one thing per call, in any order, also orders that no decent consumer would
choose; that is what it is for. `ConsumerProcess` runs one in a process of its own, which can be
killed or frozen between two calls. It maps memfd slabs with `mmap` and imports no torch, so a
process starts in a fraction of a second. `connection_of_another_process` starts in a
tenth of that: only the connection is of the other process, and the test itself speaks on it.

`TokenIssuer` stands in for the coordinator's part of an attach: the key that a producer trusts, and
tokens under it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from aqua_protocol import PROTOCOL_VERSION, ErrorBody, capability
from aqua_protocol.channel import (
    PRODUCER_MESSAGES,
    Goodbye,
    Hello,
    Ping,
    Pong,
    ProducerMessage,
    Reclaim,
    Refused,
    Released,
    Slabs,
    Welcome,
)
from aqua_protocol.members import LeaseNotice, ProducerAck, ReclaimOrder
from aqualib.channel import Channel, ChannelClosedError, connect
from harness.bounds import HANG_S
from harness.program import Program, say


class TokenIssuer:
    """Makes tokens that one producer accepts.

    Args:
        producer_id: The producer.
    """

    def __init__(self, producer_id: str = "producer") -> None:
        self.key: Final = os.urandom(32)
        self._producer_id = producer_id
        self._epochs = itertools.count(100)

    def ack(
        self,
        *,
        min_epoch: int = 1,
        ended: list[LeaseNotice] | None = None,
        reclaims: list[ReclaimOrder] | None = None,
    ) -> ProducerAck:
        """The coordinator's answer that makes a producer trust this issuer."""
        return ProducerAck(
            books_id="books",
            heartbeat_s=1.0,
            min_epoch=min_epoch,
            capability_key=base64.b64encode(self.key).decode(),
            grantable=True,
            ended=ended or [],
            reclaims=reclaims or [],
        )

    def token(
        self,
        nbytes: int,
        *,
        consumer_id: str = "consumer",
        epoch: int | None = None,
        lease_id: str | None = None,
        valid_s: float = 600.0,
    ) -> str:
        """A token for a new lease."""
        number = next(self._epochs) if epoch is None else epoch
        claims = capability.Claims(
            lease_id=lease_id or f"lease-{number}",
            epoch=number,
            producer_id=self._producer_id,
            consumer_id=consumer_id,
            bytes=nbytes,
            not_after_s=time.time() + valid_s,
        )
        return capability.sign(claims, self.key)


class RefusedError(Exception):
    """The producer refused; carries its error."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(f"{body.code}: {body.message}")
        self.body = body


def send_bytes(channel: Channel[Any], packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send a packet that need not be a message; raises `OSError` when the channel is closed."""
    with socket.socket(fileno=os.dup(channel.fileno())) as sock:
        if fds:
            socket.send_fds(sock, [packet], fds)
        else:
            sock.send(packet)


class RawConsumer:
    """One connection to a producer, driven by hand.

    Args:
        producer: Endpoint to connect to, or a socket that is connected.
    """

    def __init__(self, producer: str | Path | socket.socket) -> None:
        sock = producer if isinstance(producer, socket.socket) else connect(Path(producer))
        self.channel: Channel[ProducerMessage] = Channel(sock, PRODUCER_MESSAGES)
        self.slabs: dict[int, mmap.mmap] = {}
        self.generations: dict[int, int] = {}
        self._kept: list[Reclaim] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel and every mapping."""
        self.channel.close()
        for slab_id in list(self.slabs):
            self.unmap(slab_id)

    def hello(
        self, token: str, consumer_id: str = "consumer", version: int = PROTOCOL_VERSION
    ) -> None:
        """Say Hello, and read nothing."""
        self.channel.send(
            Hello(
                protocol_version=version,
                aqualib_version="raw",
                consumer_id=consumer_id,
                token=token,
            )
        )

    def receive(self) -> tuple[ProducerMessage, list[int]]:
        """The next packet, within a bound; a refusal raises."""
        if not self.readable(HANG_S):
            raise TimeoutError(f"the producer said nothing for {HANG_S} s")
        message, fds = self.channel.receive()
        if isinstance(message, Refused):
            raise RefusedError(message.error)
        return message, fds

    def refusal_code(self) -> str:
        """The code of the refusal that has to come next, with a remedy."""
        try:
            told = self.receive()
        except RefusedError as refusal:
            body = refusal.body
        else:
            raise AssertionError(f"no refusal came, but {told}")
        assert body.remedy
        return body.code

    def readable(self, timeout_s: float = 0.0) -> bool:
        """Whether a packet, or the end of the channel, is there."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def take(self) -> list[int]:
        """Receive the Welcome and every slab, map them; returns slab ids in order."""
        welcome, _ = self.receive()
        assert isinstance(welcome, Welcome), welcome
        taken: list[int] = []
        while True:
            packet, fds = self.receive()
            if isinstance(packet, Reclaim):
                self._kept.append(packet)
                continue
            assert isinstance(packet, Slabs), packet
            for handle, fd in zip(packet.slabs, fds, strict=True):
                self.slabs[handle.slab_id] = mmap.mmap(fd, welcome.slab_bytes)
                self.generations[handle.slab_id] = handle.generation
                os.close(fd)
                taken.append(handle.slab_id)
            if packet.last:
                assert len(taken) == welcome.slab_count, (taken, welcome)
                return taken

    def attach(self, token: str, consumer_id: str = "consumer") -> list[int]:
        """Hello and take."""
        self.hello(token, consumer_id)
        return self.take()

    def await_reclaim(self) -> list[int]:
        """Wait for the next Reclaim packet; returns the slab ids asked for, in order."""
        packet = self._kept.pop(0) if self._kept else self.receive()[0]
        assert isinstance(packet, Reclaim), packet
        for ref in packet.slabs:
            assert self.generations.get(ref.slab_id) == ref.generation, ref
        return [ref.slab_id for ref in packet.slabs]

    def unmap(self, slab_id: int) -> None:
        """Unmap one slab, and say nothing."""
        self.slabs.pop(slab_id).close()

    def released(self, slab_id: int, generation: int | None = None) -> None:
        """Say Released, whether it is true or not."""
        number = self.generations[slab_id] if generation is None else generation
        self.channel.send(Released(slab_id=slab_id, generation=number))

    def give_back(self, slab_id: int) -> None:
        """Unmap one slab and say so."""
        self.unmap(slab_id)
        self.released(slab_id)

    def ping(self, number: int) -> int:
        """One round trip."""
        self.channel.send(Ping(number=number))
        pong, _ = self.receive()
        assert isinstance(pong, Pong), pong
        return pong.number

    def goodbye(self) -> None:
        """Say Goodbye."""
        self.channel.send(Goodbye())

    def await_end(self) -> str:
        """Read until the producer says Goodbye or the channel ends; returns the last type."""
        last = "nothing"
        while last != "goodbye":
            try:
                last = self.receive()[0].type
            except ChannelClosedError:
                break
        return last

    def fill(self, slab_id: int, value: int) -> None:
        """Write one value to every byte of a slab."""
        self.slabs[slab_id][:] = bytes([value]) * len(self.slabs[slab_id])

    def values(self, slab_id: int) -> list[int]:
        """The distinct byte values in a slab."""
        return sorted(set(self.slabs[slab_id][:]))

    def hang_up(self) -> None:
        """Close the channel and keep the mappings."""
        self.channel.close()


class ConsumerProcess(Program):
    """A `RawConsumer` in a process of its own; `call` runs a method of it there.

    Args:
        endpoint: Of the producer; the process connects at once.
    """

    def __init__(self, endpoint: str | Path) -> None:
        super().__init__(_serve, str(endpoint), within_s=HANG_S)
        assert self.answer() == "connected"


CONNECTING: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, socket.socket(fileno=0) as test:
    peer.connect(sys.argv[1])
    socket.send_fds(test, [b"connected"], [peer.fileno()])
    peer.close()
    test.recv(1)
"""


@contextlib.contextmanager
def connection_of_another_process(
    endpoint: str | Path,
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A socket that another process has connected to a producer, and that process, to be killed.

    The producer takes what is sent on the socket for words of that process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [sys.executable, "-I", "-S", "-c", CONNECTING, str(endpoint)]
    with ours, subprocess.Popen(arguments, stdin=theirs.fileno()) as process:
        theirs.close()
        ours.settimeout(HANG_S)
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
        try:
            yield socket.socket(fileno=fd), process
        finally:
            process.kill()


def _serve(endpoint: str) -> None:
    consumer = RawConsumer(endpoint)
    say("connected")
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        say(getattr(consumer, verb)(*arguments))
