"""What a producer exports, beside what it does."""

from __future__ import annotations

from contextlib import AbstractContextManager

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

import aqualib
from aqua_protocol import ConfigError
from aqua_protocol.members import ReclaimOrder
from aqualib.producer.metrics import ProducerMetrics
from aqualib.producer.producer import Producer
from harness.bounds import HANG_S, until
from harness.producers import SLAB, lending, socket_dir
from harness.raw_consumer import RawConsumer, TokenIssuer


def found(registry: CollectorRegistry) -> dict[str, float]:
    """Samples by name, without the prefix and without when counters began."""
    return {
        sample.name.removeprefix("aqua_lender_"): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith(("_created", "_info"))
        and "_loop" not in sample.name
        and not sample.labels
    }


def test_metrics_follow_what_is_lent_and_taken_back() -> None:
    issuer = TokenIssuer()
    with lending(issuer, 4) as producer, RawConsumer(producer.endpoint) as consumer:
        registry = ProducerMetrics(producer).registry
        assert registry is not prometheus_client.REGISTRY
        held = consumer.attach(issuer.token(2 * SLAB))
        sizes = {"offered_bytes": 4 * SLAB, "leased_bytes": 2 * SLAB, "quarantined_bytes": 0}
        counts = {"reclaims_total": 0, "reclaimed_bytes_total": 0, "reclaim_seconds_total": 0}
        assert found(registry) == sizes | counts

        free = producer.reclaim(SLAB)
        assert free.wait(HANG_S)
        lent = producer.reclaim(2 * SLAB)
        assert consumer.await_reclaim() == held[-1:]
        assert found(registry)["reclaims_total"] == 1, "the second is still open"
        consumer.give_back(held[-1])
        assert lent.wait(HANG_S)
        after = found(registry)
        assert free.total_ms is not None
        assert lent.total_ms is not None
        assert after.pop("reclaim_seconds_total") == pytest.approx(
            (free.total_ms + lent.total_ms) / 1e3
        )
        assert after == {
            "offered_bytes": SLAB,
            "leased_bytes": SLAB,
            "quarantined_bytes": 0,
            "reclaims_total": 2,
            "reclaimed_bytes_total": 3 * SLAB,
        }


def test_a_reclaim_of_nothing_and_an_operators_order_count_as_what_they_are() -> None:
    issuer = TokenIssuer()
    with lending(issuer, 1) as producer:
        registry = ProducerMetrics(producer).registry
        order = ReclaimOrder(reclaim_id="order", bytes=SLAB, deadline_s=1.0)
        producer.acknowledge(issuer.ack(reclaims=[order]))
        until(lambda: found(registry)["reclaims_total"] == 1, "the order is carried out")
        assert producer.reclaim(SLAB).done
        assert found(registry)["reclaims_total"] == 1
        assert found(registry)["reclaimed_bytes_total"] == SLAB


def test_a_consumer_that_overruns_its_deadline_shows_as_quarantined() -> None:
    issuer = TokenIssuer()
    with lending(issuer, 1) as producer, RawConsumer(producer.endpoint) as consumer:
        registry = ProducerMetrics(producer).registry
        consumer.attach(issuer.token(SLAB))
        producer.reclaim(SLAB, deadline_s=0.001)
        until(lambda: found(registry)["quarantined_bytes"] == SLAB, "the slab is quarantined")


def test_a_producer_says_by_which_names_the_books_know_it() -> None:
    with lending(TokenIssuer(), 1) as producer:
        names = {"producer": producer.producer_id, "node": "node", "gpu_uuid": "GPU-0", "model": ""}
        metrics = ProducerMetrics(producer)
        assert metrics.registry.get_sample_value("aqua_lender_info", names) == 1


def test_a_producer_is_on_the_registry_of_choice_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()

    def opened(name: str) -> AbstractContextManager[Producer]:
        return aqualib.open_producer(name, device="cpu", slab_bytes=SLAB, registry=registry)

    with socket_dir() as directory:
        monkeypatch.setenv("AQUA_SOCKET_DIR", str(directory))
        with opened("one") as producer:
            producer.offer(2 * SLAB)
            assert found(registry)["offered_bytes"] == 2 * SLAB
            with pytest.raises(ConfigError, match="another Aqua producer"), opened("two"):
                pass
            assert found(registry)["offered_bytes"] == 2 * SLAB
        assert found(registry) == {}
