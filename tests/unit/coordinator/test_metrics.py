"""Metrics as Prometheus reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aqua_coordinator import metrics as metrics_module
from aqua_coordinator.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]


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


def test_every_metric_stands_in_the_reference() -> None:
    source = Path(metrics_module.__file__).read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text(encoding="utf-8")
    names = set(re.findall(r'"(aqua_[a-z_]+)"', source))
    assert len(names) > 20
    assert {name for name in names if name not in page} == set()
