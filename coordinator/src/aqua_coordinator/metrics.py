"""Prometheus metrics: what this coordinator did, and what the books hold.

Counters and histograms are this process's own and add up over coordinators. Gauges about members
and leases are read from the books at each scrape, so every coordinator of one Redis shows
the same: take `max by (...)` over instances, not `sum`.

What a scrape costs does not grow with the cluster. Counts are of its moment; sums over all members
are of the last round of `member_totals`, whose time is told. A role's members are labels while they
are at most `MAX_LABELLED_MEMBERS`; beyond that none is, rather than some; so with tenants. Leases
are never labels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aqua_coordinator import __version__
from aqua_coordinator.store.rows import BooksSummary, ClosedReclaim, ProducerRow
from aqua_protocol.lease import BOOKED_STATES
from aqua_protocol.leases import QuotaView
from aqua_protocol.members import ConsumerView
from aqua_protocol.supervision import failing_loops, restart_counts

_FAST_BUCKETS: Final = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""From the time of a script in Redis to the store's timeout."""
_RECLAIM_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From the promise for the first slab (20 ms) past the default deadline."""

_MEMBER_GAUGES: Final = {
    "producer": (
        ("aqua_producer_offered_bytes", "Volunteered.", "offered_bytes"),
        ("aqua_producer_leased_bytes", "Leased out.", "leased_bytes"),
        ("aqua_producer_queue_length", "Requests waiting in the engine.", "queue_length"),
    ),
    "consumer": (
        ("aqua_consumer_leased_bytes", "On lease.", "leased_bytes"),
        ("aqua_consumer_wanted_bytes", "Peer memory it would take.", "wanted_bytes"),
        ("aqua_consumer_spilled_host_bytes", "In host memory for want of it.", "spilled_bytes"),
    ),
}
"""Name, documentation and field of the gauges that each member has, by its role."""

_TENANT_GAUGES: Final = (
    ("aqua_tenant_leased_bytes", "On lease of a tenant's consumers.", "leased_bytes"),
    ("aqua_tenant_nominal_bytes", "What it may lease of its own right.", "nominal_bytes"),
    ("aqua_tenant_borrowed_bytes", "On lease beyond that.", "borrowed_bytes"),
)
"""Name, documentation and field of the gauges that each tenant has."""

MAX_LABELLED_MEMBERS: Final = 256
"""Members of a role with gauges of their own, chosen by hand: a scrape of as many producers and
consumers takes some 15 ms. Doubled, so does that."""
_SUMS: Final = (
    ("aqua_offered_bytes", "Volunteered by all producers.", "offered_bytes"),
    ("aqua_leased_bytes", "Leased out by all producers.", "leased_bytes"),
    ("aqua_queue_length", "Requests waiting in the engines of all producers.", "queue_length"),
    ("aqua_wanted_bytes", "Peer memory that all consumers would take.", "wanted_bytes"),
    ("aqua_spilled_host_bytes", "In host memory of all consumers for want of it.", "spilled_bytes"),
)
"""Name, documentation and field of the sums over all members."""


@dataclass(frozen=True, slots=True)
class BooksSnapshot:
    """The books as gauges show them; members only of a role that is small enough."""

    summary: BooksSummary
    sums: Mapping[str, int]
    summed_at_s: float
    producers: list[ProducerRow]
    consumers: list[ConsumerView]
    tenants: list[QuotaView]


class Metrics:
    """All metrics of one coordinator, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=_FAST_BUCKETS)
        requests = counter(
            "aqua_coordinator_requests", "HTTP requests answered.", ("route", "method", "code")
        )
        request_seconds = histogram(
            "aqua_coordinator_request_duration_seconds",
            "Time from the end of a request's head to the end of its answer.",
            ("route", "method"),
        )
        # Finding the child of its labels costs the client more than counting: `cache`.
        self._answers = cache(
            lambda route, method, code: (
                requests.labels(route, method, code),
                request_seconds.labels(route, method),
            )
        )
        self.connections_closed = counter(
            "aqua_coordinator_connections_closed",
            "Connections closed: late, unread, overlong, crowded out, or refused by TLS.",
            ("reason",),
        )
        self.quota_refusals = counter(
            "aqua_quota_refusals",
            "Grants refused by the quota of a consumer, a tenant or a cohort.",
            ("quota",),
        )
        self.rate_refusals = counter(
            "aqua_coordinator_rate_refusals",
            "Requests refused because a token or a tenant asks too often.",
            ("kind",),
        )
        self.audit_failures = counter(
            "aqua_coordinator_audit_failures", "Lines of the audit log that were not written."
        )
        self._redis_seconds = cache(
            histogram(
                "aqua_redis_command_duration_seconds",
                "Time from submitting a command or script to its answer.",
                ("command",),
            ).labels
        )
        self.requests_in_flight = gauge(
            "aqua_coordinator_requests_in_flight", "HTTP requests being served."
        )
        self.event_streams = gauge("aqua_coordinator_event_streams", "Event streams being served.")
        self._reclaim_seconds = histogram(
            "aqua_reclaim_duration_seconds",
            "Time from the start of a reclaim to its last slab, measured by the producer.",
            buckets=_RECLAIM_BUCKETS,
        )
        self._first_slab_seconds = histogram(
            "aqua_reclaim_first_slab_seconds",
            "Time from the start of a reclaim to its first slab, measured by the producer.",
            buckets=_RECLAIM_BUCKETS,
        )
        self._reclaims = counter(
            "aqua_reclaims",
            "Reclaims closed: returned in time, escalated past the deadline, or dropped.",
            ("outcome",),
        )
        self._attach_seconds = histogram(
            "aqua_lease_attach_duration_seconds",
            "Time from a grant to the producer's report of slabs handed out.",
        )
        self.endings = counter(
            "aqua_sweep_endings", "Leases expired and members given up by this coordinator's sweep."
        )
        gauge("aqua_coordinator_info", "Always 1.", ("version",)).labels(__version__).set(1)
        # A rate needs the zero before the first.
        for counted, reasons in (
            (self.quota_refusals, ("consumer", "tenant", "cohort")),
            (self.rate_refusals, ("grants", "reports")),
            (self._reclaims, ("returned", "escalated", "dropped")),
        ):
            for reason in reasons:
                counted.labels(reason)

    def answered(self, route: str, method: str, code: int, seconds: float) -> None:
        """Count one request."""
        counted, timed = self._answers(route, method, code)
        counted.inc()
        timed.observe(seconds)

    def redis_answered(self, command: str, seconds: float) -> None:
        """Count one command."""
        self._redis_seconds(command).observe(seconds)

    def attached(self, waits_s: Iterable[float]) -> None:
        """Count leases that producers have reported attached."""
        for wait_s in waits_s:
            self._attach_seconds.observe(wait_s)

    def reclaimed(self, closed: Iterable[ClosedReclaim]) -> None:
        """Count reclaims that have closed."""
        for reclaim in closed:
            self._reclaims.labels(reclaim.outcome).inc()
            if reclaim.total_s is not None:
                self._reclaim_seconds.observe(reclaim.total_s)
            if reclaim.first_slab_s is not None:
                self._first_slab_seconds.observe(reclaim.first_slab_s)

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
        restarts = CounterMetricFamily(
            "aqua_coordinator_loop_restarts", "Crashes of background loops.", labels=["loop"]
        )
        for kind, count in restart_counts().items():
            restarts.add_metric([kind], count)
        yield restarts
        failing = [((), len(failing_loops()))]
        text = "Loops that crash again and again, or hang."
        yield _gauge("aqua_coordinator_loops_failing", text, (), failing)
        books = self._snapshot
        answered = [((), float(books is not None))]
        yield _gauge("aqua_redis_up", "Whether Redis answered this scrape.", (), answered)
        if books is None:
            return
        by_state = books.summary.leases_by_state(books.sums)
        leases = [((state,), by_state[state]) for state in sorted(BOOKED_STATES)]
        yield _gauge("aqua_leases", "Leases in the books.", ("state",), leases)
        quarantined = CounterMetricFamily(
            "aqua_books_quarantined", "Records set aside since the books were made."
        )
        quarantined.add_metric((), books.summary.quarantined_count)
        yield quarantined
        pending = [((), books.summary.open_reclaim_count)]
        yield _gauge("aqua_reclaim_pending", "Reclaims under way or not taken up.", (), pending)
        stood = CounterMetricFamily(
            "aqua_books_clock_stopped_seconds",
            "Time in which nothing aged: no coordinator was there, or none for long; reports were "
            "refused for want of room; most members were silent at once.",
            labels=("reason",),
        )
        for reason, seconds in books.summary.stood_s.items():
            stood.add_metric((reason,), seconds)
        yield stood
        counts = [((role,), number) for role, number in books.summary.member_counts.items()]
        yield _gauge("aqua_members", "Members in the books.", ("role",), counts)
        now_s = time.time()
        yield _gauge(
            "aqua_oldest_heartbeat_timestamp_seconds",
            "Unix time of the last report of the member that has been silent for longest.",
            ("role",),
            [((role,), now_s - age_s) for role, age_s in books.summary.longest_silence_s.items()],
        )
        for name, documentation, field in _SUMS if books.summed_at_s else ():
            yield _gauge(name, documentation, (), [((), books.sums.get(field, 0))])
        summed_at = [((), books.summed_at_s)] if books.summed_at_s else []
        yield _gauge("aqua_sums_timestamp_seconds", "Unix time of these sums.", (), summed_at)
        for name, documentation, field in _TENANT_GAUGES:
            samples = [
                ((view.tenant,), value)
                for view in books.tenants
                if (value := getattr(view, field)) is not None
            ]
            yield _gauge(name, documentation, ("tenant",), samples)
        members: dict[str, dict[str, ProducerRow | ConsumerView]] = {
            "producer": {row.producer_id: row for row in books.producers},
            "consumer": {view.consumer_id: view for view in books.consumers},
        }
        for role, views in members.items():
            labels = (role, "node", "gpu_uuid", "model")
            for name, documentation, field in _MEMBER_GAUGES[role]:
                own = [
                    ((member, view.node, view.gpu_uuid, view.model or ""), value)
                    for member, view in views.items()
                    if (value := getattr(view, field)) is not None
                ]
                yield _gauge(name, documentation, labels, own)
        yield _gauge(
            "aqua_engine_last_heartbeat_timestamp_seconds",
            "Unix time of a member's last report.",
            ("role", "member"),
            [
                ((role, member), now_s - view.silent_s)
                for role, views in members.items()
                for member, view in views.items()
            ],
        )


def _gauge(
    name: str,
    documentation: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family
