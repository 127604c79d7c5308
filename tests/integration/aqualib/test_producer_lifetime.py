"""The beginning and the end of a producer, and what it does about memory that is not to be had."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import aqualib
from aqua_protocol import (
    ConfigError,
    RequestInvalidError,
    SocketPathTooLongError,
    TransportError,
    TransportKind,
    UnavailableError,
)
from aqualib.producer import slab_memory
from aqualib.producer.device import EmulatedMemory, device_memory
from aqualib.producer.producer import Producer
from aqualib.producer.slab_memory import SlabMemory
from aqualib.reporter import Identity
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.producers import IDENTITY, SLAB, lending, socket_dir
from harness.raw_consumer import ConsumerProcess, RawConsumer, TokenIssuer
from harness.transport_peer import open_descriptors


def make(path: Path, **options: object) -> Producer:
    given = {"producer_id": "producer", "identity": IDENTITY, "slab_bytes": SLAB} | options
    return Producer(transport=select(TransportKind.MEMFD), link=None, endpoint=path, **given)  # type: ignore[arg-type] # each test passes what it is about


# --- The beginning -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"slab_bytes": 4096},
        {"deadline_s": 0.0},
        {"deadline_s": 601.0},
        {"deadline_s": float("nan")},
        {"producer_id": "no/slashes"},
        {"identity": Identity(node="", domain="d", gpu_uuid="g")},
        {"identity": Identity(node="n", domain="two words", gpu_uuid="g")},
    ],
    # Not of the values: an identity has a random name, and test names are the same in every run.
    ids=["slab", "no-time", "too-much-time", "nan", "name", "node", "domain"],
)
def test_a_wrong_configuration_starts_nothing(options: dict[str, object]) -> None:
    with socket_dir() as directory:
        with pytest.raises(ConfigError):
            make(directory / "p.sock", **options)
        assert list(directory.iterdir()) == []


def test_a_socket_path_that_is_too_long_is_refused_by_name() -> None:
    with socket_dir() as directory, pytest.raises(SocketPathTooLongError, match="107"):
        make(directory / ("x" * 120))


def test_two_producers_cannot_share_a_socket(tmp_path: Path) -> None:
    with (
        lending(TokenIssuer(), 1) as producer,
        pytest.raises(TransportError, match="cannot listen"),
    ):
        make(producer.endpoint)


def test_the_socket_of_a_killed_producer_is_taken_over() -> None:
    with socket_dir() as directory:
        program = f"""
            import socket, sys
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind({str(directory / "p.sock")!r})
            listener.listen()
            print("bound", flush=True)
            sys.stdin.read()
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"bound\n"
            process.kill()
        with make(directory / "p.sock") as producer, RawConsumer(producer.endpoint) as consumer:
            assert consumer.ping(1) == 1


def test_a_producer_removes_the_sockets_of_killed_ones_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket_dir() as directory, contextlib.ExitStack() as alive:

        def bind(name: str, *, age_s: float, listens: bool) -> Path:
            path = directory / name
            sock = alive.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.bind(str(path))
            if listens:
                sock.listen(0)
            os.utime(path, times=(time.time() - age_s,) * 2)
            return path

        dead = bind("dead.sock", age_s=3600, listens=False)
        about_to_listen = bind("young.sock", age_s=0, listens=False)
        of_another_program = bind("dead.ipc", age_s=3600, listens=False)
        no_socket = directory / "file.sock"
        no_socket.touch()
        os.utime(no_socket, times=(0, 0))
        full = bind("full.sock", age_s=3600, listens=True)
        for _ in range(3):  # A stopped process, whose backlog fills.
            caller = alive.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.setblocking(False)
            caller.connect_ex(str(full))
        monkeypatch.setenv("AQUA_SOCKET_DIR", str(directory))
        with aqualib.open_producer("p", transport="memfd", slab_bytes=SLAB) as producer:
            left = {about_to_listen, of_another_program, no_socket, full, producer.endpoint}
            assert set(directory.iterdir()) == left
        assert not dead.exists()


# --- Memory that is not to be had --------------------------------------------------------------


def test_an_offer_beyond_the_device_keeps_what_could_be_made() -> None:
    with lending(TokenIssuer(), 0, device=EmulatedMemory(3 * SLAB)) as producer:
        with pytest.raises(TransportError, match="out of device memory"):
            producer.offer(5 * SLAB)
        assert producer.offered_bytes == 3 * SLAB


def test_a_transport_that_fails_takes_nothing_from_the_device() -> None:
    device = EmulatedMemory(3 * SLAB)
    # No transport maps a slab that is no multiple of the page size.
    memory = SlabMemory(select(TransportKind.MEMFD), SLAB + 1, device)
    with pytest.raises(TransportError, match="cannot be mapped"):
        memory.create()
    assert (device.used_bytes, memory.physical_count) == (0, 0)


def test_a_replacement_waits_until_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_memory, "FIRST_PAUSE_S", 1e-4)
    issuer, device = TokenIssuer(), ContendedMemory(SLAB)
    with lending(issuer, 1, device=device) as producer:
        _lose_a_slab(producer, issuer, device)
        assert producer.offered_bytes == 0
        device.give_back(SLAB)
        until(lambda: producer.free_bytes == SLAB, "the slab is replaced")


def test_a_replacement_that_never_fits_is_written_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slab_memory, "FIRST_PAUSE_S", 1e-5)
    issuer, device = TokenIssuer(), ContendedMemory(SLAB)
    with lending(issuer, 1, device=device) as producer:
        _lose_a_slab(producer, issuer, device)
        until(lambda: producer.committed_bytes == 0, "the slab is written off")
        assert "stays smaller" in caplog.text
        device.give_back(SLAB)
        # The offer can still be grown again by whoever wants to.
        assert producer.offer(SLAB) == SLAB


def test_an_emulated_device_never_holds_more_than_it_has() -> None:
    device = EmulatedMemory(10)
    device.take(10)
    with pytest.raises(TransportError):
        device.take(1)
    device.give_back(4)
    assert (device.used_bytes, device.total_bytes) == (6, 10)
    with pytest.raises(AssertionError):
        device.give_back(7)


def test_a_cpu_has_a_budget_only_if_one_is_given() -> None:
    cpu = select(TransportKind.MEMFD).device
    assert device_memory(cpu, None) is None
    budget = device_memory(cpu, SLAB)
    assert budget is not None
    assert budget.total_bytes == SLAB


@pytest.mark.parametrize("nbytes", [0, -1])
def test_reclaiming_nothing_is_refused(nbytes: int) -> None:
    with lending(TokenIssuer(), 1) as producer, pytest.raises(RequestInvalidError):
        producer.reclaim(nbytes)


# --- The end -----------------------------------------------------------------------------------


def test_closing_takes_everything_back_and_leaves_nothing_behind() -> None:
    issuer = TokenIssuer()
    with socket_dir() as directory:
        before = open_descriptors()
        producer = make(directory / "p.sock")
        producer.offer(4 * SLAB)
        producer.acknowledge(issuer.ack())
        with RawConsumer(producer.endpoint) as consumer:
            consumer.attach(issuer.token(2 * SLAB))
            closing = threading.Thread(target=producer.close)
            closing.start()
            for slab in consumer.await_reclaim():
                consumer.give_back(slab)
            assert consumer.await_end() == "goodbye"
        closing.join(HANG_S)
        assert not closing.is_alive()
        producer.close()
        assert list(directory.iterdir()) == []
        assert open_descriptors() == before


def test_closing_with_a_slow_consumer_ends_at_the_deadline_and_takes_nothing_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    issuer = TokenIssuer()
    with lending(issuer, 1) as producer, RawConsumer(producer.endpoint) as consumer:
        (slab,) = consumer.attach(issuer.token(SLAB))
        consumer.fill(slab, 0x5A)
        producer.close(deadline_s=0.01)
        assert consumer.await_reclaim() == [slab]
        consumer.await_end()
        assert consumer.values(slab) == [0x5A]
    assert "1 slabs still held" in caplog.text


def test_a_closed_producer_offers_nothing() -> None:
    with lending(TokenIssuer(), 1) as producer:
        producer.close(deadline_s=0.01)
        with pytest.raises(UnavailableError, match="is closed"):
            producer.offer(2 * SLAB)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_that_unwinds_closes_nothing_of_its_parents() -> None:
    issuer = TokenIssuer()
    with lending(issuer, 1) as producer:
        child = os.fork()
        if child == 0:
            producer.close()
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        with RawConsumer(producer.endpoint) as consumer:
            assert len(consumer.attach(issuer.token(SLAB))) == 1


def test_a_forked_child_keeps_no_channel_open_when_its_producer_dies() -> None:
    """Engines fork data loaders; a child must not stand in for a dead producer."""
    issuer = TokenIssuer()
    with socket_dir() as directory:
        program = f"""
            import os, signal, sys
            from pathlib import Path
            from aqua_protocol.members import ProducerAck
            from aqua_protocol import TransportKind
            from aqualib.producer.producer import Producer
            from aqualib.reporter import Identity
            from aqualib.transports import select

            producer = Producer(
                "producer", transport=select(TransportKind.MEMFD), link=None,
                endpoint=Path({str(directory / "p.sock")!r}), slab_bytes={SLAB},
                identity=Identity(node="n", domain="d", gpu_uuid="g"),
            )
            producer.offer({SLAB})
            producer.acknowledge(ProducerAck.model_validate_json(sys.stdin.readline()))
            print("ready", flush=True)
            sys.stdin.readline()
            child = os.fork()
            if child == 0:
                signal.pause()
            print(child, flush=True)
            signal.pause()
        """
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(issuer.ack().model_dump_json() + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            with RawConsumer(directory / "p.sock") as consumer:
                consumer.attach(issuer.token(SLAB))
                process.stdin.write("\n")
                process.stdin.flush()
                child = int(process.stdout.readline())
                try:
                    process.kill()
                    assert consumer.await_end() == "nothing"
                finally:
                    os.kill(child, signal.SIGKILL)


class ContendedMemory(EmulatedMemory):
    """A device where somebody else takes the next memory that comes free."""

    thief_waits = False

    def give_back(self, nbytes: int) -> None:
        super().give_back(nbytes)
        if self.thief_waits:
            self.thief_waits = False
            self.take(nbytes)


def _lose_a_slab(producer: Producer, issuer: TokenIssuer, device: ContendedMemory) -> None:
    """The holder dies, and the memory is gone before the slab can be replaced."""
    device.thief_waits = True
    with ConsumerProcess(producer.endpoint) as consumer:
        consumer.call("attach", issuer.token(SLAB))
        consumer.kill()
    until(lambda: not device.thief_waits, "the memory is taken")
