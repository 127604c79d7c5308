"""What a slab's next tenant shares with a holder that lied about letting go: not one byte.

A tenant is a name of a life of a process of a user. The liars here say `Released` for slabs that
they keep, mapped and as descriptors, and go on to read and to write.
"""

from __future__ import annotations

import base64
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from aqua_protocol import MIB, TransportKind
from aqua_protocol.channel import Slabs, Welcome
from aqualib.peers import PeerCredentials, process_behind
from aqualib.producer import slab_memory
from aqualib.transports.base import Handle
from harness.bounds import until
from harness.cuda.stand_in import stand_in
from harness.memory import CountedMemory
from harness.other_user import FRIEND, needs_root, other_user
from harness.producers import SLAB, lending
from harness.raw_consumer import ConsumerProcess, RawConsumer, RefusedError, TokenIssuer
from harness.transport_peer import Peer

if TYPE_CHECKING:
    from pathlib import Path

    from aqua_protocol.channel import ProducerMessage
    from harness.other_user import Say

NAME = "consumer"
KEPT, NEXT, AGAIN = 0xAB, 0xCD, 0xEE
"""What the liar writes first, what the next tenant writes, and what the liar writes then."""


class Liar(RawConsumer):
    """Says that slabs are released, and keeps mappings and descriptors."""

    def __init__(self, producer: Path) -> None:
        super().__init__(producer)
        self.descriptors: list[int] = []

    def receive(self) -> tuple[ProducerMessage, list[int]]:
        message, fds = super().receive()
        self.descriptors += [os.dup(fd) for fd in fds]
        return message, fds

    def lie(self, issuer: TokenIssuer, count: int) -> list[int]:
        """Borrow so many slabs, fill them, and let go of none; returns their numbers."""
        taken = self.attach(issuer.token(count * SLAB))
        for slab in taken:
            self.fill(slab, KEPT)
            self.released(slab)
        assert self.await_end() == "goodbye"
        return taken

    def everything(self) -> set[int]:
        """Every byte value that mappings and descriptors show."""
        seen = {value for slab in self.slabs for value in self.values(slab)}
        for fd in self.descriptors:
            with mmap.mmap(fd, SLAB) as again:
                seen.update(again[:])
        return seen

    def overwrite(self) -> None:
        """Write to whatever it has."""
        for slab in self.slabs:
            self.fill(slab, AGAIN)
        for fd in self.descriptors:
            os.pwrite(fd, bytes([AGAIN]) * SLAB, 0)

    def close(self) -> None:
        super().close()
        while self.descriptors:
            os.close(self.descriptors.pop())


# --- Liars -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_a_process_of_the_same_name_shares_nothing_with_its_predecessor(
    issuer: TokenIssuer, count: int
) -> None:
    with lending(issuer, count) as producer, Liar(producer.endpoint) as liar:
        liar.lie(issuer, count)
        with ConsumerProcess(producer.endpoint) as other:
            slabs = other.call("attach", issuer.token(count * SLAB))
            assert len(slabs) == count
            for slab in slabs:
                assert other.call("values", slab) == [0]
                other.call("fill", slab, NEXT)
            assert liar.everything() == {KEPT}
            liar.overwrite()
            assert [other.call("values", slab) for slab in slabs] == [[NEXT]] * count


def test_another_name_of_the_same_process_shares_nothing_either(issuer: TokenIssuer) -> None:
    with (
        lending(issuer, 2) as producer,
        Liar(producer.endpoint) as liar,
        RawConsumer(producer.endpoint) as other,
    ):
        old = liar.lie(issuer, 2)
        slabs = other.attach(issuer.token(2 * SLAB, consumer_id="other"), "other")
        assert not set(slabs) & set(old)
        assert [other.values(slab) for slab in slabs] == [[0], [0]]
        for slab in slabs:
            other.fill(slab, NEXT)
        assert liar.everything() == {KEPT}
        liar.overwrite()
        assert [other.values(slab) for slab in slabs] == [[NEXT], [NEXT]]


@needs_root
def test_the_same_name_of_another_user_shares_nothing(issuer: TokenIssuer) -> None:
    token = issuer.token(SLAB)

    def act(say: Say) -> None:
        consumer = RawConsumer(producer.endpoint)
        (slab,) = consumer.attach(token)
        say(consumer.values(slab))
        consumer.fill(slab, NEXT)
        say("filled")
        os.read(overwritten, 1)
        say(consumer.values(slab))

    overwritten, telling = os.pipe()
    with lending(issuer, 1, allowed_uids={FRIEND}) as producer, Liar(producer.endpoint) as liar:
        producer.endpoint.parent.chmod(0o755)
        liar.lie(issuer, 1)
        with other_user(FRIEND, act) as hear:
            assert hear() == [0]
            assert hear() == "filled"
            assert liar.everything() == {KEPT}
            liar.overwrite()
            os.write(telling, b"x")
            assert hear() == [NEXT]
    os.close(overwritten)
    os.close(telling)


@pytest.mark.parametrize("kind", [TransportKind.CUDA_VMM, TransportKind.CUDA_IPC])
def test_device_memory_passes_to_another_tenant_no_more_than_host_memory(
    issuer: TokenIssuer, kind: TransportKind
) -> None:
    def borrow(name: str, process: Peer) -> tuple[RawConsumer, tuple[int, int]]:
        """Attach under a name, and have another process map the slab."""
        consumer = opened.enter_context(RawConsumer(producer.endpoint))
        consumer.hello(issuer.token(2 * MIB, consumer_id=name), name)
        assert isinstance(consumer.receive()[0], Welcome)
        packet, (fd,) = consumer.receive()
        assert isinstance(packet, Slabs)
        (slab,) = packet.slabs
        payload = base64.b64decode(slab.payload)
        process.open("slab", Handle(payload, fd), 2 * MIB)
        return consumer, (slab.slab_id, slab.generation)

    with (
        stand_in() as standing,
        lending(issuer, 1, transport=standing.transport(kind), slab_bytes=2 * MIB) as producer,
        ExitStack() as opened,
        Peer(kind, stands_in=True) as liar,
        Peer(kind, stands_in=True) as other,
    ):
        consumer, lent = borrow("liar", liar)
        liar.call("fill", name="slab", seed=1)
        consumer.released(*lent)
        assert consumer.await_end() == "goodbye"
        borrow("other", other)
        other.call("fill", name="slab", seed=2)
        assert liar.call("matches", name="slab", seed=1).value
        liar.call("fill", name="slab", seed=3)
        assert other.call("matches", name="slab", seed=2).value


# --- Honest tenants ----------------------------------------------------------------------------


def test_a_slab_keeps_its_bytes_for_the_tenant_that_had_it(issuer: TokenIssuer) -> None:
    with lending(issuer, 1) as producer:
        for expected in ([0], [KEPT]):
            with RawConsumer(producer.endpoint) as consumer:
                (slab,) = consumer.attach(issuer.token(SLAB))
                assert consumer.values(slab) == expected
                consumer.fill(slab, KEPT)
                consumer.give_back(slab)
                consumer.await_end()


def test_a_process_whose_life_is_not_known_is_a_new_tenant_each_time(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aqualib.producer.server.process_behind", lambda *_: None)
    with lending(issuer, 1) as producer:
        for _ in range(2):
            with RawConsumer(producer.endpoint) as consumer:
                (slab,) = consumer.attach(issuer.token(SLAB))
                assert consumer.values(slab) == [0]
                consumer.fill(slab, KEPT)
                consumer.give_back(slab)
                consumer.await_end()


def test_a_life_is_known_of_the_living_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        credentials = PeerCredentials(process.pid, os.getuid(), os.getgid())
        life = process_behind(credentials, pidfd)
        assert life is not None
        assert life == process_behind(credentials, pidfd)
        assert process_behind(credentials._replace(pid=os.getpid()), pidfd) != life
        assert process_behind(credentials._replace(pid=0), pidfd) is None
        process.kill()
        process.wait()
        # Its number may be somebody else's by now.
        assert process_behind(credentials._replace(pid=os.getpid()), pidfd) is None
        os.close(pidfd)


# --- Memory that is not to be had --------------------------------------------------------------


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    monkeypatch.setattr(slab_memory, "FIRST_PAUSE_S", 1e-4)
    return CountedMemory()


def test_the_next_tenant_gets_the_slabs_that_can_be_made(
    issuer: TokenIssuer, transport: CountedMemory
) -> None:
    with lending(issuer, 3, transport=transport) as producer, Liar(producer.endpoint) as liar:
        liar.lie(issuer, 3)
        transport.refusals_left = 1
        with RawConsumer(producer.endpoint) as other:
            slabs = other.attach(issuer.token(3 * SLAB, consumer_id="other"), "other")
            assert [other.values(slab) for slab in slabs] == [[0], [0]]
            until(lambda: producer.free_bytes == SLAB, "the third slab is replaced")
        assert producer.offered_bytes == 3 * SLAB


def test_nothing_that_can_be_made_is_a_refusal_and_the_offer_shrinks(
    issuer: TokenIssuer, transport: CountedMemory
) -> None:
    with lending(issuer, 3, transport=transport) as producer, Liar(producer.endpoint) as liar:
        liar.lie(issuer, 3)
        transport.refusals_left = 3 + 3 * slab_memory.MAX_ATTEMPTS
        with RawConsumer(producer.endpoint) as other:
            other.hello(issuer.token(3 * SLAB, consumer_id="other"), "other")
            with pytest.raises(RefusedError) as refusal:
                other.receive()
        assert refusal.value.body.code == "capacity_exhausted"
        until(lambda: producer.committed_bytes == 0, "the slabs are written off")
        assert producer.offered_bytes == 0
        assert liar.everything() == {KEPT}
        transport.refusals_left = 0
        assert producer.offer(3 * SLAB) == 3 * SLAB
        with RawConsumer(producer.endpoint) as other:
            assert len(other.attach(issuer.token(3 * SLAB))) == 3
