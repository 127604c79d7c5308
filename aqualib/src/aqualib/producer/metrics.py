"""What a producer counts, for Prometheus.

Read from the producer when somebody looks; nothing is counted twice and nothing costs a step. The
coordinator's `aqua_producer_*` say the same as its books have it, by producer; these carry no
labels, because a process has one producer and its scraper knows which. `aqua_lender_info` says what
the books call it, and joins the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aqua_protocol import ConfigError
from aqualib.metrics import loop_families
from aqualib.producer.offer_rule import Pressure
from aqualib.producer.profile_follower import ProfileState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.producer.lender import MemoryLender
    from aqualib.producer.reclaims import ReclaimTotals


class ProducerMetrics(Collector):
    """The metrics of one producer.

    Args:
        registry: Where to register; None makes a registry of its own.

    Raises:
        ConfigError: The registry has an Aqua producer already.
    """

    def __init__(self, producer: MemoryLender, registry: CollectorRegistry | None = None) -> None:
        self.registry: Final = registry or CollectorRegistry()
        self._producer = producer
        try:
            self.registry.register(self)
        except ValueError as error:
            raise ConfigError(
                f"this registry has the metrics of another Aqua producer: {error}",
                remedy="Give each producer its own registry.",
            ) from error

    @property
    def ended_reclaims(self) -> ReclaimTotals:
        """Reclaims that are complete."""
        return self._producer.ended_reclaims

    def close(self) -> None:
        """Leave the registry."""
        self.registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Everything, as `collect` does: reading costs next to nothing."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        producer, ended = self._producer, self.ended_reclaims
        who = producer.identity
        names = {"producer": producer.producer_id, "model": who.model or ""}
        place = {"node": who.node, "gpu_uuid": who.gpu_uuid}
        yield InfoMetricFamily("aqua_lender", "The producer in the books.", names | place)
        for name, text, value in (
            ("offered_bytes", "Slabs under the offer, lent or not.", producer.offered_bytes),
            ("leased_bytes", "Slabs held by consumers.", producer.leased_bytes),
            ("quarantined_bytes", "Slabs kept past a deadline.", producer.quarantined_bytes),
        ):
            yield GaugeMetricFamily(f"aqua_lender_{name}", text, value=value)
        for name, text, total in (
            ("reclaims", "Times that memory was taken back.", ended.count),
            ("reclaimed_bytes", "Memory that was taken back.", ended.returned_bytes),
            ("reclaim_seconds", "Until the memory could be used again.", ended.seconds),
        ):
            yield CounterMetricFamily(f"aqua_lender_{name}", text, value=total)
        causes = CounterMetricFamily(
            "aqua_lender_pressures",
            "Times that the engine's load had memory taken back.",
            labels=["cause"],
        )
        for cause in Pressure:
            causes.add_metric([cause.value], producer.pressures[cause])
        yield causes
        if producer.profile_follower is not None:
            states = GaugeMetricFamily(
                "aqua_lender_profile",
                "1 at what there is of a profile to go by, else 0.",
                labels=["state"],
            )
            for state in ProfileState:
                states.add_metric([state.value], state is producer.profile_follower.state)
            yield states
        yield from loop_families("aqua_lender")
