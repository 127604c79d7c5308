"""Metrics of one thread, told as Prometheus expects them."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from aqua_coordinator.lane_protocol import CorkedTransport
from aqua_coordinator.metrics import Durations, Metrics


@pytest.mark.parametrize("seconds", [0.0, 0.0002, 0.00021, 0.4, 5.0, 60.0])
def test_durations_read_like_prometheus_clients_own_histogram(seconds: float) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("d", "Help.", ("command",))
    ours.register(durations)
    durations.observe(("get",), seconds)
    durations.observe(("get",), 0.003)
    bounds = durations.bounds
    histogram = Histogram("d", "Help.", ("command",), buckets=bounds, registry=theirs)
    histogram.labels("get").observe(seconds)
    histogram.labels("get").observe(0.003)

    def lines(registry: CollectorRegistry) -> set[str]:
        text = generate_latest(registry).decode().splitlines()
        return {line for line in text if "_created" not in line}

    assert lines(ours) == lines(theirs)


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


class _Wire:
    """What reaches the kernel."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        """One system call."""
        self.writes.append(data)

    def close(self) -> None:
        """The end."""
        self.closed = True

    def is_closing(self) -> bool:
        """Anything else a transport has."""
        return self.closed


async def test_behind_the_cork_one_turn_of_the_loop_is_one_write() -> None:
    wire = _Wire()
    corked = CorkedTransport(wire, asyncio.get_running_loop())  # type: ignore[arg-type] # a stand-in
    corked.write(b"head ")
    corked.write(b"body")
    assert wire.writes == []
    await asyncio.sleep(0)
    corked.write(b"next")
    await asyncio.sleep(0)
    assert wire.writes == [b"head body", b"next"]
    corked.write(b"last words")
    corked.close()
    await asyncio.sleep(0)
    assert wire.writes[-1] == b"last words"
    assert len(wire.writes) == 3
    assert corked.is_closing()
