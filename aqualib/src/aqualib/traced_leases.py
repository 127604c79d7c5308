"""What members draw of their leases, where tracing is on: page-outs, handouts and reclaims.

Page-outs come by the thousand, and a span costs about what paging a small block does. So they are
drawn as a sample: the first after leases have changed, and then one in `SAMPLE_S`, which says for
how many it stands. A page-out belongs to the trace of the lease that its bytes go to; if they stay
on the host, to that of the request for a lease that is under way, or of the newest lease, where
they will move. Without either it begins a trace, and the next request for a lease goes on with it.

A reclaim counts slabs, not leases; what is drawn of it is its part of each lease, from the asking
to the last slab of that lease, in the trace of the lease. Both sides draw theirs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aqua_client.tracing import HEADER

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from aqua_client.tracing import Attribute, Tracer
    from aqua_protocol import AquaError
    from aqua_protocol.wire import TraceParent
    from aqualib.leasing.attachment import Attachment
    from aqualib.memory.frame import Lender
    from aqualib.producer.lending_state import ReclaimNotice

SAMPLE_S: Final = 0.1
"""Seconds between two page-outs that are drawn: 10 spans a second, a thousandth of a core. Doubled,
a trace shows half as many."""

NOT_RETURNED: Final = "not_returned"
"""Fixed, as a value of `error.type`: the consumer ended without giving the slabs back."""

LATE_S: Final = 0.05
"""Seconds between the end of a reclaim and the drawing of its span, in which the engine that waited
for the memory goes on. Doubled, spans leave as much later; their times stay."""


class PageOutTrace:
    """The page-outs of one consumer; used by engine threads and the leasing thread.

    Args:
        tracer: Makes the spans.
        attachments: The leases in use, oldest first.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        tracer: Tracer,
        attachments: Callable[[], Sequence[Attachment]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tracer: Final = tracer
        self._attachments = attachments
        self._clock = clock
        self._lock = threading.Lock()
        self._due_at_s = float("-inf")
        self._count = self._bytes = 0
        self._cause: Span | None = None
        self._request: Span | None = None

    def note(self, nbytes: int) -> bool:
        """Count a page-out that is about to be copied; whether it is to be drawn."""
        with self._lock:
            self._count += 1
            self._bytes += nbytes
            if (now_s := self._clock()) < self._due_at_s:
                return False
            self._due_at_s = now_s + SAMPLE_S
            return True

    def draw(self, nbytes: int, seconds: float, lenders: Sequence[Lender]) -> None:
        """Draw a page-out that took so long and has just ended.

        Args:
            nbytes: What it copied.
            seconds: How long that took.
            lenders: The leases that its bytes went to; none if all stay on the host.
        """
        leases = self._attachments()
        traces = [one.trace for one in leases if one.trace is not None and one in lenders]
        traces = traces or [one.trace for one in leases if one.trace is not None][-1:]
        place = "peer" if lenders else "host"
        with self._lock:
            count, self._count = self._count, 0
            total, self._bytes = self._bytes, 0
            if self._request is not None and place == "host":
                traces = [self._request]
        span = self.tracer.begin(
            "page_out",
            parent=traces[0] if traces else None,
            links=traces[1:],
            start_ns=time.time_ns() - round(seconds * 1e9),
            attributes={
                "aqua.bytes": nbytes,
                "aqua.place": place,
                "aqua.page_outs": count,
                "aqua.page_outs.bytes": total,
            },
        )
        span.end()
        if not traces:
            with self._lock:
                self._cause = span

    @contextlib.contextmanager
    def requesting(self, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
        """A request for a lease, in the trace of the latest page-out that had none before.

        A request that is refused leaves that trace to the next.
        """
        with self._lock:
            cause = self._cause
        with self.tracer.span("lease", parent=cause, attributes=attributes) as span:
            with self._lock:
                self._request = span
            try:
                yield span
            finally:
                with self._lock:
                    self._request = None
                    self._due_at_s = float("-inf")  # Leases may have changed.

    def granted(self) -> None:
        """A lease has been taken up: the next one belongs to another trace."""
        with self._lock:
            self._cause = None


class SpanQueue:
    """Spans of a producer that are drawn a little later; used under the producer's lock.

    Drawing a span takes a tenth of a millisecond of lock and interpreter, and the thread that waits
    for a reclaim needs both at that very moment.

    Args:
        tracer: Makes the spans; None where tracing is off, and then there are none.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer: Final = tracer
        self._due_at_s = float("inf")
        self._spans: list[Callable[[], None]] = []

    def add(
        self,
        name: str,
        told: Mapping[str, str],
        began_ns: int,
        error: AquaError | str | None,
        attributes: Mapping[str, Attribute],
    ) -> None:
        """What has just ended is a span, `LATE_S` after the first that waits here.

        Args:
            name: Of few values.
            told: Headers with the span of the other side, under which it is drawn.
            began_ns: By the system's clock.
            error: What went wrong, or its code; None if nothing did.
            attributes: By name.
        """
        if (tracer := self.tracer) is None:
            return
        ended_ns = time.time_ns()

        def draw() -> None:
            span = tracer.begin(
                name,
                kind="server",
                parent=tracer.context_of(told),
                start_ns=began_ns,
                attributes=attributes,
            )
            tracer.end(span, error, ended_ns)

        self._spans.append(draw)
        self._due_at_s = min(self._due_at_s, time.monotonic() + LATE_S)

    def tick(self, now_s: float) -> float:
        """Draw what is due; returns when to look again, by the monotonic clock."""
        if self._due_at_s <= now_s:
            self.draw()
        return self._due_at_s

    def draw(self) -> None:
        """Draw all that waits."""
        spans, self._spans = self._spans, []
        self._due_at_s = float("inf")
        for draw in spans:
            draw()


class LeaseTrace:
    """What a producer does with one lease; used under the producer's lock.

    Args:
        spans: Draws it.
        lease_id: The lease.
        traceparent: The consumer's span, under which all of it is drawn; None if it does not trace.
    """

    def __init__(
        self, spans: SpanQueue, lease_id: str = "", traceparent: TraceParent | None = None
    ) -> None:
        self._spans = spans
        self._lease_id = lease_id
        self._told = {} if traceparent is None else {HEADER: traceparent}
        self._began_ns = time.time_ns()
        self._asked: list[tuple[ReclaimNotice, set[int], int]] = []

    def handed_out(self, failure: AquaError | None) -> None:
        """The slabs have been sent, or could not be."""
        if self._told:
            self._add("hand_out", self._began_ns, failure, {})

    def asked(self, notice: ReclaimNotice) -> None:
        """Slabs are asked back."""
        if self._spans.tracer is not None:
            slab_ids: set[int] = {slab_id for slab_id, _ in notice.slabs}
            self._asked.append((notice, slab_ids, time.time_ns()))

    def released(self, slab_id: int) -> None:
        """A slab is back; reclaims that asked for nothing else are over."""
        for notice, missing, began_ns in self._asked:
            missing.discard(slab_id)
            if not missing:
                self._add_reclaim(notice, began_ns, None)
        if self._asked:
            self._asked = [one for one in self._asked if one[1]]

    def ended(self) -> None:
        """The consumer is gone, and the lease holds nothing any more."""
        for notice, _, began_ns in self._asked:
            self._add_reclaim(notice, began_ns, NOT_RETURNED)
        self._asked = []

    def _add_reclaim(self, notice: ReclaimNotice, began_ns: int, error: str | None) -> None:
        about: dict[str, Attribute] = {
            "aqua.reclaim.id": notice.reclaim_id,
            "aqua.slabs": len(notice.slabs),
            "aqua.deadline_s": notice.deadline_s,
        }
        self._add("reclaim", began_ns, error, about)

    def _add(
        self,
        name: str,
        began_ns: int,
        error: AquaError | str | None,
        about: Mapping[str, Attribute],
    ) -> None:
        attributes = {"aqua.lease.id": self._lease_id, **about}
        self._spans.add(name, self._told, began_ns, error, attributes)
