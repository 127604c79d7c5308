"""The event thread: listens to every producer at once and never waits for anybody.

It turns messages into entries of the frame table, which takes microseconds: a reclaim is marked
here and served by the migrator, however long an engine thread keeps a frame pinned. A channel that
ends, for whatever reason, ends the attachment: what is still mapped is drained like a reclaim.

A message that could not be handled is handled once more, and then ends its attachment, too: it may
have been a reclaim. An attachment that could not be listened to is tried once more in the same way,
and as often as it takes if the kernel has no memory for it.

Death is read from the pidfd as well as from the channel, because a child of a dead producer may
keep its socket open.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aqua_protocol import ProtocolError, TransportError
from aqua_protocol.channel import Goodbye, Pace, Ping, Pong, Reclaim
from aqua_protocol.supervision import SupervisedThread
from aqualib.channel import LingeringSelector
from aqualib.thread_slice import run_promptly

if TYPE_CHECKING:
    from aqua_protocol.channel import ProducerMessage
    from aqualib.leasing.attachment import Attachment
    from aqualib.leasing.client import LeaseClient
    from aqualib.memory.frame_store import FrameStore

logger = logging.getLogger("aqualib")

NO_ROOM: Final = frozenset({errno.ENOMEM, errno.ENOSPC})
"""Of a kernel that cannot watch one more descriptor now. To end the attachment instead would leave
its slabs with this process until it ends: the producer hears of them by its channel only."""

RETRY_S: Final = 0.05
"""Seconds until such a descriptor is tried again; doubled, a reclaim is heard 50 ms later then."""


class EventThread:
    """The thread and its selector.

    Args:
        client: Hears of reclaims and of attachments that have ended; must not wait.
    """

    def __init__(self, store: FrameStore, client: LeaseClient) -> None:
        self._store = store
        self._client = client
        self._selector = LingeringSelector()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._arrivals: deque[Attachment] = deque()
        self._attachments: set[Attachment] = set()
        self._unheard: set[Attachment] = set()
        self._undone: tuple[Attachment, ProducerMessage | str] | None = None
        self._is_closing = False
        self._ending = threading.Lock()
        self._has_ended = False
        self._thread = SupervisedThread(self._run, "aqua-events")

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def watch(self, attachment: Attachment) -> None:
        """Listen to one more producer, from any thread; its slabs must be in the store already."""
        with self._ending:
            if not self._has_ended:
                self._arrivals.append(attachment)
                os.eventfd_write(self._wakeup, 1)
                return
        attachment.disconnect()  # It came up while the consumer closed and would not wait for it.

    def close(self, timeout_s: float) -> None:
        """Stop listening and close every channel. Harmless when repeated."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread.join(timeout_s):
            with self._ending:  # Not while its number is written to, which may soon be another's.
                self._has_ended = True
                os.close(self._wakeup)
            self._selector.close()
            while self._arrivals:
                self._arrivals.popleft().disconnect()

    def abandon_descriptors(self) -> None:
        """Drop, in a forked child, the parent's channels, so that its end stays visible."""
        for attachment in [*self._attachments, *self._arrivals]:
            attachment.abandon()

    # --- The thread -----------------------------------------------------------------------

    def _run(self) -> None:
        run_promptly()
        self._make_up()
        while not self._is_closing:
            self._register_arrivals()
            for key, _ in self._selector.select(RETRY_S if self._arrivals else None):
                attachment = key.data
                if attachment is None:
                    os.eventfd_read(self._wakeup)
                elif attachment not in self._attachments:
                    continue  # Closed earlier in this round.
                elif key.fd == attachment.pidfd:
                    self._end(attachment, "its process has ended")
                else:
                    self._read(attachment)
        for attachment in [*self._attachments, *self._arrivals]:
            self._end(attachment, "this consumer is closing")

    def _make_up(self) -> None:
        """See once more to what the last run crashed over; after that, end the attachment."""
        if self._undone is not None:
            attachment, said = self._undone
            try:
                self._see_to(attachment, said)
            except BaseException:
                self._undone = None if isinstance(said, str) else (attachment, "a fault of ours")
                raise
            self._undone = None

    def _register_arrivals(self) -> None:
        while self._arrivals:
            attachment = self._arrivals.popleft()
            self._attachments.add(attachment)
            if attachment in self._unheard:
                self._undone = attachment, "it cannot be listened to"
            try:
                self._watch(attachment)
            except BaseException as error:
                if isinstance(error, OSError) and error.errno in NO_ROOM:
                    self._undone = None
                    self._arrivals.append(attachment)
                    return
                if self._undone is None:  # Once more.
                    self._unheard.add(attachment)
                    self._arrivals.append(attachment)
                raise
            self._unheard.discard(attachment)
            self._undone = None

    def _watch(self, attachment: Attachment) -> None:
        for watched in (attachment.channel, attachment.pidfd):
            # It may have ended while only its channel was watched.
            if attachment.channel.fileno() >= 0 and watched not in self._watched():
                self._selector.register(watched, selectors.EVENT_READ, attachment)

    def _watched(self) -> set[object]:
        return {key.fileobj for key in self._selector.get_map().values()}

    def _read(self, attachment: Attachment) -> None:
        try:
            message, fds = attachment.channel.receive()
        except (TransportError, ProtocolError) as error:
            self._end(attachment, error.message)
            return
        self._undone = attachment, message
        for fd in fds:
            os.close(fd)
        self._see_to(attachment, message)
        self._undone = None

    def _see_to(self, attachment: Attachment, said: ProducerMessage | str) -> None:
        """Handle a message, or the end of an attachment for the reason given."""
        match said:
            case Reclaim():
                self._store.ask_back(attachment.note_asked(said))
                self._client.on_reclaim()
            case Pace(bytes_per_s=bytes_per_s, lasts_s=lasts_s):
                attachment.pace.ask(bytes_per_s, lasts_s, time.monotonic())
                attachment.pong(0)  # It may say more.
                self._store.nudge()
            case Ping(number=number):
                attachment.pong(number)
            case Pong():
                pass
            case str():
                self._drop(attachment, said)
            case Goodbye():
                self._drop(attachment, "it said goodbye")
            case _:
                self._drop(attachment, f"{said.type} is not allowed now")

    def _end(self, attachment: Attachment, reason: str) -> None:
        self._undone = attachment, reason
        self._drop(attachment, reason)
        self._undone = None

    def _drop(self, attachment: Attachment, reason: str) -> None:
        for watched in (attachment.channel, attachment.pidfd):
            with suppress(KeyError, ValueError):  # A crash came before it, or between the two.
                self._selector.unregister(watched)
        left = attachment.disconnect()
        if left:
            logger.warning(
                "%r ends (%s); its slabs are drained from their mappings", attachment, reason
            )
            self._store.ask_back(left)
        self._client.on_closed(attachment, is_lost=bool(left))
        self._attachments.discard(attachment)
        self._unheard.discard(attachment)
