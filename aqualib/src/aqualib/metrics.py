"""What a consumer counts: for Prometheus, and as a snapshot that costs nothing to take.

Transfers are counted as they happen; everything else is read from the store and the leases when
somebody looks. The metrics live on a registry of the host's choice, or on a private one, because a
library that fills the default registry by itself collides with the engine it lives in.

    aqua_transfer_bytes_total{direction, transport}          paged between engine and store
    aqua_transfer_duration_seconds{direction, transport}     from the call to the last byte
    aqua_transfer_failures_total{reason}                     by error code
    aqua_consumer_leased_bytes{node, gpu_uuid, model}        slabs of peers mapped here
    aqua_consumer_spilled_host_bytes{node, gpu_uuid, model}  in host memory for want of them
    aqua_consumer_used_bytes, aqua_consumer_lost_bytes       wherever they are; unreadable
    aqua_consumer_promoted_bytes_total, aqua_consumer_drained_bytes_total
    aqua_consumer_written_behind_bytes_total                 copied ahead of reclaims
    aqua_consumer_returned_bytes_total, aqua_consumer_pins_overdue_total
    aqua_consumer_loop_restarts_total{loop}, aqua_consumer_loops_failing
    aqua_ipc_transport_info{transport}                       really in use, as measured
    aqua_ipc_link_bytes_per_second{transport, direction}     the slowest path in use

No lease, tensor or producer names as labels: they come and go, and time series do not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aqua_protocol import (
    ChecksumMismatchError,
    ConfigError,
    DataLostError,
    LeaseLostError,
    TransportError,
)
from aqua_protocol.supervision import failing_loops, restart_counts
from aqualib.memory.frame_table import StoreStats

if TYPE_CHECKING:
    from aqua_protocol import AquaError, TransportKind
    from aqualib.leasing.attachment import ReclaimRecord
    from aqualib.probe import LinkMeasurement
    from aqualib.reporter import Identity

DURATION_BUCKETS_S: Final = tuple(1e-5 * 4**step for step in range(10))
"""Seconds: from 10 us, a small page over NVLink, to 2.6 s, tens of gigabytes from host memory.
Twice as many buckets would double the time series."""

TRANSFER_ERRORS: Final = (ChecksumMismatchError, DataLostError, LeaseLostError, TransportError)
"""What transfers raise."""

MAX_UNCOUNTED: Final = 1024
"""Transfers whose durations wait to be counted until somebody looks. Doubled, the one that counts
them all takes 4 ms instead of 2."""


class Direction(StrEnum):
    """The way that bytes go, as the engine sees it."""

    OUT = "out"
    IN = "in"


@dataclass(slots=True, kw_only=True)
class Stats(StoreStats):
    """One consumer at one instant: what its store has seen, and what its leases and transfers add.

    Attributes:
        paged_out_bytes: From the engine into the store so far.
        paged_in_bytes: Back so far.
        leased_bytes: Slabs of peers that are mapped, used or not.
        reclaims: The latest ones, oldest first.
        links: Paths in use, each as measured when its lease began.
    """

    paged_out_bytes: int
    paged_in_bytes: int
    leased_bytes: int
    reclaims: tuple[ReclaimRecord, ...]
    links: tuple[LinkMeasurement, ...]


class ConsumerMetrics(Collector):
    """The metrics of one consumer.

    Args:
        registry: Where to register; None makes a registry of its own.

    Raises:
        ConfigError: The registry has an Aqua consumer already.
    """

    def __init__(
        self,
        transport: TransportKind,
        identity: Identity,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry: Final = registry or CollectorRegistry()
        self._transport = transport
        self._place = [identity.node, identity.gpu_uuid, identity.model or ""]
        self._read: Callable[[], Stats] | None = None
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(Direction, 0)
        # Transfers that have not been counted yet; appending needs no lock.
        self._finished: deque[tuple[Direction, int, float]] = deque()
        name, text = "aqua_transfer_duration_seconds", "Time from the call to the last byte."
        labels = ["direction", "transport"]
        self._durations = Histogram(name, text, labels, buckets=DURATION_BUCKETS_S, registry=None)
        # Children are looked up once: `labels` costs more than the observation.
        self._duration_of = {
            direction: self._durations.labels(direction.value, transport.value)
            for direction in Direction
        }
        name, text = "aqua_transfer_failures", "Transfers that raised, by error code."
        self._failures = Counter(name, text, ["reason"], registry=None)
        for kind in TRANSFER_ERRORS:  # A rate needs the zero before the first.
            self._failures.labels(kind.code)
        try:
            self.registry.register(self)
        except ValueError as error:
            raise ConfigError(
                f"this registry has the metrics of another Aqua consumer: {error}",
                remedy="Give each Aqua instance its own registry.",
            ) from error

    @property
    def paged_bytes(self) -> dict[Direction, int]:
        """Bytes transferred so far."""
        with self._lock:
            self._count_finished()
            return dict(self._bytes)

    def read_from(self, read: Callable[[], Stats]) -> None:
        """Where everything but transfers is read when somebody looks."""
        self._read = read

    def note_transfer(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """A transfer is complete; counted later, for a histogram costs as much as a pin."""
        self._finished.append((direction, nbytes, seconds))
        if len(self._finished) >= MAX_UNCOUNTED:
            with self._lock:
                self._count_finished()

    def note_failure(self, error: AquaError) -> None:
        """A transfer has raised."""
        self._failures.labels(error.code).inc()

    def close(self) -> None:
        """Leave the registry."""
        self.registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Names only: nothing is read while registering."""
        return self._families(None)

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        return self._families(None if self._read is None else self._read())

    def _count_finished(self) -> None:
        for _ in range(len(self._finished)):
            direction, nbytes, seconds = self._finished.popleft()
            self._bytes[direction] += nbytes
            self._duration_of[direction].observe(seconds)

    def _families(self, stats: Stats | None) -> Iterator[Metric]:
        paged_bytes = self.paged_bytes  # Counts the latest transfers in the histogram, too.
        yield from self._durations.collect()
        yield from self._failures.collect()
        name, text = "aqua_transfer_bytes", "Bytes paged between the engine and its store."
        moved = CounterMetricFamily(name, text, labels=["direction", "transport"])
        for direction, nbytes in paged_bytes.items():
            moved.add_metric([direction.value, self._transport.value], nbytes)
        yield moved
        yield from self._sums(stats)
        yield from self._paths(stats)
        yield from loop_families("aqua_consumer")

    def _sums(self, stats: Stats | None) -> Iterator[Metric]:
        labels = ["node", "gpu_uuid", "model"]
        for name, text, field in (
            ("leased_bytes", "Slabs of peers mapped here.", "leased_bytes"),
            ("used_bytes", "Bytes stored, wherever they are.", "used_bytes"),
            ("spilled_host_bytes", "Stored in host memory.", "spilled_bytes"),
            ("lost_bytes", "Stored and not readable any more.", "lost_bytes"),
        ):
            family = GaugeMetricFamily(f"aqua_consumer_{name}", text, labels=labels)
            family.add_metric(self._place, getattr(stats, field, 0))
            yield family
        for field, text in (
            ("promoted_bytes", "Moved from host memory to peers."),
            ("drained_bytes", "Moved away from peers."),
            ("written_behind_bytes", "Copied to host memory ahead of a reclaim."),
            ("returned_bytes", "Slabs given back to producers."),
            ("pins_overdue", "Slabs kept too long by a pin."),
        ):
            name = f"aqua_consumer_{field}"
            yield CounterMetricFamily(name, text, value=getattr(stats, field, 0))

    def _paths(self, stats: Stats | None) -> Iterator[Metric]:
        links = stats.links if stats is not None else ()
        info = InfoMetricFamily("aqua_ipc_transport", "Ways of sharing memory in use.")
        name, text = "aqua_ipc_link_bytes_per_second", "Measured rate of the slowest path in use."
        rate = GaugeMetricFamily(name, text, labels=["transport", "direction"])
        if links:  # All of a consumer's go by its own transport.
            info.add_metric([], {"transport": self._transport.value})
            slowest_out = min(link.write_bytes_per_s for link in links)
            slowest_in = min(link.read_bytes_per_s for link in links)
            rate.add_metric([self._transport.value, Direction.OUT.value], slowest_out)
            rate.add_metric([self._transport.value, Direction.IN.value], slowest_in)
        yield info
        yield rate


def loop_families(prefix: str) -> Iterator[Metric]:
    """The crashes of all loops of this process, in metrics of this prefix."""
    text = "Crashes of background loops."
    restarts = CounterMetricFamily(f"{prefix}_loop_restarts", text, labels=["loop"])
    for kind, count in restart_counts().items():
        restarts.add_metric([kind], count)
    yield restarts
    text = "Loops that crash again and again, or hang."
    yield GaugeMetricFamily(f"{prefix}_loops_failing", text, value=len(failing_loops()))
