"""Metrics as Prometheus reads them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from types import SimpleNamespace
from typing import Final, cast

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aqua_batch.service.dispatch.metrics import BatchMetrics
from aqua_coordinator.metrics import BooksSnapshot, Metrics
from aqua_coordinator.store.rows import BooksSummary, ClosedReclaim
from aqua_protocol import TransportKind
from aqualib.engines.vllm.lending.kv_lending import KvLending
from aqualib.engines.vllm.lending.lending_service import LenderMetrics
from aqualib.metrics import ConsumerMetrics
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from harness import promql
from harness.source_tree import ROOT

REFERENCE: Final = ROOT / "docs" / "operations" / "metrics.md"
ENGINE_METRICS: Final = ROOT / "aqualib/src/aqualib/engines/vllm/operations/metrics.py"
HISTOGRAM_PARTS: Final = ("bucket", "sum", "count")
NOT_METRICS: Final = {package.name for package in ROOT.glob("*/src/aqua*")} | {
    "aqua_class",  # an argument of a request to vLLM
    "aqua_error",  # the code of the base of all errors
    "aqua_finish_in_s",  # an argument of a request to vLLM
    "aqua_things",  # a package of an example
    "aqua_lender",  # what the names of a producer's metrics begin with
    "aqua_tenant",  # an argument of a request to vLLM
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
    ends = [("returned", 0.012, 0.003), ("escalated", 6.0, 5.5), ("dropped", None, None)]
    metrics.reclaimed(ClosedReclaim(*end) for end in ends)
    text = metrics.render(None).decode()
    for outcome in ("returned", "escalated", "dropped"):
        assert f'aqua_reclaims_total{{outcome="{outcome}"}} 1.0' in text
    assert "aqua_reclaim_duration_seconds_count 2.0" in text
    assert "aqua_reclaim_first_slab_seconds_sum 5.503" in text


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
        has_quotas=False,
        member_counts={},
        longest_silence_s={},
        stood_s={},
        sums={},
        after=("", ""),
    )
    return exposed(Metrics().render(BooksSnapshot(summary, {}, 1.0, [], [], [])))


def exposed_by_members() -> set[str]:
    identity = Identity(node="node", domain="domain", gpu_uuid="GPU-0")
    numbers = SimpleNamespace(
        producer_id="producer",
        identity=identity,
        pressures=Counter(),
        coordinator_error=None,
        profile_follower=SimpleNamespace(state=None),
        **dict.fromkeys(("offered_bytes", "leased_bytes", "quarantined_bytes"), 0),
    )
    lending = SimpleNamespace(out_blocks=0)
    producer = LenderMetrics(cast("KvLending", lending), cast("Producer", numbers))
    consumer = ConsumerMetrics(TransportKind.MEMFD, identity)
    return exposed(generate_latest(producer.registry) + generate_latest(consumer.registry))


def exposed_by_batch_service() -> set[str]:
    return exposed(BatchMetrics().render({}, (0, 0), []))


def exposed_by_vllm() -> set[str]:
    """What stands on vLLM's own page; read as text, for the module needs vLLM."""
    tables = {
        ast.unparse(node.target): ast.literal_eval(node.value)
        for node in ast.parse(ENGINE_METRICS.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }
    counters = {f"aqua:{name}_total" for name in tables["COUNTERS"]}
    return counters | {f"aqua:{name}" for name in tables["GAUGES"]}


def exposed_by_all() -> set[str]:
    return (
        exposed_by_coordinator()
        | exposed_by_members()
        | exposed_by_batch_service()
        | exposed_by_vllm()
    )


def test_the_reference_has_every_metric_as_it_is_exported_and_no_other() -> None:
    rows = re.findall(r"^\| (`aqua[_:][^|]+)", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`([\w:]+)`", "".join(rows))) == exposed_by_all()


def test_no_dashboard_or_rule_reads_a_metric_of_ours_that_is_not_exported() -> None:
    expressions = [*promql.panel_expressions(), *promql.rule_expressions()]
    read = set().union(*(expression.metrics() for expression in expressions))
    ours = {name for name in read if name.startswith(("aqua_", "aqua:"))}
    exported = exposed_by_all()
    series = exported | {f"{name}_{part}" for name in exported for part in HISTOGRAM_PARTS}
    assert ours - series == set()


def test_no_page_names_a_metric_that_is_not_exported() -> None:
    known = exposed_by_all()
    unknown = {
        (str(page.relative_to(ROOT)), name)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"\baqua_[a-z_]*[a-z]\b(?!\.)", page.read_text(encoding="utf-8"))
        if name not in known and name not in NOT_METRICS
    }
    assert unknown == set()
