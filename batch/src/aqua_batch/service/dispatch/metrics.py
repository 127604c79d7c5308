"""What Prometheus sees of a service; no names of tenants, prompts or answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aqua_batch.service.dispatch.engines import EngineEndpoint
from aqua_protocol.supervision import failing_loops, restart_counts


class BatchMetrics:
    """The metrics of one service.

    Attributes:
        retries: Requests that went back to wait because an engine failed at them.
        late: Outcomes that were discarded because another worker had taken the request up.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "aqua_batch_answers",
            "Answers of engines by status; 0 where every attempt failed",
            ["status"],
            registry=self._registry,
        )
        self.retries = Counter(
            "aqua_batch_retries",
            "Requests that wait for another try",
            registry=self._registry,
        )
        self.late = Counter(
            "aqua_batch_late_answers",
            "Outcomes discarded because their lease was over",
            registry=self._registry,
        )
        self._batches = Gauge(
            "aqua_batch_batches", "Batches by status", ["status"], registry=self._registry
        )
        self._open = Gauge(
            "aqua_batch_open_requests",
            "Requests of running batches that have not ended",
            registry=self._registry,
        )
        self._behind = Gauge(
            "aqua_batch_late_batches",
            "Running batches whose pace so far misses four fifths of their window",
            registry=self._registry,
        )
        self._running = Gauge(
            "aqua_batch_running_requests",
            "Requests under way by engine",
            ["engine"],
            registry=self._registry,
        )
        self._limit = Gauge(
            "aqua_batch_engine_limit",
            "Requests of batches that an engine gets at once, by feedback",
            ["engine"],
            registry=self._registry,
        )
        self._absent = Gauge(
            "aqua_batch_engine_absent",
            "Whether an engine cannot be reached or has no room",
            ["engine"],
            registry=self._registry,
        )
        self._registry.register(_LoopCollector())

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._answers.labels(str(status)).inc()

    def render(
        self, batches: Mapping[str, int], work: tuple[int, int], engines: list[EngineEndpoint]
    ) -> bytes:
        """All metrics as text: batches by status and `open_work` are of the whole database."""
        self._open.set(work[0])
        self._behind.set(work[1])
        self._batches.clear()
        for status, count in batches.items():
            self._batches.labels(status).set(count)
        for gauge in (self._running, self._limit, self._absent):
            gauge.clear()  # Of engines that have gone.
        for engine in engines:
            self._running.labels(engine.url).set(engine.running)
            self._limit.labels(engine.url).set(int(engine.limit.value))
            self._absent.labels(engine.url).set(engine.absences > 0)
        return generate_latest(self._registry)


class _LoopCollector(Collector):
    """The crashes of all loops of this process."""

    def collect(self) -> Iterator[Metric]:
        restarts = CounterMetricFamily(
            "aqua_batch_loop_restarts", "Crashes of background loops", labels=["loop"]
        )
        for loop, count in restart_counts().items():
            restarts.add_metric([loop], count)
        yield restarts
        text = "Loops that crash again and again, or hang"
        yield GaugeMetricFamily("aqua_batch_loops_failing", text, value=len(failing_loops()))
