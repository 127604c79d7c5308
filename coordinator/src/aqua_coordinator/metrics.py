"""Prometheus metrics: what this coordinator did, and what the books hold.

Counters and histograms are this process's own and add up over coordinators. Gauges about members
and leases are read from the books at each scrape, so every coordinator of one Redis shows
the same: take `max by (...)` over instances, not `sum`. Members are labels, leases never are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from aqua_coordinator import __version__
from aqua_coordinator.store.rows import BooksSummary, ProducerRow
from aqua_protocol.lease import BOOKED_STATES
from aqua_protocol.members import ConsumerView

_FAST_BUCKETS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""From the time of a script in Redis to the store's timeout."""
_RECLAIM_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From the promise for the first slab (20 ms) past the default deadline."""

ViewT = TypeVar("ViewT", ProducerRow, ConsumerView)
MemberGauge = tuple[str, str, Callable[[ViewT], int | None]]
"""Name, documentation and value of a gauge that each member has; None: it has none."""

_PRODUCER_GAUGES: Final[tuple[MemberGauge[ProducerRow], ...]] = (
    ("aqua_producer_offered_bytes", "Volunteered.", lambda row: row.offered_bytes),
    ("aqua_producer_leased_bytes", "Leased out.", lambda row: row.leased_bytes),
    ("aqua_producer_queue_length", "Requests waiting in the engine.", lambda row: row.queue_length),
)
_CONSUMER_GAUGES: Final[tuple[MemberGauge[ConsumerView], ...]] = (
    ("aqua_consumer_leased_bytes", "On lease.", lambda view: view.leased_bytes),
    ("aqua_consumer_wanted_bytes", "Peer memory it would take.", lambda view: view.wanted_bytes),
    (
        "aqua_consumer_spilled_host_bytes",
        "In host memory for want of it.",
        lambda view: view.spilled_bytes,
    ),
)


@dataclass(frozen=True, slots=True)
class BooksSnapshot:
    """The books as gauges show them."""

    summary: BooksSummary
    producers: list[ProducerRow]
    consumers: list[ConsumerView]


class Metrics:
    """All metrics of one coordinator, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            "aqua_coordinator_requests",
            "HTTP requests answered.",
            ("route", "method", "code"),
            registry=self._registry,
        )
        request_seconds = Histogram(
            "aqua_coordinator_request_duration_seconds",
            "Time from the end of a request's head to the end of its answer.",
            ("route", "method"),
            buckets=_FAST_BUCKETS,
            registry=self._registry,
        )
        redis_seconds = Histogram(
            "aqua_redis_command_duration_seconds",
            "Time from submitting a command or script to its answer.",
            ("command",),
            buckets=_FAST_BUCKETS,
            registry=self._registry,
        )
        # Finding the child of its labels costs the client more than counting.
        self._requests = cache(requests.labels)
        self._request_seconds = cache(request_seconds.labels)
        self._redis_seconds = cache(redis_seconds.labels)
        self.requests_in_flight = Gauge(
            "aqua_coordinator_requests_in_flight",
            "HTTP requests being served.",
            registry=self._registry,
        )
        self.event_streams = Gauge(
            "aqua_coordinator_event_streams",
            "Event streams being served.",
            registry=self._registry,
        )
        self._reclaim_seconds = Histogram(
            "aqua_reclaim_duration_seconds",
            "Time from the start of a reclaim to its last slab, measured by the producer.",
            buckets=_RECLAIM_BUCKETS,
            registry=self._registry,
        )
        self._reclaims = Counter(
            "aqua_reclaims",
            "Reclaims closed: returned in time, escalated past the deadline, or dropped.",
            ("outcome",),
            registry=self._registry,
        )
        self._attach_seconds = Histogram(
            "aqua_lease_attach_duration_seconds",
            "Time from a grant to the producer's report of slabs handed out.",
            buckets=_FAST_BUCKETS,
            registry=self._registry,
        )
        self._leases_ended = Counter(
            "aqua_sweep_endings",
            "Leases expired and members given up by this coordinator's sweep.",
            registry=self._registry,
        )
        info = Gauge("aqua_coordinator_info", "Always 1.", ("version",), registry=self._registry)
        info.labels(__version__).set(1)

    def answered(self, route: str, method: str, code: int, seconds: float) -> None:
        """Count one request."""
        self._requests(route, method, code).inc()
        self._request_seconds(route, method).observe(seconds)

    def redis_answered(self, command: str, seconds: float) -> None:
        """Count one command."""
        self._redis_seconds(command).observe(seconds)

    def attached(self, waits_s: Iterable[float]) -> None:
        """Count leases that producers have reported attached."""
        for wait_s in waits_s:
            self._attach_seconds.observe(wait_s)

    def reclaimed(self, outcomes: Iterable[tuple[str, float | None]]) -> None:
        """Count reclaims that have closed."""
        for outcome, seconds in outcomes:
            self._reclaims.labels(outcome).inc()
            if seconds is not None:
                self._reclaim_seconds.observe(seconds)

    def swept(self, endings: int) -> None:
        """Count what a sweep ended."""
        self._leases_ended.inc(endings)

    def render(self, snapshot: BooksSnapshot | None) -> bytes:
        """Text for Prometheus; without a snapshot, Redis is down and so are the gauges."""
        registry = CollectorRegistry()
        registry.register(_BooksCollector(snapshot))
        return generate_latest(self._registry) + generate_latest(registry)


class _BooksCollector:
    """The books' gauges for one scrape."""

    def __init__(self, snapshot: BooksSnapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("aqua_redis_up", "Whether Redis answered this scrape.")
        up.add_metric((), 0 if self._snapshot is None else 1)
        yield up
        if self._snapshot is None:
            return
        leases = GaugeMetricFamily("aqua_leases", "Leases in the books.", labels=("state",))
        for state in sorted(BOOKED_STATES):
            leases.add_metric((state,), self._snapshot.summary.leases_by_state[state])
        yield leases
        pending = GaugeMetricFamily("aqua_reclaim_pending", "Reclaims under way or not taken up.")
        pending.add_metric((), self._snapshot.summary.open_reclaim_count)
        yield pending
        producers = {row.producer_id: row for row in self._snapshot.producers}
        consumers = {view.consumer_id: view for view in self._snapshot.consumers}
        yield from _member_gauges("producer", _PRODUCER_GAUGES, producers)
        yield from _member_gauges("consumer", _CONSUMER_GAUGES, consumers)
        seen = GaugeMetricFamily(
            "aqua_engine_last_heartbeat_timestamp_seconds",
            "Unix time of a member's last report.",
            labels=("role", "member"),
        )
        now_s = time.time()
        for name, row in producers.items():
            seen.add_metric(("producer", name), now_s - row.silent_s)
        for name, view in consumers.items():
            seen.add_metric(("consumer", name), now_s - view.silent_s)
        yield seen


def _member_gauges(
    role: str, gauges: Sequence[MemberGauge[ViewT]], views: Mapping[str, ViewT]
) -> Iterator[Metric]:
    for name, documentation, value_of in gauges:
        family = GaugeMetricFamily(name, documentation, labels=(role, "node", "gpu_uuid", "model"))
        for member, view in views.items():
            value = value_of(view)
            if value is not None:
                family.add_metric((member, view.node, view.gpu_uuid, view.model or ""), value)
        yield family
