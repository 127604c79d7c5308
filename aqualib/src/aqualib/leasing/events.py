"""The event thread: listens to every producer at once and never waits for anybody.

It turns messages into entries of the frame table, which takes microseconds: a reclaim is marked
here and served by the migrator, however long an engine thread keeps a frame pinned. A channel that
ends, for whatever reason, ends the attachment: what is still mapped is drained like a reclaim.

Death is read from the pidfd as well as from the channel, because a child of a dead producer may
keep its socket open.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from typing import TYPE_CHECKING

from aqua_protocol import ProtocolError, TransportError
from aqua_protocol.channel import Goodbye, Ping, Pong, Reclaim
from aqualib.channel import LingeringSelector
from aqualib.thread_slice import run_promptly

if TYPE_CHECKING:
    from aqualib.leasing.attachment import Attachment
    from aqualib.leasing.client import LeaseClient
    from aqualib.memory.frame_store import FrameStore

logger = logging.getLogger("aqualib")


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
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="aqua-events", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def watch(self, attachment: Attachment) -> None:
        """Listen to one more producer, from any thread; its slabs must be in the store already."""
        self._arrivals.append(attachment)
        os.eventfd_write(self._wakeup, 1)

    def close(self, timeout_s: float) -> None:
        """Stop listening and close every channel. Harmless when repeated."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wakeup)

    def abandon_descriptors(self) -> None:
        """Drop, in a forked child, the parent's channels, so that its end stays visible."""
        for attachment in [*self._attachments, *self._arrivals]:
            attachment.abandon()

    # --- The thread -----------------------------------------------------------------------

    def _run(self) -> None:
        run_promptly()
        while not self._is_closing:
            for key, _ in self._selector.select():
                attachment = key.data
                if attachment is None:
                    os.eventfd_read(self._wakeup)
                elif attachment not in self._attachments:
                    continue  # Closed earlier in this round.
                elif key.fd == attachment.pidfd:
                    self._drop(attachment, "its process has ended")
                else:
                    self._read(attachment)
            self._register_arrivals()
        for attachment in list(self._attachments):
            self._drop(attachment, "this consumer is closing")

    def _register_arrivals(self) -> None:
        while self._arrivals:
            attachment = self._arrivals.popleft()
            self._attachments.add(attachment)
            self._selector.register(attachment.channel, selectors.EVENT_READ, attachment)
            self._selector.register(attachment.pidfd, selectors.EVENT_READ, attachment)

    def _read(self, attachment: Attachment) -> None:
        try:
            message, fds = attachment.channel.receive()
        except (TransportError, ProtocolError) as error:
            self._drop(attachment, error.message)
            return
        for fd in fds:
            os.close(fd)
        match message:
            case Reclaim():
                self._store.ask_back(attachment.note_asked(message))
                self._client.on_reclaim()
            case Ping(number=number):
                attachment.pong(number)
            case Pong():
                return
            case Goodbye():
                self._drop(attachment, "it said goodbye")
            case _:
                self._drop(attachment, f"{message.type} is not allowed now")

    def _drop(self, attachment: Attachment, reason: str) -> None:
        self._attachments.discard(attachment)
        self._selector.unregister(attachment.channel)
        self._selector.unregister(attachment.pidfd)
        left = attachment.disconnect()
        if left:
            logger.warning(
                "%r ends (%s); its slabs are drained from their mappings", attachment, reason
            )
            self._store.ask_back(left)
        self._client.on_closed(attachment, is_lost=bool(left))
