"""What an engine says of itself to Prometheus, in the process that answers its requests."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest

from aqualib.engines.vllm.operations.metrics import AquaPromMetrics, Meter

# vLLM and torch warn about themselves and each other; not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")


def test_a_time_that_falls_is_told_as_none_and_raises_nothing() -> None:
    """An error here ends every request that vLLM has."""
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    shown = AquaPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: partial(kind, registry=registry) for kind in kinds},
        ["engine"],
        {0: ["0"]},
    )
    meter = Meter()
    for total_s in (2.0, 1.5, 3.0):
        added = meter.read({"kv_step_wait_seconds": total_s})
        assert added is not None
        shown.observe(added.data)
    told = registry.get_sample_value("aqua:kv_step_wait_seconds_total", {"engine": "0"})
    assert told == pytest.approx(3.5)
