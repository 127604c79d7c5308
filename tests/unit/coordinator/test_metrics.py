"""Metrics as Prometheus reads them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Final, cast

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aqua_coordinator.metrics import BooksSnapshot, Metrics
from aqua_coordinator.store.rows import BooksSummary
from aqua_protocol import TransportKind
from aqualib.metrics import ConsumerMetrics
from aqualib.producer.metrics import ProducerMetrics
from aqualib.producer.producer import Producer
from aqualib.producer.reclaims import ReclaimTotals
from aqualib.reporter import Identity
from harness.source_tree import ROOT, modules

REFERENCE: Final = ROOT / "docs" / "operations" / "metrics.md"
NOT_METRICS: Final = {module.package for module in modules()} | {
    "aqua_error",  # the code of the base of all errors
    "aqua_things",  # a package of an example
    "aqua_lender",  # what the names of a producer's metrics begin with
}


@pytest.mark.parametrize(("seconds", "bound"), [(0.0, 0.0002), (0.00021, 0.0005), (5.0, 5.0)])
def test_durations_fall_into_their_bucket_and_all_above(seconds: float, bound: float) -> None:
    metrics = Metrics()
    metrics.redis_answered("get", seconds)
    text = metrics.render(None).decode()
    name = "aqua_redis_command_duration_seconds"
    buckets = dict(
        re.findall(rf'^{name}_bucket{{command="get",le="(.+)"}} (.+)$', text, re.MULTILINE)
    )
    assert {le for le, count in buckets.items() if count == "1.0"} == {
        le for le in buckets if float(le) >= bound
    }
    assert f'{name}_sum{{command="get"}} {seconds}' in text


def test_without_redis_only_what_this_process_did_is_told() -> None:
    metrics = Metrics()
    metrics.answered("/v1/leases", "POST", 503, 0.01)
    text = metrics.render(None).decode()
    assert "aqua_redis_up 0.0" in text
    assert "aqua_leases" not in text
    assert (
        'aqua_coordinator_requests_total{code="503",method="POST",route="/v1/leases"} 1.0' in text
    )


def test_reclaims_are_counted_by_outcome() -> None:
    metrics = Metrics()
    metrics.reclaimed([("returned", 0.012), ("escalated", 6.0), ("dropped", None)])
    text = metrics.render(None).decode()
    for outcome in ("returned", "escalated", "dropped"):
        assert f'aqua_reclaims_total{{outcome="{outcome}"}} 1.0' in text
    assert "aqua_reclaim_duration_seconds_count 2.0" in text


def exposed(text: bytes) -> set[str]:
    """What one looks up: a counter as it is exported, a histogram without its parts."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text.decode())
        if not family.name.endswith("_created")
    }


def exposed_by_coordinator() -> set[str]:
    summary = BooksSummary(
        books_id="books",
        open_reclaim_count=0,
        rightful_count=0,
        quarantined_count=0,
        member_counts={},
        longest_silence_s={},
        stood_s={},
        sums={},
        after=("", ""),
    )
    return exposed(Metrics().render(BooksSnapshot(summary, {}, 1.0, [], [], [])))


def exposed_by_members() -> set[str]:
    numbers = SimpleNamespace(
        offered_bytes=0, leased_bytes=0, quarantined_bytes=0, ended_reclaims=ReclaimTotals()
    )
    producer = ProducerMetrics(cast("Producer", numbers))
    identity = Identity(node="node", domain="domain", gpu_uuid="GPU-0")
    consumer = ConsumerMetrics(TransportKind.MEMFD, identity)
    return exposed(generate_latest(producer.registry) + generate_latest(consumer.registry))


def test_the_reference_has_every_metric_as_it_is_exported_and_no_other() -> None:
    rows = re.findall(r"^\| (`aqua_[^|]+)", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == exposed_by_coordinator()


def test_no_page_names_a_metric_that_is_not_exported() -> None:
    """A page about an engine shows what only the engine exports: those are named here."""
    known = exposed_by_coordinator() | exposed_by_members() | {"aqua_lender_absent_blocks"}
    unknown = {
        (str(page.relative_to(ROOT)), name)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"\baqua_[a-z_]*[a-z]\b(?!\.)", page.read_text(encoding="utf-8"))
        if name not in known and name not in NOT_METRICS
    }
    assert unknown == set()
