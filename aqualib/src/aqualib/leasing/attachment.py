"""An attachment: one lease in use, which is one channel to one producer and the slabs it lent.

    handshake -> OPEN  --last slab returned-->  Goodbye, closed
                   |
                   +--channel or producer gone-->  LOST: slabs drain from the surviving mappings

Owns the channel, the pidfd and the record of which slabs are out; moves no bytes. A slab that
has been unmapped is handed to `take_back`, and this module tells the producer.

Messages arrive on the event thread, slabs come back on the migrator's. The record has one lock and
the channel another, since a send may wait for a producer that does not read, and the event thread
must not wait with it. Descriptors are closed under the channel's lock only, so that none is closed,
and its number reused, during a send.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, format_bytes
from aqua_protocol.channel import PRODUCER_MESSAGES, Goodbye, Pong, Released
from aqualib.channel import Channel, ChannelClosedError, connect
from aqualib.memory.copy_pace import CopyPace

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from aqua_client.tracing import Tracer
    from aqua_protocol.channel import ProducerMessage, Reclaim, SlabRef
    from aqua_protocol.leases import LeaseGrant
    from aqualib.memory.frame import PeerSlab
    from aqualib.probe import LinkMeasurement

logger = logging.getLogger("aqualib")

RETURN_TIMEOUT_S: Final = 1.0
"""Seconds that a producer whose channel is lost may take to accept another, chosen by hand.
Doubled, the thread that drains slabs waits twice as long for one that does not answer."""

MAX_RECLAIMS_KEPT: Final = 64
"""Reclaims remembered per attachment, for statistics; the oldest are forgotten. Doubled, `Stats`
covers twice the history."""


@dataclass(slots=True)
class ReclaimRecord:
    """One reclaim as this consumer served it.

    Attributes:
        reclaim_id: The producer's name for it.
        asked_at_s: When the first message came, by the attachment's clock.
        bytes: Asked back, in whole slabs.
        slabs_out: Slabs of it that have not been returned yet.
        first_slab_ms: From the message to the first slab returned.
        total_ms: To the last; None while slabs are out.
    """

    reclaim_id: str
    asked_at_s: float
    bytes: int = 0
    slabs_out: int = 0
    first_slab_ms: float | None = None
    total_ms: float | None = None

    def note_asked(self, slab_count: int, slab_bytes: int) -> None:
        """This many slabs more are to come back."""
        self.bytes += slab_count * slab_bytes
        self.slabs_out += slab_count
        self.total_ms = None

    def note_returned(self, now_s: float) -> None:
        """One of them is back."""
        elapsed_ms = (now_s - self.asked_at_s) * 1e3
        if self.first_slab_ms is None:
            self.first_slab_ms = elapsed_ms
        self.slabs_out -= 1
        if not self.slabs_out:
            self.total_ms = elapsed_ms


class Attachment:
    """A lease in use; made by `aqualib.leasing.handshake.attach`.

    Args:
        grant: The lease and where its producer is.
        channel: Connected to it; owned from now on.
        allowed_uids: Users whose producers are trusted beside our own and root's.
        clock: Seconds, monotonic.
        tracer: Draws what is asked back; None where tracing is off.

    Attributes:
        trace: The span of the attach, which what happens to the lease is drawn under.
        link: The path as measured; None until it has been.
        is_ending: Everything is going back.
        pace: Of copies to and from its slabs.

    Raises:
        TransportError: The producer died meanwhile.
    """

    def __init__(
        self,
        grant: LeaseGrant,
        channel: Channel[ProducerMessage],
        *,
        allowed_uids: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.trace: Span | None = None
        self._tracer = tracer
        self.lease_id: Final = grant.lease.lease_id
        self.producer_id: Final = grant.lease.producer_id
        self.epoch: Final = grant.lease.epoch
        self.slab_bytes: Final = grant.slab_bytes
        self.link: LinkMeasurement | None = None
        self.pace: Final = CopyPace()
        self.channel: Final = channel
        self.pidfd: Final = channel.peer_pidfd()
        self._endpoint: Path | None = Path(grant.endpoint)
        self._allowed_uids = allowed_uids
        self._clock = clock
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._slabs: dict[int, PeerSlab] = {}
        self._asked: dict[int, ReclaimRecord] = {}
        self._reclaims: dict[str, ReclaimRecord] = {}
        self._is_connected = True
        self.is_ending = False

    def __repr__(self) -> str:
        state = "connected" if self._is_connected else "channel closed"
        return (
            f"<Attachment of {self.lease_id} at {self.producer_id}: {len(self._slabs)} slabs of "
            f"{format_bytes(self.slab_bytes)}, {state}>"
        )

    # --- What others may ask --------------------------------------------------------------

    @property
    def is_reclaiming(self) -> bool:
        """Whether this is no place to move anything to."""
        return bool(self._asked) or self.is_ending or not self._is_connected

    @property
    def slabs(self) -> list[PeerSlab]:
        """Slabs that are mapped here."""
        with self._lock:
            return list(self._slabs.values())

    @property
    def mapped_bytes(self) -> int:
        """Size of all slabs that are mapped here."""
        return len(self._slabs) * self.slab_bytes

    @property
    def kept_bytes(self) -> int:
        """Size of those that are not asked back."""
        return sum(slab.asked_at_s is None for slab in self.slabs) * self.slab_bytes

    @property
    def reclaims(self) -> list[ReclaimRecord]:
        """The latest reclaims, oldest first."""
        with self._lock:
            return [replace(record) for record in self._reclaims.values()]

    # --- Slabs out, slabs back ------------------------------------------------------------

    def note_lent(self, slab: PeerSlab) -> None:
        """A slab has been mapped."""
        with self._lock:
            assert slab.slab_id not in self._slabs, f"{slab!r} is lent twice"
            self._slabs[slab.slab_id] = slab

    def note_asked(self, message: Reclaim) -> list[PeerSlab]:
        """Record a reclaim; returns the slabs meant, in the order asked.

        Slabs that have gone back meanwhile are left out: the answer is already on its way.
        """
        with self._lock:
            here = [(ref, self._slabs.get(ref.slab_id)) for ref in message.slabs]
            found = [slab for ref, slab in here if slab and slab.generation == ref.generation]
            fresh = [slab.slab_id for slab in found if slab.slab_id not in self._asked]
            if fresh:
                record = self._reclaims.setdefault(
                    message.reclaim_id, ReclaimRecord(message.reclaim_id, self._clock())
                )
                record.note_asked(len(fresh), self.slab_bytes)
                self._asked |= dict.fromkeys(fresh, record)
                if len(self._reclaims) > MAX_RECLAIMS_KEPT:
                    del self._reclaims[next(iter(self._reclaims))]
            return found

    def take_back(self, slab: PeerSlab) -> None:
        """The slab is unmapped: tell the producer, over another connection if ours is lost.

        It is booked first: once the producer says that it has all, so does `reclaims`.
        """
        with self._lock:
            self._slabs.pop(slab.slab_id, None)  # A migrator that crashed tells it again.
            is_last = not self._slabs
            if (record := self._asked.pop(slab.slab_id, None)) is not None:
                record.note_returned(self._clock())
        self._tell(Released(slab_id=slab.slab_id, generation=slab.generation))
        if is_last:
            self._tell(Goodbye())
            with self._sending:
                if self._is_connected:
                    self.channel.shutdown()  # The event thread sees it and closes the descriptors.
        if record is not None:
            self._draw(record)  # When the producer has been told: it waits.

    def strand(self, slab: PeerSlab) -> None:
        """The slab cannot be unmapped: it stays ours until the process ends."""
        self.is_ending = True
        logger.error("slab %d of %s stays mapped until this process ends", slab.slab_id, self)

    def decline(self, ref: SlabRef) -> None:
        """Give back a slab that was never mapped."""
        self._tell(Released(slab_id=ref.slab_id, generation=ref.generation))

    # --- The end --------------------------------------------------------------------------

    def pong(self, number: int) -> None:
        """Answer a ping, unless the producer does not read or is being told something else."""
        if self._sending.acquire(blocking=False):
            try:
                with suppress(ChannelClosedError):
                    self.channel.try_send(Pong(number=number))
            finally:
                self._sending.release()

    def end(self) -> list[PeerSlab]:
        """The right has ended and everything goes back; returns what is still here."""
        self.is_ending = True
        return self.slabs

    def disconnect(self) -> list[PeerSlab]:
        """Close channel and pidfd; returns what is still here. Harmless when repeated."""
        with self._sending:
            self.abandon()
        return self.slabs

    def abandon(self) -> None:
        """Close a forked child's copies; without the lock, whose holder may not be here."""
        if self._is_connected:
            self._is_connected = False
            self.channel.close()
            os.close(self.pidfd)

    # --- Inside ---------------------------------------------------------------------------

    def _draw(self, record: ReclaimRecord) -> None:
        if self._tracer is not None and record.total_ms is not None:
            self._tracer.begin(
                "drain",
                parent=self.trace,
                start_ns=time.time_ns() - round(record.total_ms * 1e6),
                attributes={
                    "aqua.lease.id": self.lease_id,
                    "aqua.reclaim.id": record.reclaim_id,
                    "aqua.bytes": record.bytes,
                },
            ).end()

    def _tell(self, message: Released | Goodbye) -> None:
        with self._sending:
            if not self._is_connected:
                if isinstance(message, Released):
                    self._tell_anew(message)
                return
            try:
                self.channel.send(message)
            except ChannelClosedError as error:
                # Gone, or it has not read for seconds: it waits for our death instead, and no
                # further slab waits for it.
                logger.info("%s was not told of %s: %s", self.producer_id, message.type, error)
                self.channel.shutdown()

    def _tell_anew(self, message: Released) -> None:
        if self._endpoint is None:
            return
        try:
            sock = connect(
                self._endpoint, allowed_uids=self._allowed_uids, timeout_s=RETURN_TIMEOUT_S
            )
            with closing(Channel(sock, PRODUCER_MESSAGES)) as channel:
                channel.send(message)
        except AquaError as error:  # Most often dead, and its memory with it.
            logger.info("%s was not told of %s: %s", self.producer_id, message.type, error)
            self._endpoint = None  # No further slab waits for it.
