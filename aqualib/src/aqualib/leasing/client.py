"""LeaseClient: the leases of one consumer, from the first wish to the last slab returned.

Owns the attachments and the two threads that talk to the coordinator. The reporter tells it what
we hold, want and spill, which renews every lease named; its answers say what is available and which
rights have ended. The leasing thread acts on that: it asks, attaches, measures the path and hands
the slabs to the store, or gives back what is not used. No engine thread waits for either of them,
and neither does a reclaim: a coordinator that is away costs new leases and nothing else.

A call whose answer got lost is repeated under the same idempotency key, so that it cannot grant
twice; a grant that cannot be attached is released at once, with the reason, so that the next one
is of another producer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from aqua_protocol import (
    AquaError,
    RequestInvalidError,
    TransportError,
    UnavailableError,
    format_bytes,
)
from aqua_protocol.ids import new_idempotency_key
from aqua_protocol.leases import AttachFailure, LeaseRequest
from aqua_protocol.members import ConsumerAck, ConsumerReport, UsedLease
from aqua_protocol.supervision import SupervisedThread, resting
from aqualib.channel import ChannelClosedError
from aqualib.leasing.demand import LeaseBackoff, Need, RequestLease, ReturnSurplus
from aqualib.leasing.events import EventThread
from aqualib.leasing.handshake import attach
from aqualib.reporter import MAX_HEARTBEAT_S, Reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aqua_client import CoordinatorClient
    from aqua_protocol.ids import BooksId, Revision
    from aqua_protocol.leases import LeaseGrant
    from aqualib.leasing.attachment import Attachment, ReclaimRecord
    from aqualib.memory.frame import PeerSlab
    from aqualib.memory.frame_store import FrameStore
    from aqualib.probe import LinkMeasurement
    from aqualib.reporter import Identity
    from aqualib.traced_leases import PageOutTrace
    from aqualib.transports.base import Transport

logger = logging.getLogger("aqualib")

MAX_ENDED_RECLAIMS: Final = 256
"""Reclaims remembered of attachments that have ended; the oldest are forgotten. Doubled, `Stats`
covers twice the history."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds for each of the two threads to end: more than a call to the coordinator takes with its
retries. Doubled, `close` may hang twice as long on one that is stuck."""


class LeaseClient:
    """The leases of one consumer; its arguments are those of `Aqua`.

    Args:
        link: To the coordinator; None asks for no lease, and only `take_up` attaches.
        wished_bytes: Peer memory to hold even when nothing is in it.
        waits_for_engine: Ask for nothing before `engine_has_begun`.
        page_outs: Draws them, and leases with them; None where tracing is off.
    """

    def __init__(  # noqa: PLR0913 - a composition root's parts, by keyword
        self,
        consumer_id: str,
        *,
        store: FrameStore,
        transport: Transport,
        link: CoordinatorClient | None,
        identity: Identity,
        wished_bytes: int = 0,
        heartbeat_s: float = MAX_HEARTBEAT_S,
        lease_ttl_s: float = 30.0,
        allowed_uids: Iterable[int] | None = None,
        waits_for_engine: bool = False,
        page_outs: PageOutTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer_id = consumer_id
        self._may_ask = not waits_for_engine
        self._may_borrow = True
        self._is_asking = False
        self._store = store
        self._transport = transport
        self._link = link
        self._identity = identity
        self._wished_count = -(-wished_bytes // store.slab_bytes)
        self._lease_ttl_s = lease_ttl_s
        self._allowed_uids = allowed_uids
        self._page_outs = page_outs
        self._clock = clock
        self._changed = threading.Condition()
        self._attachments: dict[str, Attachment] = {}
        self._ended_reclaims: deque[ReclaimRecord] = deque(maxlen=MAX_ENDED_RECLAIMS)
        self._backoff = LeaseBackoff()
        self._available_count = 0
        self._unanswered: tuple[LeaseRequest, str] | None = None
        # A coordinator of the version before knows no terms, and refuses them.
        self._has_terms = True
        self._is_closing = False
        # Counts what may change a decision, so that none is slept over.
        self._news_count = 0
        self._refusal_code = ""
        self.events: Final = EventThread(store, self)
        self._thread = SupervisedThread(self._run, "aqua-leasing", consumer_id)
        self._reporter = Reporter(
            self._report,
            None if link is None else link.report_consumer,
            self._on_ack,
            heartbeat_s=heartbeat_s,
            name=consumer_id,
        )

    def start(self) -> None:
        """Begin to listen, report and ask."""
        self.events.start()
        self._reporter.start()
        if self._link is not None:
            self._thread.start()

    # --- What can be seen -----------------------------------------------------------------

    @property
    def attachments(self) -> list[Attachment]:
        """Leases in use, oldest first."""
        with self._changed:
            return list(self._attachments.values())

    @property
    def reclaims(self) -> list[ReclaimRecord]:
        """The latest reclaims, those of ended leases first."""
        with self._changed:
            ended = list(self._ended_reclaims)
        return [*ended, *(record for a in self.attachments for record in a.reclaims)]

    @property
    def coordinator_error(self) -> AquaError | None:
        """Why the last report failed; None while the coordinator answers."""
        return self._reporter.error

    @property
    def is_borrowing(self) -> bool:
        """Whether a lease is in use, or being asked for."""
        with self._changed:
            return self._is_asking or bool(self._attachments)

    @property
    def may_borrow(self) -> bool:
        """Whether to hold leases; to set it False gives all back, as fast as their bytes move."""
        return self._may_borrow

    @may_borrow.setter
    def may_borrow(self, may_borrow: bool) -> None:
        with self._changed:
            if may_borrow == self._may_borrow:
                return
            self._may_borrow = may_borrow
        if not may_borrow:
            for attachment in self.attachments:
                self._store.ask_back(attachment.end())
        self.changed()

    # --- From the outside -----------------------------------------------------------------

    def changed(self) -> None:
        """The store has grown or shrunk: think again, and tell the coordinator."""
        self._reporter.changed()
        self._think_again()

    def engine_has_begun(self) -> None:
        """The engine's start is over, whose graphs and measurements leases would disturb."""
        if not self._may_ask:
            self._may_ask = True
            self._think_again()

    def take_up(self, grant: LeaseGrant) -> Attachment:
        """Attach to a granted lease and hand its slabs to the store.

        Raises:
            AquaError: As `aqualib.leasing.handshake.attach`.
            TransportError: The path cannot be measured; the slabs are on their way back.
        """
        attachment = attach(
            grant,
            consumer_id=self._consumer_id,
            transport=self._transport,
            slab_bytes=self._store.slab_bytes,
            allowed_uids=self._allowed_uids,
            tracer=None if self._page_outs is None else self._page_outs.tracer,
        )
        slabs = attachment.slabs
        try:
            attachment.link = self._measure(slabs[0])
            size = format_bytes(attachment.mapped_bytes)
            logger.info("%r maps %s, %s", attachment, size, attachment.link)
        except BaseException:
            attachment.end()  # Before the store could fill its slabs.
            raise
        finally:
            with self._changed:
                self._attachments[attachment.lease_id] = attachment
                self._backoff.note_attached(self._clock())
            # In this order: a reclaim that is heard must find its slabs in the store.
            self._store.adopt(slabs)
            self.events.watch(attachment)
            if attachment.is_ending or not self._may_borrow:
                self._store.ask_back(slabs)  # The way that all slabs go back.
            self.changed()
        return attachment

    def _measure(self, slab: PeerSlab) -> LinkMeasurement:
        from aqualib.probe import measure

        try:
            return measure(self._transport, slab.memory)
        except TransportError as error:
            failure = error.message
        except (RuntimeError, MemoryError) as error:  # Of an engine that is short of memory, often.
            failure = type(error).__name__
        # A new one: the calls that the first came through would keep tensors over the slab alive.
        raise TransportError(f"the path to {slab!r} cannot be measured: {failure}")

    def stop_asking(self) -> None:
        """Take no more leases. Harmless when repeated."""
        self._is_closing = True
        self._think_again()
        self._thread.join(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Tell the coordinator once, and hang up; after the store has been closed."""
        self.stop_asking()
        self._reporter.leave(self._remove)
        self.events.close(CLOSE_TIMEOUT_S)

    # --- The event thread tells -----------------------------------------------------------

    def on_reclaim(self) -> None:
        """A producer has asked for slabs; called on the event thread."""
        with self._changed:
            self._backoff.note_reclaim(self._clock())
        self.changed()

    def on_closed(self, attachment: Attachment, *, is_lost: bool) -> None:
        """An attachment has ended; `is_lost` when slabs were still mapped."""
        with self._changed:
            if self._attachments.pop(attachment.lease_id, None) is not None:
                self._ended_reclaims.extend(attachment.reclaims)
            if is_lost:
                self._backoff.note_reclaim(self._clock())
        self.changed()

    # --- The reporter's thread ------------------------------------------------------------

    def _report(self, revision: Revision, books_id: BooksId | None) -> ConsumerReport:
        need, stats = self._need(), self._store.snapshot()
        leases = [
            UsedLease(
                lease_id=attachment.lease_id,
                epoch=attachment.epoch,
                mapped_bytes=attachment.mapped_bytes,
                link_bytes_per_s=attachment.link.write_bytes_per_s if attachment.link else None,
            )
            for attachment in self.attachments
            if attachment.mapped_bytes
        ]
        return ConsumerReport(
            **self._identity.stamp(revision, books_id),
            consumer_id=self._consumer_id,
            leases=leases,
            wanted_bytes=need.missing_count * self._store.slab_bytes,
            spilled_bytes=stats.spilled_bytes,
        )

    def _on_ack(self, _report: ConsumerReport, ack: ConsumerAck) -> None:
        # The epoch of a notice is that of the fence, so it is later than the lease's own.
        ended = {notice.lease_id: notice for notice in ack.ended}
        for attachment in self.attachments:
            notice = ended.get(attachment.lease_id)
            if notice is None or attachment.is_ending:
                continue
            if notice.epoch >= attachment.epoch:
                logger.warning("lease %s has ended: %s", attachment.lease_id, notice.reason)
                self._store.ask_back(attachment.end())
        self._available_count = ack.available_bytes // self._store.slab_bytes
        self._think_again()

    # --- The leasing thread ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            seen = self._news_count
            need = self._need()
            with self._changed:
                now_s = self._clock()
                order = self._backoff.decide(need, now_s) if self._may_ask else None
                # Between here and the attachment there is nothing else to be seen of it.
                self._is_asking = isinstance(order, RequestLease) and self._may_borrow
                if order is None:
                    until_s = self._backoff.wake_s(now_s)
                    if self._news_count == seen:
                        with resting():
                            self._changed.wait(None if until_s is None else until_s - now_s)
                    continue
            if isinstance(order, ReturnSurplus):
                self._store.ask_back_unused(order.slab_count)
            elif self._is_asking:
                self._ask_traced(order)

    def _think_again(self) -> None:
        with self._changed:
            self._news_count += 1
            self._changed.notify_all()

    def _need(self) -> Need:
        frame_count, _ = self._store.counts()
        wished_count = self._wished_count
        if not self._may_borrow:
            frame_count = wished_count = 0
        attachments = self.attachments
        kept_bytes = sum(attachment.kept_bytes for attachment in attachments)
        return Need(
            used_count=frame_count,
            wished_count=wished_count,
            limit_count=self._store.frame_limit,
            kept_count=kept_bytes // self._store.slab_bytes,
            available_count=self._available_count,
            attachment_count=len(attachments),
        )

    def _ask_traced(self, order: RequestLease) -> None:
        if (page_outs := self._page_outs) is None:
            self._ask(order)
            return
        with page_outs.requesting(
            {"aqua.consumer.id": self._consumer_id, "aqua.slabs": order.slab_count}
        ) as span:
            if (error := self._ask(order)) is None:
                page_outs.granted()
            else:
                span.set_attribute("error.type", error.code)

    def _ask(self, order: RequestLease) -> AquaError | None:
        """Ask for a lease and take it up; returns why there is none."""
        grant = failure = refusal = None
        try:
            # The landing place comes first: a reclaim must not wait for memory.
            self._store.reserve(self._store.counts()[1] + order.slab_count)
            grant = self._allocate(order)
            if not self._is_closing:
                self.take_up(grant)
                grant = None
                self._refusal_code = ""
        except AquaError as error:
            refusal = error
            self._note_refusal(error)
            is_silent = isinstance(error, ChannelClosedError)
            failure = AttachFailure.UNREACHABLE if is_silent else AttachFailure.UNUSABLE
        finally:
            if grant is not None:  # It is not used, for whatever reason.
                self._release(grant, failure)
        return refusal

    def _allocate(self, order: RequestLease) -> LeaseGrant:
        assert self._link is not None, "there is no coordinator to ask"
        if self._unanswered is None:
            slab_bytes = self._store.slab_bytes
            request = LeaseRequest(
                consumer_id=self._consumer_id,
                bytes=order.slab_count * slab_bytes,
                min_bytes=slab_bytes,
                ttl_s=self._lease_ttl_s,
                transport=self._transport.kind if self._has_terms else None,
                slab_bytes=slab_bytes if self._has_terms else None,
            )
            self._unanswered = request, new_idempotency_key()
        request, key = self._unanswered
        try:
            grant = self._link.grant_lease(request, idempotency_key=key)
        except AquaError as error:
            if not isinstance(error, UnavailableError):
                self._unanswered = None  # Else it may have been granted: ask under the same key.
            if isinstance(error, RequestInvalidError):
                self._has_terms = False
            raise
        self._unanswered = None
        self._available_count = 0  # Until the next answer says more.
        return grant

    def _release(self, grant: LeaseGrant, failure: AttachFailure | None) -> None:
        assert self._link is not None, "there is no coordinator to tell"
        try:
            self._link.release_lease(grant.lease.lease_id, grant.lease.epoch, failure)
        except AquaError as error:
            if failure is not None and isinstance(error, RequestInvalidError):
                self._release(grant, None)
                return
            logger.info("lease %s is left to expire: %s", grant.lease.lease_id, error)

    def _note_refusal(self, error: AquaError) -> None:
        with self._changed:
            self._backoff.note_refusal(self._clock(), error.retry_after_s)
        level = logging.DEBUG if error.code == self._refusal_code else logging.WARNING
        self._refusal_code = error.code
        logger.log(level, "%s gets no peer memory now: %s", self._consumer_id, error)

    def _remove(self) -> None:
        if self._link is not None and not any(a.mapped_bytes for a in self.attachments):
            self._link.remove_consumer(self._consumer_id, self._identity.incarnation)
