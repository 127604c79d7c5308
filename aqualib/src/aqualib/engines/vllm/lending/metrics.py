"""What a lending engine counts, for Prometheus.

    aqua_lender_offered_bytes           slabs under the offer, lent or not
    aqua_lender_leased_bytes            of these, held by consumers
    aqua_lender_absent_blocks           KV blocks that the engine does without
    aqua_lender_reclaims_total          times that memory was taken back
    aqua_lender_reclaimed_bytes_total   how much it was
    aqua_lender_reclaim_seconds_total   from the decision until the engine had its blocks again

The scheduler's process is not the one that serves vLLM's `/metrics`, and vLLM carries figures from
here to there for connectors only. So they have a registry, and on request a port, of their own.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.engines.vllm.lending.estate import KvEstate
    from aqualib.producer.lender import Producer
    from aqualib.producer.reclaims import Reclaim


class LenderMetrics(Collector):
    """See the module; on a registry of its own.

    Args:
        estate: Whose blocks.
        producer: Who lends them.

    Attributes:
        registry: Where the metrics are.
        reclaim_count: Reclaims that have ended.
        reclaimed_bytes: What they brought back.
        reclaim_s: How long they took, one added to the other.
    """

    def __init__(self, estate: KvEstate, producer: Producer) -> None:
        self._estate = estate
        self._producer = producer
        self._lock = threading.Lock()
        self._open: list[tuple[Reclaim, float]] = []
        self.reclaim_count = 0
        self.reclaimed_bytes = 0
        self.reclaim_s = 0.0
        self.registry: Final = CollectorRegistry()
        self.registry.register(self)

    def reclaim_began(self, reclaim: Reclaim) -> None:
        """Memory was asked back."""
        with self._lock:
            self._open.append((reclaim, time.monotonic()))

    def blocks_came_back(self) -> None:
        """The engine has blocks again: count the reclaims that are complete with them."""
        now_s = time.monotonic()
        with self._lock:
            for reclaim, began_s in self._open:
                if reclaim.done:
                    self.reclaim_count += 1
                    self.reclaimed_bytes += reclaim.returned_bytes
                    self.reclaim_s += now_s - began_s
            self._open = [pair for pair in self._open if not pair[0].done]

    def describe(self) -> Iterator[Metric]:
        """As `collect`: reading costs next to nothing."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        producer = self._producer
        for name, text, value in (
            ("offered_bytes", "Slabs under the offer, lent or not.", producer.offered_bytes),
            ("leased_bytes", "Slabs held by consumers.", producer.leased_bytes),
            ("absent_blocks", "KV blocks that the engine does without.", self._estate.out_blocks),
        ):
            yield GaugeMetricFamily(f"aqua_lender_{name}", text, value=value)
        with self._lock:
            counts = (
                ("reclaims", "Times that memory was taken back.", self.reclaim_count),
                ("reclaimed_bytes", "Memory that was taken back.", self.reclaimed_bytes),
                ("reclaim_seconds", "Until the engine had its blocks again.", self.reclaim_s),
            )
        for name, text, total in counts:
            yield CounterMetricFamily(f"aqua_lender_{name}", text, value=total)
