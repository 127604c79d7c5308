"""Packets and descriptors over a Unix socket: the lease channel's lowest layer.

Owns framing and descriptor passing; knows no protocol state, and leaves to `aqualib.peers` whom to
trust. SOCK_SEQPACKET keeps message boundaries and keeps descriptors with the message that names
them, and a packet is sent whole or not at all, so several threads may send on one channel.

Received descriptors are closed on exec and belong to the caller. A packet that carries more
descriptors than its message accounts for is a protocol violation and closes them all.

A thread that waits for a packet lingers: it looks again for `LINGER_S` before it sleeps. Most
packets answer one that was just sent, the answer takes microseconds to make, and waking a sleeping
thread on an idle core takes several times as long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from aqua_protocol import AquaError, ProtocolError, SocketPathTooLongError, TransportError
from aqua_protocol.channel import MAX_PACKET_BYTES, MAX_SLABS_PER_PACKET
from aqua_protocol.members import MAX_SOCKET_PATH_BYTES
from aqua_protocol.supervision import resting
from aqua_protocol.wire import Wire, first_fault
from aqualib import peers

SO_PEERPIDFD: Final = 77
"""Fixed by the ABI of Linux 6.5: a pidfd of the peer as of connect time, immune to pid
reuse and pid namespaces."""

LINGER_S: Final = 50e-6
"""Seconds awake after a packet: about what going to sleep and waking up costs. Doubled, a thread
without further packets burns a core for 50 us more."""

ABANDONED_S: Final = 60.0
"""Seconds of age at which a socket that refuses is a dead producer's, and not one of a producer
between its `bind` and its `listen`. Doubled, it is removed a minute later."""

OUT_OF_MEMORY: Final = frozenset({errno.ENOBUFS, errno.ENOMEM})
"""Of a send without kernel memory, as in a container at its limit: the channel lives."""

MEMORY_PATIENCE_S: Final = 20.0
"""Seconds that a send waits for such memory. To give up means that a slab stays with its holder for
as long as that lives. Doubled, a thread may stand still for 40 s beside one that is out of memory.
"""

MEMORY_PAUSE_S: Final = 0.01
"""Seconds between attempts; doubled, a packet is late by 10 ms more."""

MessageT = TypeVar("MessageT", bound=Wire)


class ChannelClosedError(TransportError):
    """The peer closed the channel or died. This says nothing about its mappings."""

    code = "channel_closed"
    default_remedy = "Fence on the peer's pidfd before you assume that it is gone."


class DescriptorsLostError(ProtocolError):
    """Not all descriptors of a packet found a place here; those that did have been closed.

    Args:
        said: The packet's message.
    """

    def __init__(self, said: Wire) -> None:
        super().__init__("a lease channel packet has lost descriptors on its way")
        self.said: Final = said


class Channel(Generic[MessageT]):
    """One end of a lease channel; `credentials` are the other end's, from the kernel.

    Args:
        sock: A connected SOCK_SEQPACKET socket, owned by the channel from now on.
        incoming: Parser of the messages that the other side may send.
        send_timeout_s: A peer that does not drain its socket for this long is treated as gone.
    """

    def __init__(
        self, sock: socket.socket, incoming: TypeAdapter[MessageT], *, send_timeout_s: float = 5.0
    ) -> None:
        self._socket = sock
        self.credentials: Final = peers.credentials_of(sock)
        self._incoming = incoming
        sock.settimeout(None)
        # Only sends are bounded here: a receiver decides per call how long it waits.
        _bound_sends(sock, send_timeout_s)

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Wire, fds: Sequence[int] = ()) -> None:
        """Send one message; `fds` stay owned by the caller.

        Raises:
            ChannelClosedError: The peer is gone, has not read for `send_timeout_s`, or the kernel
                has had no memory for the packet for `MEMORY_PATIENCE_S`.
        """
        packet = _packed(message)
        give_up_at_s = time.perf_counter() + MEMORY_PATIENCE_S
        while True:
            try:
                if fds:
                    socket.send_fds(self._socket, [packet], list(fds))
                else:
                    self._socket.send(packet)
            except OSError as error:
                if error.errno not in OUT_OF_MEMORY or time.perf_counter() > give_up_at_s:
                    raise ChannelClosedError(
                        f"cannot send on the lease channel: {error}"
                    ) from error
                time.sleep(MEMORY_PAUSE_S)
            else:
                return

    def try_send(self, message: Wire) -> bool:
        """Send one message without waiting; False when there is no room for it now.

        Raises:
            ChannelClosedError: The peer is gone.
        """
        packet = _packed(message)
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in OUT_OF_MEMORY:
                return False
            raise _cannot_send(error) from error
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive, be it the end; False when there is not."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        awake_until_s = time.perf_counter() + min(timeout_s, LINGER_S)
        while not poll.poll(0):
            if time.perf_counter() >= awake_until_s:
                return bool(poll.poll(max(timeout_s - LINGER_S, 0.0) * 1e3))
        return True

    def receive(self) -> tuple[MessageT, list[int]]:
        """Wait for the next message; the descriptors returned are owned by the caller.

        Raises:
            ChannelClosedError: The peer closed or died.
            ProtocolError: Not a message of this channel; its descriptors have been closed.
            DescriptorsLostError: It is one, and there was no place for its descriptors.
        """
        try:
            try:
                packet, fds, flags = self._receive_packet()
            except ConnectionResetError:
                # A peer that closes before it has read everything resets the connection, and
                # Linux reports that once, ahead of the packets that the peer had sent before.
                # They still count: a Released dropped here would quarantine a slab for nothing.
                packet, fds, flags = self._receive_packet()
        except OSError as error:
            raise ChannelClosedError(f"cannot receive on the lease channel: {error}") from error
        if not packet and not fds:
            raise ChannelClosedError("the peer closed the lease channel")
        message: MessageT | None = None
        fault = "larger than the protocol allows"
        if not flags & socket.MSG_TRUNC:
            try:
                message = self._incoming.validate_json(packet)
            except ValidationError as error:
                fault = f"not a message: {first_fault(error)}"  # Without what it says: tokens.
        if message is not None and not flags & socket.MSG_CTRUNC:
            return message, fds
        for fd in fds:
            os.close(fd)
        if message is None:
            raise ProtocolError(f"a lease channel packet is {fault}")
        raise DescriptorsLostError(message)

    def _receive_packet(self) -> tuple[bytes, list[int], int]:
        packet, fds, flags, _ = socket.recv_fds(
            self._socket, MAX_PACKET_BYTES, MAX_SLABS_PER_PACKET, socket.MSG_CMSG_CLOEXEC
        )
        return packet, fds, flags

    def peer_pidfd(self) -> int:
        """A descriptor that becomes readable when the peer's process is gone; owned by the caller.

        Raises:
            TransportError: The peer died before it could be pinned down.
        """
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            # Before Linux 6.5. The window for pid reuse is the time since connect.
            try:
                return os.pidfd_open(self.credentials.pid)
            except OSError as error:
                raise TransportError(f"cannot watch the peer process: {error}") from error

    def shutdown(self) -> None:
        """Wake a thread that waits in `receive`; it sees `ChannelClosedError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # Not connected any more: no thread is waiting.

    def close(self) -> None:
        """Close this end. Harmless when repeated."""
        self._socket.close()


class LingeringSelector(selectors.DefaultSelector):
    """A selector for lease channels: after something was ready, it lingers before it sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._is_awake = False

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with resting():
            if self._is_awake:
                linger_s = LINGER_S if timeout is None else min(timeout, LINGER_S)
                awake_until_s = time.perf_counter() + linger_s
                while time.perf_counter() < awake_until_s:
                    if ready := super().select(0):
                        return ready
            ready = super().select(timeout)
        self._is_awake = bool(ready)
        return ready


def _cannot_send(error: OSError) -> ChannelClosedError:
    return ChannelClosedError(f"cannot send on the lease channel: {error}")


def _packed(message: Wire) -> bytes:
    # Without what is not said: peers of the version before refuse fields that they do not know.
    packet = message.model_dump_json(exclude_none=True).encode()
    assert len(packet) <= MAX_PACKET_BYTES, f"packet of {len(packet)} bytes"
    return packet


def listen(path: Path, *, backlog: int = 128) -> socket.socket:
    """Listen for lease channels on `path`, readable and writable by this user only.

    A socket file left behind by a dead process is replaced; one that still answers is not.

    Raises:
        ConfigError: Users other than this one and root can replace sockets in the directory.
        SocketPathTooLongError: `path` does not fit into a Unix address.
        TransportError: The directory is not writable, or another process listens there.
    """
    require_short_path(path)
    sock = _socket()
    try:
        peers.require_safe_directory(path.parent, peers.trusted_uids())
        if path.is_socket() and not path.is_symlink() and not _answers(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(backlog)
    except (AquaError, OSError) as error:
        sock.close()
        if isinstance(error, AquaError):
            raise
        raise TransportError(
            f"cannot listen on {path}: {error}",
            remedy="Choose a writable directory that no other producer uses.",
        ) from error
    return sock


def remove_abandoned(directory: Path) -> None:
    """Remove sockets of producers that were killed; only of this user, and only `*.sock`.

    A producer without a name of its own is called after its process, so no successor takes its
    socket over, and each kill would leave one file more. A socket is abandoned if it refuses
    connections: while a process listens, stopped or swamped, the kernel accepts them or says that
    it is full.
    """
    for path in directory.glob("*.sock"):
        with contextlib.suppress(OSError), _socket() as probe:
            status = path.lstat()
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
                continue
            probe.setblocking(False)  # noqa: FBT003 - named by the method
            is_old = time.time() - status.st_mtime > ABANDONED_S
            if is_old and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def connect(
    path: Path, *, allowed_uids: Iterable[int] | None = None, timeout_s: float = 5.0
) -> socket.socket:
    """Connect to a producer of this user, root, or one of `allowed_uids`; nothing is sent yet.

    Raises:
        ConfigError: The directory of the socket is open to other users.
        UntrustedPeerError: The socket, or the process that listens on it, is of another user.
        SocketPathTooLongError: `path` does not fit into a Unix address.
        ChannelClosedError: No producer listens there.
        TransportError: There is no descriptor, or no memory, for a socket.
    """
    trusted = peers.trusted_uids(allowed_uids)
    require_short_path(path)
    try:
        sock = _socket()
    except OSError as error:
        raise TransportError(f"no socket can be made to connect to {path}: {error}") from error
    # Not `settimeout`, under which a full backlog refuses at once: this waits for its turn.
    _bound_sends(sock, timeout_s)
    try:
        peers.require_trusted_socket(path, trusted)
        sock.connect(str(path))
        uid = peers.credentials_of(sock).uid
        peers.require_trusted(uid, trusted, f"the process that listens on {path}")
    except (AquaError, OSError, ValueError) as error:
        sock.close()
        if isinstance(error, AquaError):
            raise
        raise ChannelClosedError(f"no producer answers on {path}: {error}") from error
    return sock


def require_short_path(path: Path) -> None:
    """Refuse, by `SocketPathTooLongError`, a path that does not fit into a Unix address."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise SocketPathTooLongError(
            f"socket path {path} has {size} bytes, the kernel takes {MAX_SOCKET_PATH_BYTES}",
            path=str(path),
        )


def _bound_sends(sock: socket.socket, timeout_s: float) -> None:
    seconds, fraction = divmod(timeout_s, 1)
    bound = struct.pack("ll", int(seconds), int(fraction * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)


def _answers(path: Path) -> bool:
    with _socket() as probe:
        return probe.connect_ex(str(path)) == 0


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
