"""What a lending engine counts, for Prometheus: a producer's metrics, seen from the engine.

    aqua_lender_absent_blocks           KV blocks that the engine does without
    aqua_lender_reclaim_seconds_total   from the decision until the engine had its blocks again

The scheduler's process is not the one that serves vLLM's `/metrics`, and vLLM carries figures from
here to there for connectors only. So they have a registry, and on request a port, of their own.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from aqualib.producer.metrics import ProducerMetrics
from aqualib.producer.reclaims import ReclaimTotals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.engines.vllm.lending.kv_lending import KvLending
    from aqualib.producer.producer import Producer
    from aqualib.producer.reclaims import ReclaimTicket


class LenderMetrics(ProducerMetrics):
    """A producer's and the engine's figures, on a registry of their own.

    A reclaim has ended here when the engine has its blocks: later than for the producer.

    Args:
        lending: Whose blocks.
        producer: Who lends them.
    """

    def __init__(self, lending: KvLending, producer: Producer) -> None:
        self._lending = lending
        self._lock = threading.Lock()
        self._open: list[tuple[ReclaimTicket, float]] = []
        self._ended = ReclaimTotals()
        super().__init__(producer)

    @property
    def ended_reclaims(self) -> ReclaimTotals:
        """The informer's reclaims that brought their blocks back."""
        return self._ended

    def reclaim_began(self, reclaim: ReclaimTicket) -> None:
        """Memory was asked back."""
        with self._lock:
            self._open.append((reclaim, time.monotonic()))

    def blocks_came_back(self) -> None:
        """The engine has blocks again: count the reclaims that are complete with them."""
        now_s = time.monotonic()
        with self._lock:
            for reclaim, began_s in self._open:
                if reclaim.done:
                    self._ended = self._ended.plus(reclaim, now_s - began_s)
            self._open = [pair for pair in self._open if not pair[0].done]

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        yield from super().collect()
        yield GaugeMetricFamily(
            "aqua_lender_absent_blocks",
            "KV blocks that the engine does without.",
            value=self._lending.out_blocks,
        )
