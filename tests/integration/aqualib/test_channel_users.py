"""Lease channels between processes of several users, over real sockets: who may talk to whom."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import aqualib
from aqua_protocol import AquaError, ConfigError, TransportKind
from aqualib.channel import ChannelClosedError, connect
from aqualib.leasing.handshake import attach
from aqualib.peers import UntrustedPeerError
from aqualib.producer import producer as producer_module
from aqualib.producer import server
from aqualib.producer.escalation import Escalation
from aqualib.producer.producer import Producer
from aqualib.transports import select
from harness.bounds import until
from harness.consumers import grant
from harness.other_user import FRIEND, STRANGER, needs_root, other_user
from harness.producers import IDENTITY, SLAB, lending, socket_dir
from harness.raw_consumer import RawConsumer, RefusedError, TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.other_user import Say

CROWD = server.MAX_PEERS + 44
"""Connections that no honest process needs."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with socket_dir() as path:
        path.chmod(0o755)
        yield path


def bound(path: Path) -> socket.socket:
    """A socket of this user at `path`, on which nothing listens yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path))
    return sock


def overhear(listener: socket.socket, say: Say) -> None:
    """Listen, and tell all that the first to connect sends before it waits or hangs up."""
    listener.listen()
    say("listening")
    with listener.accept()[0] as connection:
        say(connection.recv(1 << 16).decode())


def attempt(endpoint: Path, issuer: TokenIssuer) -> None:
    """Attach as the consumer library does."""
    attach(
        grant(issuer, endpoint, 1),
        consumer_id="consumer",
        transport=select(TransportKind.MEMFD),
        slab_bytes=SLAB,
    )


def produce(directory: Path) -> None:
    """Open a producer in `directory`."""
    Producer(
        "producer",
        transport=select(TransportKind.MEMFD),
        link=None,
        endpoint=directory / "p.sock",
        identity=IDENTITY,
        slab_bytes=SLAB,
    ).close()


# --- Whom a consumer trusts --------------------------------------------------------------------


@needs_root
def test_a_producer_of_another_user_hears_not_a_byte(directory: Path, issuer: TokenIssuer) -> None:
    # The socket is our own and so is its directory: only who listens on it is not.
    with (
        bound(directory / "p.sock") as listener,
        other_user(STRANGER, lambda say: overhear(listener, say)) as hear,
    ):
        assert hear() == "listening"
        with pytest.raises(UntrustedPeerError, match=str(STRANGER)) as refusal:
            attempt(directory / "p.sock", issuer)
        assert "AQUA_ALLOWED_UIDS" in refusal.value.remedy
        assert hear() == ""


@needs_root
def test_another_users_socket_in_a_shared_directory_is_not_connected_to(
    directory: Path, issuer: TokenIssuer
) -> None:
    directory.chmod(0o1777)

    def listen(say: Say) -> None:
        with bound(directory / "p.sock") as listener:
            listener.listen()
            say("listening")
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                os.read(release, 1)
                listener.accept()
                say("connected")
            say("nobody came")

    release, releasing = os.pipe()
    with other_user(STRANGER, listen) as hear:
        assert hear() == "listening"
        with pytest.raises(UntrustedPeerError, match="the socket"):
            attempt(directory / "p.sock", issuer)
        os.write(releasing, b"x")
        assert hear() == "nobody came"
    os.close(release)
    os.close(releasing)


@needs_root
def test_a_user_that_is_named_is_trusted_with_token_and_directory(
    directory: Path, issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUA_ALLOWED_UIDS", f"{STRANGER}")
    terms = grant(issuer, directory / "p.sock", 1)
    with bound(directory / "p.sock") as listener:
        os.chown(directory, STRANGER, STRANGER)
        with (
            other_user(STRANGER, lambda say: overhear(listener, say)) as hear,
            aqualib.connect(
                "consumer", transport="memfd", slab_bytes=SLAB, host_bytes=SLAB, is_offline=True
            ) as aqua,
        ):
            assert hear() == "listening"
            with pytest.raises(ChannelClosedError):
                aqua.attach(terms)
            assert terms.token in hear()


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o777])
def test_neither_end_uses_another_users_directory(
    directory: Path, issuer: TokenIssuer, mode: int
) -> None:
    with lending(issuer, 1) as producer:
        home = producer.endpoint.parent
        os.chown(home, STRANGER, STRANGER)
        home.chmod(mode)
        with pytest.raises(ConfigError, match=f"user {STRANGER} owns it"):
            attempt(producer.endpoint, issuer)
    os.chown(directory, STRANGER, STRANGER)
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="others can replace"):
        produce(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_neither_end_uses_a_directory_where_others_can_replace_the_socket(
    directory: Path, issuer: TokenIssuer, mode: int
) -> None:
    with lending(issuer, 1) as producer:
        producer.endpoint.parent.chmod(mode)
        with pytest.raises(ConfigError, match="others can replace"):
            attempt(producer.endpoint, issuer)
        producer.endpoint.parent.chmod(mode | 0o1000)  # Nobody can in a sticky one.
        with RawConsumer(producer.endpoint) as consumer:
            assert consumer.attach(issuer.token(SLAB))
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="others can replace"):
        produce(directory)


def test_neither_end_follows_a_symbolic_link(directory: Path, issuer: TokenIssuer) -> None:
    with lending(issuer, 1) as producer:
        (directory / "home").symlink_to(producer.endpoint.parent)
        (directory / "p.sock").symlink_to(producer.endpoint)
        with pytest.raises(ConfigError, match="symbolic link"):
            attempt(directory / "home" / "p.sock", issuer)
        with pytest.raises(UntrustedPeerError, match="symbolic link"):
            attempt(directory / "p.sock", issuer)
        with pytest.raises(ConfigError, match="symbolic link"):
            produce(directory / "home")


@pytest.mark.parametrize("endpoint", ["\0abstract", "/run/\0/p.sock", "missing.sock", "/no/p.sock"])
def test_an_endpoint_that_names_no_file_has_no_producer(endpoint: str) -> None:
    with pytest.raises(ChannelClosedError, match="no producer answers"):
        connect(Path(endpoint))


# --- Whom a producer trusts --------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("uid", [STRANGER, FRIEND], ids=["not allowed", "allowed"])
def test_idle_connections_of_another_user_bar_nobody(issuer: TokenIssuer, uid: int) -> None:
    kept: list[socket.socket] = []

    def act(say: Say) -> None:
        for _ in range(CROWD):
            kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            kept[-1].connect(str(producer.endpoint))
        say("crowded")

    with lending(issuer, 1, allowed_uids={FRIEND}) as producer:
        producer.endpoint.parent.chmod(0o755)
        with other_user(uid, act) as hear:
            assert hear() == "crowded"
            with RawConsumer(producer.endpoint) as consumer:
                assert consumer.attach(issuer.token(SLAB))


@needs_root
def test_a_user_that_is_allowed_attaches_and_another_is_told_what_to_do(
    issuer: TokenIssuer,
) -> None:
    def act(say: Say) -> None:
        try:
            attempt(producer.endpoint, issuer)
        except AquaError as error:
            say([error.code, error.remedy])
        else:
            say("attached")

    with lending(issuer, 2, allowed_uids={FRIEND}) as producer:
        # The kernel lets others connect only where others are allowed at all.
        assert producer.endpoint.stat().st_mode & 0o777 == 0o666
        producer.endpoint.parent.chmod(0o755)
        with other_user(FRIEND, act) as hear:
            assert hear() == "attached"
        for _ in range(20):  # The refusal and the Hello cross in any order.
            with other_user(STRANGER, act) as hear:
                code, remedy = hear()
                assert code == "capability_rejected"
                assert "AQUA_ALLOWED_UIDS" in remedy
        with RawConsumer(producer.endpoint) as consumer:
            assert consumer.attach(issuer.token(SLAB))


def test_a_junk_hello_under_a_clock_that_is_wrong_bars_nobody(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lending(issuer, 1) as producer:
        ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
        monkeypatch.setattr(producer_module, "time", ahead)
        for token in ("junk", TokenIssuer().token(SLAB), issuer.token(SLAB)):
            with RawConsumer(producer.endpoint) as junk, pytest.raises(RefusedError):
                junk.attach(token)
        monkeypatch.undo()
        with RawConsumer(producer.endpoint) as consumer:
            assert consumer.attach(issuer.token(SLAB))


# --- Holders that cannot be killed -------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.ENOSYS])
def test_a_holder_that_the_kernel_does_not_let_us_kill_ends_no_server(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tried = []

    def refuse(pidfd: int, signum: int) -> None:
        tried.append((pidfd, signum))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    options = {"policy": Escalation.KILL, "deadline_s": 0.001, "grace_s": 0.0}
    with lending(issuer, 2, **options) as producer, RawConsumer(producer.endpoint) as holder:
        slabs = holder.attach(issuer.token(SLAB))
        reclaim = producer.reclaim(2 * SLAB)
        until(lambda: bool(tried), "the producer has tried to kill the holder")
        assert producer.quarantined_bytes == SLAB
        with RawConsumer(producer.endpoint) as other:
            assert other.ping(7) == 7
        holder.give_back(slabs[0])
        assert holder.await_end() == "goodbye"
        assert reclaim.wait(0) or reclaim.wait(60.0)


def test_a_process_outside_our_pid_namespace_cannot_be_killed_and_the_error_says_so() -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0:
            break_out(unshare)
            return
    pytest.skip("this user cannot make a PID namespace")


def break_out(unshare: list[str]) -> None:
    program = (
        "import sys; from aqualib.producer.escalation import KillRefusedError, kill_process\n"
        "try: kill_process(int(sys.argv[1]), pid=1, lease_id='lease')\n"
        "except KillRefusedError as error: print(error.code, error.__cause__.errno)"
    )
    with subprocess.Popen(["sleep", "infinity"]) as outside:
        pidfd = os.pidfd_open(outside.pid)
        try:
            said = subprocess.run(
                [*unshare, sys.executable, "-c", program, str(pidfd)],
                pass_fds=[pidfd],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            assert outside.poll() is None
        finally:
            os.close(pidfd)
            outside.kill()
    assert said.split() == ["kill_refused", str(errno.EINVAL)]
