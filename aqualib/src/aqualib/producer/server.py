r"""The lease channel's server: sockets, peers and time for one producer, on one thread.

Owns the listening socket and every connection; decides nothing. What peers say goes to a `Host`,
what the host wants to say goes out through `Peer.post`. One lease is one connection.

    GREETING --Hello--> HANDING --all slabs sent--> OPEN --end--> LEAVING --> closed
        \_______________________ refused _______________________/

What it promises:

- A peer of a user that is not trusted is refused as it is accepted: it takes no place and is asked
  nothing. The places are shared out among the trusted users, so that none can bar another.
- The server survives whatever a peer sends. Anything outside the protocol is answered with
  `Refused`, where the peer can still read it, and the connection is closed.
- It never waits for a peer. Packets that do not fit into the peer's queue are kept, up to a bound
  of packets and of seconds; past it the peer counts as gone.
- Packets that a peer sent before it died are read before its death is told. Death is what the
  pidfd says, pinned when the peer connected; the end of a channel is only silence.
- What was not foreseen costs one message of one peer: a slab's return is handled again, any other
  peer is refused.
- Whatever other threads do here (`Peer.post`, `wake`) happens under the producer's one lock.

Known limit: this thread needs the interpreter lock like any other. An engine that computes in pure
Python delays it by up to `sys.getswitchinterval()` (5 ms) per packet; torch kernels do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, CapacityError, ProtocolError, TransportError
from aqua_protocol.channel import (
    CONSUMER_MESSAGES,
    PACED,
    ConsumerMessage,
    Goodbye,
    Hello,
    Pace,
    Ping,
    Pong,
    Refused,
    Released,
)
from aqua_protocol.errors import CapabilityError
from aqua_protocol.supervision import SupervisedThread
from aqualib.channel import Channel, ChannelClosedError, LingeringSelector, listen
from aqualib.peers import ProcessIdentity, process_behind, require_trusted, trusted_uids
from aqualib.producer.host import Host
from aqualib.thread_slice import run_promptly
from aqualib.traced_leases import LeaseTrace, SpanQueue

if TYPE_CHECKING:
    from pathlib import Path

    from aqua_protocol.ids import LeaseId
    from aqua_protocol.wire import Wire

logger: Final = logging.getLogger("aqualib")

MAX_PEERS: Final = 256
"""Connections at once, half-open and leaving ones included, in equal parts for the users that may
attach. A producer serves one consumer in the paper and a handful here; each costs two descriptors.
Doubled, twice the descriptors."""

MAX_WAITING_PACKETS: Final = 1024
"""Packets kept for a peer whose queue is full: a terabyte of slabs asked back in one go. Doubled, a
peer that does not read costs twice the memory."""

MAX_UNANSWERED: Final = 4
"""Paces that a peer may leave unanswered. Doubled, a slow one is told more often."""

HELLO_TIMEOUT_S: Final = 5.0
"""Seconds that a peer gets to say who it is; one that means it takes milliseconds. Doubled, idle
connections occupy a place twice as long."""

SEND_TIMEOUT_S: Final = 5.0
"""Seconds that a peer may leave its queue full before it counts as gone. Doubled, a stopped
consumer is noticed 5 s later."""

ACCEPT_PAUSE_S: Final = 0.1
"""Seconds before a new attempt to accept, when descriptors have run out. Doubled, a consumer may
wait 0.1 s longer."""

LINGER_S: Final = 1.0
"""Seconds that a peer may take to read a final word before the connection is closed anyway.
Doubled, a peer that does not read holds its place a second longer."""


class Stage(Enum):
    """Where a connection stands."""

    GREETING = auto()
    HANDING = auto()
    OPEN = auto()
    LEAVING = auto()


class Peer:
    """One connection; used under the producer's lock, except for what the loop alone touches."""

    def __init__(self, channel: Channel[ConsumerMessage], server: LeaseServer) -> None:
        self.channel = channel
        self.credentials: Final = channel.credentials
        self.pidfd = channel.peer_pidfd()
        self.process: Final = process_behind(self.credentials, self.pidfd)
        self.stage = Stage.GREETING
        self.lease_id: LeaseId | None = None
        self.trace = LeaseTrace(SpanQueue())
        self.deadline_at_s = time.monotonic() + HELLO_TIMEOUT_S
        self.dead = False
        self.watched = 0
        self._server = server
        self._waiting: deque[Wire] = deque()
        self._knows_pace = False
        self._first_pace: Pace | None = None
        self._unanswered = 0

    def __repr__(self) -> str:
        return f"Peer(pid={self.credentials.pid}, lease={self.lease_id}, stage={self.stage.name})"

    @property
    def connected(self) -> bool:
        """Whether the channel is open; a peer without one is only watched for its death."""
        return self.channel.fileno() >= 0

    def post(self, message: Wire) -> None:
        """Send now, or as soon as the peer's queue and the handout allow; keeps the order."""
        if not self.connected or self.stage is Stage.LEAVING:
            return
        if not self._waiting and self.stage is not Stage.HANDING and self._try(message):
            return
        if not self._waiting:
            self.deadline_at_s = time.monotonic() + SEND_TIMEOUT_S
        self._waiting.append(message)
        if len(self._waiting) > MAX_WAITING_PACKETS:
            self.drop()
        self._server.wake()

    def knows(self, aqualib_version: str) -> None:
        """Note what the peer understands, by its version."""
        self._knows_pace = aqualib_version.endswith(PACED)

    def pace(self, message: Pace) -> None:
        """Ask for a pace, unless the peer knows none or has left others unanswered.

        Kept while slabs are handed out, and else never: the next one is about now. Nor do they fill
        the queue of a peer that is stopped, for which a reclaim could not be left.
        """
        if self.stage is Stage.HANDING:
            self._first_pace = message
        is_free = self.connected and self.stage is Stage.OPEN and not self._waiting
        if is_free and self._knows_pace and self._unanswered < MAX_UNANSWERED:
            self._unanswered += self._try(message)

    def answered(self) -> None:
        """The peer reads."""
        self._unanswered = 0

    def leave(self, last_word: Goodbye | Refused) -> None:
        """Say the last word, then let the peer close; the server closes after `LINGER_S`."""
        self.post(last_word)
        self.stage = Stage.LEAVING
        self.deadline_at_s = time.monotonic() + LINGER_S
        self._server.wake()

    def drop(self) -> None:
        """End the conversation; the loop sees the end of the channel and tells the host."""
        self._waiting.clear()
        self.channel.shutdown()

    def flush(self) -> None:
        """Send what was kept, as far as the peer's queue allows."""
        while self._waiting and self._try(self._waiting[0]):
            self._waiting.popleft()
            self.deadline_at_s = time.monotonic() + SEND_TIMEOUT_S

    @property
    def has_waiting(self) -> bool:
        """Whether packets wait for room in the peer's queue."""
        return bool(self._waiting)

    def handed_out(self) -> None:
        """The handout is over: read the peer again, and send what waited for it."""
        self.stage = Stage.OPEN
        self.deadline_at_s = time.monotonic() + SEND_TIMEOUT_S
        self.flush()
        if self._first_pace is not None:
            self.pace(self._first_pace)
        self._server.wake()

    def _try(self, message: Wire) -> bool:
        try:
            return self.channel.try_send(message)
        except ChannelClosedError:
            return True  # The loop sees the end of the channel; there is nothing left to keep.


class LeaseServer:
    """Serves the lease channel of one producer on a background thread.

    Args:
        endpoint: Socket path; created here, removed on close.
        lock: The producer's lock; guards `host` and every `Peer`.
        trusted: Users whose processes may attach.
    """

    def __init__(
        self, endpoint: Path, host: Host, lock: threading.Lock, *, trusted: frozenset[int]
    ) -> None:
        self.endpoint = endpoint
        self._host = host
        self._lock = lock
        self._listener = listen(endpoint)
        self._listener.settimeout(0)
        self._trusted = trusted
        if trusted > trusted_uids():
            endpoint.chmod(0o666)  # The kernel admits everyone then, and `_accept` judges.
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = LingeringSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._peers: set[Peer] = set()
        self._accept_again_at_s = float("inf")
        self._stopping = False
        self._undone: tuple[Peer, ConsumerMessage | None] | None = None
        _servers.add(self)
        self._thread = SupervisedThread(self._run, "aqua-lease-server")
        self._thread.start()

    def wake(self) -> None:
        """Make the loop look at deadlines and waiting packets again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Stop serving: every channel is closed. Harmless when repeated."""
        if self._stopping:
            return
        self._stopping = True
        self.wake()
        self._thread.join()
        with self._lock:
            for peer in list(self._peers):
                self._hang_up(peer)
                self._forget(peer)
        self._selector.close()
        self._listener.close()
        os.close(self._wakeup)
        self.endpoint.unlink(missing_ok=True)

    def let_go_in_child(self) -> None:
        """Close a forked child's copies of the sockets; without the lock, whose owner is gone.

        A child that kept them would keep consumers waiting for the end of a channel whose
        producer is dead, and the socket address in use.
        """
        self._listener.close()
        for peer in self._peers:
            peer.channel.close()

    # --- The loop -------------------------------------------------------------------------

    def _run(self) -> None:
        run_promptly()
        with self._lock:
            self._make_up()
        due_at_s = 0.0  # A run that crashed may have left something due.
        while not self._stopping:
            pause_s = max(0.0, due_at_s - time.monotonic())
            ready = self._selector.select(None if pause_s == float("inf") else pause_s)
            with self._lock:
                for key, mask in ready:
                    self._serve(key.fileobj, key.data, mask)
                due_at_s = self._end_of_round()

    def _make_up(self) -> None:
        """See once more to what the last run crashed over; if it cannot be, refuse the peer."""
        if self._undone is None:
            return
        peer, message = self._undone
        is_done = False
        try:
            if message is None or isinstance(message, Released):
                self._see_to(peer, message)
                is_done = True
        finally:
            self._undone = None
            if not is_done:
                self.refuse(peer, TransportError("the producer could not handle what was said"))

    def _serve(self, fileobj: object, peer: Peer | None, mask: int) -> None:
        if fileobj is self._listener:
            self._accept()
        elif peer is None:
            os.eventfd_read(self._wakeup)
        elif peer not in self._peers:
            return  # Forgotten earlier in this round.
        elif fileobj == peer.pidfd:
            self._selector.unregister(peer.pidfd)
            peer.dead = True
        elif peer.connected:
            if mask & selectors.EVENT_WRITE:
                peer.flush()
            if mask & selectors.EVENT_READ:
                self._read(peer)

    def _end_of_round(self) -> float:
        """Everything that time and order decide; returns when to look again."""
        now_s = time.monotonic()
        due_at_s = self._accept_again_at_s
        if now_s >= self._accept_again_at_s:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_again_at_s = float("inf")
        for peer in list(self._peers):
            self._review(peer, now_s)
            if peer in self._peers and peer.connected:
                self._watch(peer)
                if peer.stage in {Stage.GREETING, Stage.LEAVING} or peer.has_waiting:
                    due_at_s = min(due_at_s, peer.deadline_at_s)
        return min(due_at_s, self._host.tick(now_s))

    def _review(self, peer: Peer, now_s: float) -> None:
        if peer.stage is Stage.HANDING:
            return
        if peer.dead and not (peer.connected and peer.channel.wait(0)):
            # A child of the dead process may have kept the socket, so its end may never come.
            self._hang_up(peer)
            self._host.dead(peer)
            self._forget(peer)
        elif peer.connected and now_s >= peer.deadline_at_s:
            if peer.stage is Stage.GREETING:
                self.refuse(peer, ProtocolError(f"no Hello within {HELLO_TIMEOUT_S:g} s"))
            elif peer.stage is Stage.LEAVING or peer.has_waiting:
                self._lose(peer)

    def _watch(self, peer: Peer) -> None:
        """Bring the selector in line with what the peer may do next."""
        mask = 0 if peer.stage is Stage.HANDING else selectors.EVENT_READ
        if peer.has_waiting and mask:
            mask |= selectors.EVENT_WRITE
        if mask == peer.watched:
            return
        if not peer.watched:
            self._selector.register(peer.channel, mask, peer)
        elif not mask:
            self._selector.unregister(peer.channel)
        else:
            self._selector.modify(peer.channel, mask, peer)
        peer.watched = mask

    # --- Connections ----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # The peer gave up before it was its turn.
        except OSError as error:
            # Out of descriptors or memory. The connection stays in the backlog, and watching the
            # listener meanwhile would spin.
            logger.warning("cannot accept a lease channel: %s", error)
            self._selector.unregister(self._listener)
            self._accept_again_at_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        channel: Channel[ConsumerMessage] = Channel(
            sock, CONSUMER_MESSAGES, send_timeout_s=SEND_TIMEOUT_S
        )
        try:
            self._require_place(channel.credentials.uid)
            peer = Peer(channel, self)
        except AquaError as error:
            logger.info("a lease channel ended before it began: %s", error)
            _say(channel, error)
            channel.close()
            return
        except BaseException:
            channel.close()
            raise
        self._peers.add(peer)
        self._selector.register(peer.pidfd, selectors.EVENT_READ, peer)

    def _require_place(self, uid: int) -> None:
        require_trusted(uid, self._trusted, "a consumer that may not attach", CapabilityError)
        share = -(-MAX_PEERS // len(self._trusted))
        if sum(peer.credentials.uid == uid for peer in self._peers) >= share:
            raise CapacityError(f"{share} lease channels of user {uid} are open", retry_after_s=1.0)

    def _read(self, peer: Peer) -> None:
        try:
            message, fds = peer.channel.receive()
        except ChannelClosedError:
            self._undone = peer, None
            self._see_to(peer, None)
            return
        except ProtocolError as error:
            self.refuse(peer, error)
            return
        for fd in fds:
            os.close(fd)
        if peer.stage is Stage.LEAVING:
            return  # Drained only, so that the peer can read our last word.
        if fds:
            self.refuse(peer, ProtocolError("a consumer sends no descriptors"))
            return
        self._undone = peer, message
        self._see_to(peer, message)

    def _see_to(self, peer: Peer, message: ConsumerMessage | None) -> None:
        """Handle a message, or the end of the channel."""
        try:
            self._dispatch(peer, message)
        except AquaError as error:
            self.refuse(peer, error)
        self._undone = None

    def _dispatch(self, peer: Peer, message: ConsumerMessage | None) -> None:
        match message:
            case Ping(number=number):
                peer.post(Pong(number=number))
            case Pong():
                peer.answered()
            case Hello() if peer.stage is Stage.GREETING:
                self._host.attach(peer, message)
            case Released() if peer.stage is Stage.OPEN:
                self._host.released(peer, message)
            case Released() if peer.stage is Stage.GREETING and (
                others := self._with_leases_of(peer.process)
            ):
                for other in others:
                    self._host.released(other, message)
            case Goodbye() | None:
                self._lose(peer)
            case _:
                stage = peer.stage.name.lower()
                raise ProtocolError(f"{message.type} is not allowed while {stage}")

    def _with_leases_of(self, process: ProcessIdentity | None) -> list[Peer]:
        """Connections, open or lost, with leases of a process: it speaks for what it has mapped."""
        return [
            peer
            for peer in self._peers
            if process is not None
            and peer.process == process
            and peer.lease_id is not None
            and peer.stage is not Stage.HANDING
        ]

    def refuse(self, peer: Peer, error: AquaError) -> None:
        """Tell the peer why, and end the channel; under the lock."""
        if peer.stage is Stage.LEAVING:
            return
        logger.warning("refused pid %d: %s", peer.credentials.pid, error)
        peer.leave(Refused(error=error.to_body()))
        self._host.silent(peer)

    def _lose(self, peer: Peer) -> None:
        """The channel has ended; the peer is watched on while it may have slabs mapped."""
        self._hang_up(peer)
        self._host.silent(peer)
        if peer.lease_id is None:
            self._forget(peer)

    def _hang_up(self, peer: Peer) -> None:
        if peer.connected:
            if peer.watched:
                self._selector.unregister(peer.channel)
                peer.watched = 0
            peer.channel.close()

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            if not peer.dead:
                self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)


def _say(channel: Channel[ConsumerMessage], error: AquaError) -> None:
    with contextlib.suppress(ChannelClosedError):
        channel.try_send(Refused(error=error.to_body()))


_servers: weakref.WeakSet[LeaseServer] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for server in list(_servers):
        server.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
