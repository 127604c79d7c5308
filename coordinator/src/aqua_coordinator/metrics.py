"""Prometheus metrics: what this coordinator did, and what the books hold.

Counters and histograms are this process's own and add up over coordinators. Gauges about members
and leases are read from the books at each scrape, so every coordinator of one Redis shows
the same: take `max by (...)` over instances, not `sum`. Members are labels, leases never are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aqua_coordinator import __version__
from aqua_coordinator.store.rows import BooksSummary, ProducerRow
from aqua_protocol.lease import BOOKED_STATES
from aqua_protocol.members import ConsumerView

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_FAST_BUCKETS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""From the time of a script in Redis to the store's timeout."""
_RECLAIM_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From the promise for the first slab (20 ms) past the default deadline."""


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
        yield from self._producers(self._snapshot.producers)
        yield from self._consumers(self._snapshot.consumers)
        seen = GaugeMetricFamily(
            "aqua_engine_last_heartbeat_timestamp_seconds",
            "Unix time of a member's last report.",
            labels=("role", "member"),
        )
        now_s = time.time()
        for row in self._snapshot.producers:
            seen.add_metric(("producer", row.view.producer_id), now_s - row.view.silent_s)
        for consumer in self._snapshot.consumers:
            seen.add_metric(("consumer", consumer.consumer_id), now_s - consumer.silent_s)
        yield seen

    @staticmethod
    def _producers(rows: list[ProducerRow]) -> Iterator[Metric]:
        labels = ("producer", "node", "gpu_uuid", "model")
        offered = GaugeMetricFamily("aqua_producer_offered_bytes", "Volunteered.", labels=labels)
        leased = GaugeMetricFamily("aqua_producer_leased_bytes", "Leased out.", labels=labels)
        queue = GaugeMetricFamily(
            "aqua_producer_queue_length", "Requests waiting in the engine.", labels=labels
        )
        for row in rows:
            view = row.view
            values = (view.producer_id, view.node, view.gpu_uuid, view.model or "")
            offered.add_metric(values, view.offered_bytes)
            leased.add_metric(values, view.leased_bytes)
            if row.queue_length is not None:
                queue.add_metric(values, row.queue_length)
        yield from (offered, leased, queue)

    @staticmethod
    def _consumers(views: list[ConsumerView]) -> Iterator[Metric]:
        labels = ("consumer", "node", "gpu_uuid", "model")
        leased = GaugeMetricFamily("aqua_consumer_leased_bytes", "On lease.", labels=labels)
        wanted = GaugeMetricFamily(
            "aqua_consumer_wanted_bytes", "Peer memory it would take.", labels=labels
        )
        spilled = GaugeMetricFamily(
            "aqua_consumer_spilled_host_bytes", "In host memory for want of it.", labels=labels
        )
        for view in views:
            values = (view.consumer_id, view.node, view.gpu_uuid, view.model or "")
            leased.add_metric(values, view.leased_bytes)
            wanted.add_metric(values, view.wanted_bytes)
            spilled.add_metric(values, view.spilled_bytes)
        yield from (leased, wanted, spilled)
