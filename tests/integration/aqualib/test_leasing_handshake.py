"""A consumer and a producer that does not keep to the protocol, played by hand."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from aqua_protocol import (
    PROTOCOL_VERSION,
    AquaError,
    CapacityError,
    ProtocolError,
    TransportError,
    TransportKind,
)
from aqua_protocol.channel import (
    CONSUMER_MESSAGES,
    ConsumerMessage,
    Goodbye,
    Ping,
    Reclaim,
    Refused,
    Released,
    SlabHandle,
    SlabRef,
    Slabs,
    Welcome,
)
from aqua_protocol.errors import VersionMismatchError
from aqualib.channel import Channel, ChannelClosedError, listen
from aqualib.leasing.handshake import attach
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.consumers import consuming, grant
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer, send_bytes
from harness.transport_peer import open_descriptors

if TYPE_CHECKING:
    from aqua_protocol.leases import LeaseGrant

    Script = Callable[["Crook"], None]

COUNT: Final = 3
LIMITS: Final = resource.getrlimit(resource.RLIMIT_NOFILE)


class Crook:
    """The producer's end of one connection, after the Hello.

    Attributes:
        is_full: Whether this process may have no descriptor more once slabs are on their way.
    """

    def __init__(self, channel: Channel[ConsumerMessage], terms: LeaseGrant) -> None:
        self.channel = channel
        self.terms = terms
        self.heard: list[ConsumerMessage] = []
        self.is_full = False
        self._memory = [select(TransportKind.MEMFD).create(SLAB) for _ in range(COUNT)]

    def welcome(self, **changes: Any) -> None:  # noqa: ANN401 - fields of a Welcome
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "producer_id": self.terms.lease.producer_id,
            "lease_id": self.terms.lease.lease_id,
            "epoch": self.terms.lease.epoch,
            "transport": self.terms.transport,
            "slab_bytes": SLAB,
            "slab_count": COUNT,
        }
        self.channel.send(Welcome(**fields | changes))

    def slabs(self, *slab_ids: int, last: bool = True, **changes: Any) -> None:  # noqa: ANN401 - fields of a SlabHandle
        fields: dict[str, Any] = {"generation": 1, "fd_count": 1, "payload": ""} | changes
        handles = [SlabHandle(slab_id=slab_id, **fields) for slab_id in slab_ids]
        exports = [self._memory[i].export() for i in range(len(slab_ids))]
        if self.is_full:
            # Not 0, under which the kernel refuses to wait on the one socket as well.
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, LIMITS[1]))
        self.channel.send(Slabs(slabs=handles, last=last), [e.fd for e in exports if e.fd])
        for export in exports:
            export.close()

    def say(self, packet: bytes) -> None:
        send_bytes(self.channel, packet)

    def listen(self) -> None:
        """Hear the consumer out."""
        try:
            while True:
                self.heard.append(self.channel.receive()[0])
        except ChannelClosedError:
            return

    def close(self) -> None:
        self.channel.close()
        for memory in self._memory:
            memory.close()


def meet(directory: Path, script: Script, **options: Any) -> tuple[AquaError, list[Any]]:  # noqa: ANN401 - of `attach`
    """Attach to a producer that follows `script`; returns the error and what it heard after."""
    terms = grant(TokenIssuer(), directory / "crook.sock", COUNT)
    heard: list[Any] = []
    with listen(directory / "crook.sock") as listener:

        def play() -> None:
            crook = Crook(Channel(listener.accept()[0], CONSUMER_MESSAGES), terms)
            crook.channel.receive()
            script(crook)
            crook.listen()
            heard.extend(crook.heard)
            crook.close()

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(AquaError) as caught:
            attach(
                terms,
                consumer_id="consumer",
                transport=select(TransportKind.MEMFD),
                slab_bytes=SLAB,
                **options,
            )
        thread.join(HANG_S)
        assert not thread.is_alive()
    return caught.value, heard


def refuse(crook: Crook) -> None:
    crook.channel.send(Refused(error=CapacityError("nothing left", retry_after_s=3.0).to_body()))


def lend_nothing_at_all(crook: Crook) -> None:
    crook.welcome()
    crook.channel.shutdown()


def lend_twice(crook: Crook) -> None:
    crook.welcome()
    crook.slabs(1, 2, 1)


def lend_twice_in_two_packets(crook: Crook) -> None:
    crook.welcome()
    crook.slabs(1, 2, last=False)
    crook.slabs(2)


def lend_fewer(crook: Crook) -> None:
    crook.welcome()
    crook.slabs(1, 2)


def lend_more(crook: Crook) -> None:
    crook.welcome(slab_count=2)
    crook.slabs(1, 2, 3)


def announce_more(crook: Crook) -> None:
    crook.welcome(slab_count=COUNT + 1)


def forget_the_descriptors(crook: Crook) -> None:
    crook.welcome()
    crook.channel.send(Slabs(slabs=[SlabHandle(slab_id=1, generation=1, fd_count=1)], last=True))


def send_an_illegible_payload(crook: Crook) -> None:
    crook.welcome()
    crook.slabs(1, 2, 3, payload="not base64!")


def send_a_payload_of_other_letters(crook: Crook) -> None:
    crook.welcome()
    crook.slabs(1, 2, 3, payload="\N{LATIN SMALL LETTER E WITH ACUTE}")


def speak_another_version(crook: Crook) -> None:
    crook.welcome(protocol_version=PROTOCOL_VERSION + 1)


def be_somebody_else(crook: Crook) -> None:
    crook.welcome(producer_id="impostor")


def lend_larger_slabs(crook: Crook) -> None:
    crook.welcome(slab_bytes=2 * SLAB)


def begin_with_slabs(crook: Crook) -> None:
    crook.slabs(1)


def reclaim_before_lending(crook: Crook) -> None:
    crook.welcome()
    refs = [SlabRef(slab_id=1, generation=1)]
    crook.channel.send(Reclaim(reclaim_id="r", slabs=refs, deadline_s=1.0))


def talk_nonsense(crook: Crook) -> None:
    crook.say(b'{"type": "welcome", "slab_count": -1}')


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (refuse, CapacityError, "nothing left"),
        (lend_nothing_at_all, ChannelClosedError, "closed"),
        (lend_twice, ProtocolError, "twice"),
        (lend_twice_in_two_packets, ProtocolError, "twice"),
        (lend_fewer, ProtocolError, "announced 3 slabs, not 2"),
        (lend_more, ProtocolError, "announced 2 slabs, not 3"),
        (announce_more, ProtocolError, "more than was granted"),
        (forget_the_descriptors, ProtocolError, "without their descriptors"),
        (send_an_illegible_payload, ProtocolError, "malformed"),
        (send_a_payload_of_other_letters, ProtocolError, "malformed"),
        (speak_another_version, VersionMismatchError, "speaks protocol"),
        (be_somebody_else, ProtocolError, "welcomes under"),
        (lend_larger_slabs, ProtocolError, "welcomes under|more than was granted"),
        (begin_with_slabs, ProtocolError, "before its welcome"),
        (reclaim_before_lending, ProtocolError, "instead of slabs"),
        (talk_nonsense, ProtocolError, "message"),
    ],
)
def test_whatever_is_not_the_protocol_is_refused_and_nothing_stays_open(
    directory: Path, script: Script, error: type[AquaError], message: str
) -> None:
    before = open_descriptors()
    found, _ = meet(directory, script)
    assert isinstance(found, error)
    assert found.message
    with pytest.raises(AquaError, match=message):
        raise found
    until(lambda: open_descriptors() <= before, "no descriptor is left")


def test_a_producer_that_never_answers_is_given_up_and_named(directory: Path) -> None:
    found, _ = meet(directory, lambda _: None, timeout_s=0.05)
    assert "does not answer" in found.message
    assert "producer" in found.message
    assert found.remedy


def test_a_slab_that_is_none_is_declined_together_with_all_others(directory: Path) -> None:
    def lend_a_pipe(crook: Crook) -> None:
        crook.welcome()
        crook.slabs(1, last=False)
        ours, theirs = socket.socketpair()
        handles = [SlabHandle(slab_id=2, generation=1, fd_count=1)]
        crook.channel.send(Slabs(slabs=handles, last=False), [theirs.fileno()])
        crook.slabs(3)
        ours.close()
        theirs.close()

    found, heard = meet(directory, lend_a_pipe)
    assert isinstance(found, TransportError)
    assert sorted(m.slab_id for m in heard if isinstance(m, Released)) == [1, 2, 3]
    assert isinstance(heard[-1], Goodbye)


def test_slabs_for_which_there_are_no_descriptors_go_back(directory: Path) -> None:
    def lend_to_one_that_is_full(crook: Crook) -> None:
        crook.welcome()
        crook.is_full = True
        crook.slabs(1, 2, 3)

    try:
        found, heard = meet(directory, lend_to_one_that_is_full)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
    assert "no descriptor is left" in found.message
    assert sorted(m.slab_id for m in heard if isinstance(m, Released)) == [1, 2, 3]


def test_a_producer_that_breaks_the_protocol_later_loses_its_channel_and_no_data(
    directory: Path,
) -> None:
    terms = grant(TokenIssuer(), directory / "crook.sock", COUNT)
    broken = threading.Event()

    def play(listener: socket.socket) -> None:
        crook = Crook(Channel(listener.accept()[0], CONSUMER_MESSAGES), terms)
        crook.channel.receive()
        crook.welcome()
        crook.slabs(1, 2, 3)
        crook.channel.send(Ping(number=7))
        assert crook.channel.receive()[0].type == "pong"
        broken.wait(HANG_S)
        crook.say(b"\xff\xfe")
        crook.listen()
        crook.close()

    with listen(directory / "crook.sock") as listener, consuming() as aqua:
        thread = threading.Thread(target=play, args=(listener,))
        thread.start()
        aqua.attach(terms)
        tensors = [aqua.offload(torch.full((SLAB,), i, dtype=torch.uint8)) for i in range(COUNT)]
        broken.set()
        until(lambda: not aqua.attachments, "the channel was given up")
        thread.join(HANG_S)
        for i, tensor in enumerate(tensors):
            assert tensor.load().eq(i).all()


def test_reclaims_of_unknown_slabs_and_old_generations_change_nothing(directory: Path) -> None:
    terms = grant(TokenIssuer(), directory / "crook.sock", COUNT)
    done = threading.Event()

    def play(listener: socket.socket) -> None:
        crook = Crook(Channel(listener.accept()[0], CONSUMER_MESSAGES), terms)
        crook.channel.receive()
        crook.welcome()
        crook.slabs(1, 2, 3, generation=5)
        refs = [SlabRef(slab_id=1, generation=4), SlabRef(slab_id=9, generation=5)]
        crook.channel.send(Reclaim(reclaim_id="r", slabs=refs, deadline_s=1.0))
        crook.channel.send(Ping(number=7))
        assert crook.channel.receive()[0].type == "pong"  # And no Released before it.
        done.set()
        crook.listen()
        crook.close()

    with listen(directory / "crook.sock") as listener, consuming() as aqua:
        thread = threading.Thread(target=play, args=(listener,))
        thread.start()
        attachment = aqua.attach(terms)
        assert done.wait(HANG_S)
        assert len(attachment.slabs) == COUNT
        assert not attachment.is_reclaiming
        aqua.close()
        thread.join(HANG_S)
