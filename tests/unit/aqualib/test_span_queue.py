"""What a producer draws of its leases, and when."""

from __future__ import annotations

import time
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aqua_client.tracing import Tracer
from aqua_protocol.ids import Generation, LeaseId, ReclaimId, SlabId
from aqualib.producer.lending_state import ReclaimNotice
from aqualib.traced_leases import LATE_S, LeaseTrace, SpanQueue

NOTICE: Final = ReclaimNotice(
    LeaseId("lease"),
    ReclaimId("reclaim"),
    1.0,
    [(SlabId(0), Generation(1)), (SlabId(1), Generation(1))],
)
TRACE: Final = f"00-{'a' * 32}-{'b' * 16}-01"


class Room:
    """A lease's trace, and what has been drawn."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = SpanQueue(Tracer(provider))
        self.lease = LeaseTrace(self.spans, "lease", TRACE)

    @property
    def drawn(self) -> list[ReadableSpan]:
        """In order of their ends."""
        return list(self._exporter.get_finished_spans())


def test_a_reclaim_is_drawn_when_nobody_waits_and_ends_when_the_last_slab_is_back() -> None:
    room = Room()
    room.lease.asked(NOTICE)
    room.lease.released(0)
    assert room.spans.tick(time.monotonic()) == float("inf"), "a slab is missing"
    room.lease.released(1)
    over_ns = time.time_ns()
    now_s = time.monotonic()
    due_at_s = room.spans.tick(now_s - LATE_S)
    assert not room.drawn
    assert now_s - LATE_S < due_at_s <= now_s + LATE_S
    assert room.spans.tick(due_at_s) == float("inf")
    (span,) = room.drawn
    assert span.end_time is not None
    assert span.end_time <= over_ns
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == "a" * 32
    room.spans.draw()
    assert len(room.drawn) == 1


def test_what_a_consumer_took_along_is_drawn_as_not_returned() -> None:
    room = Room()
    room.lease.asked(NOTICE)
    room.lease.ended()
    room.spans.draw()
    (span,) = room.drawn
    assert span.attributes is not None
    assert span.attributes["error.type"] == "not_returned"


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_handout_is_drawn_where_the_consumer_traces(*, is_traced: bool) -> None:
    room = Room()
    lease = LeaseTrace(room.spans, "lease", TRACE if is_traced else None)
    lease.handed_out(None)
    room.spans.draw()
    assert [span.name for span in room.drawn] == ["hand_out"] * is_traced


def test_nothing_is_due_where_tracing_is_off() -> None:
    spans = SpanQueue()
    lease = LeaseTrace(spans, "lease", TRACE)
    lease.asked(NOTICE)
    lease.ended()
    lease.handed_out(None)
    assert spans.tick(time.monotonic() + LATE_S) == float("inf")
