"""What Aqua does in an engine, on the engine's own `/metrics` and in its log.

vLLM carries a connector's figures from every process to the front end, sums them and exports them
with its own labels; `COUNTERS` says which there are, each as `aqua:NAME_total`, and `GAUGES` which
levels, as `aqua:NAME`. All are sent as what was added since the last step, so sums over workers and
engines mean what they should. With several workers bytes and seconds add up over them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import prometheus_client as prometheus
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS: Final = {
    "kv_paged_out_bytes": "KV bytes paged out.",
    "kv_paged_in_bytes": "KV bytes paged in.",
    "kv_paging_seconds": "Time that steps, or copies beside them, spent paging.",
    "kv_step_wait_seconds": "Time that steps waited for paging.",
    "kv_failures": "Transfers that failed; their blocks are computed again.",
    "kv_drained_bytes": "KV bytes moved away from peers, because they wanted their memory.",
    "kv_reclaim_seconds": "From a producer's demand until its last slab was given back.",
    "forced_preemptions": "Requests preempted at the end of a slice.",
    "evicted_requests": "Requests that were evicted on command, to be resumed.",
    "evicted_tokens": "Tokens that these had computed, and that were kept.",
    "restored_tokens": "Tokens of preempted requests that were loaded instead of computed.",
    "prefix_queried_tokens": "Prompt tokens looked up in the prefix tier.",
    "prefix_hit_tokens": "Prompt tokens loaded from the prefix tier.",
    "unsaved_blocks": "Blocks of preempted requests dropped for want of room.",
    "lost_blocks": "Blocks that were not there when they were needed.",
    "offline_tokens": "Tokens computed for offline requests beside online ones.",
    "offline_preemptions": "Offline requests that gave their memory up.",
    "online_preempted_before_offline": "Online requests that lost memory before offline ones.",
    "online_arrivals": "Online requests that came in, where they can abort offline steps.",
    "online_first_tokens": "Online requests with a first token, or left after ttft_s without one.",
    "online_first_tokens_in_time": "Of these, those that had it within ttft_s.",
    "online_answers": "Online requests that ended with two tokens or more.",
    "online_answers_in_time": "Of these, those with tpot_s or less between tokens, in the mean.",
    "offline_requests_ended": "Offline requests that ended: answered, or left by their clients.",
    "step_aborts": "Steps of offline work that an online request's arrival aborted.",
    "step_aborts_late": "Of these, those that took longer than two times between safepoints.",
    "step_abort_seconds": "From such an arrival until its step had stopped, added up.",
    "step_abort_safepoint_seconds": "Between two safepoints of an aborted step, added up.",
    "step_abort_tokens": "Tokens of aborted steps, which are computed again.",
    "co_serving_overruns": "Steps with online and offline work that took longer than planned.",
}

GAUGES: Final = {
    "slicing_on": "Whether requests take turns in time slices.",
    "paging_on": "Whether KV is paged out.",
    "lending_on": "Whether KV memory is lent.",
    "pinned_prefixes": "Prefixes that the tier keeps until they are unpinned.",
    "pinned_blocks": "Blocks that these take in the tier, or will once they come.",
    "step_aborts_per_arrival": "Steps of offline work that one online request aborted, at most.",
    "co_serving_without_aborts": "Engines whose steps of offline work cannot be aborted.",
    "co_serving_steps_in_turn": "Engines whose offline steps overlap with none, to be abortable.",
    "co_serving_without_profile": "Engines on the fixed budget: no step-time profile holds.",
    "offline_budget_tokens": "Offline tokens of a step without online ones, on the fixed budget.",
    "offline_granted_tokens": "Offline tokens that the last plan has let into its step.",
    "offline_limit_seconds": "Longest that the last plan let its step take; 0 if it has no limit.",
    "offline_step_excess": "Share by which steps are longer with offline tokens beside answers.",
    "offline_requests_waiting": "Offline requests that hold no memory.",
    "checkpoint_lag_blocks": "Full blocks of offline requests in memory that have no copy yet.",
    "workers_without_coordinator": "Workers that no coordinator answers; they use host memory.",
}
"""Levels, sent as changes: so their sums over workers, engines and front ends are right, too."""


class AquaStats(KVConnectorStats):
    """Additions to the counters, by name."""

    def reset(self) -> None:
        """Begin counting anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> AquaStats:
        """Both, as one."""
        names = self.data.keys() | other.data.keys()
        sums = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        return AquaStats(data=sums)

    def reduce(self) -> dict[str, int | float]:
        """One line of the engine's log."""
        return {f"aqua:{name}": round(self.data[name], 3) for name in sorted(self.data)}

    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self.data

    def __getitem__(self, field: str) -> Any:
        """A field by name: under a `MultiConnector`, vLLM before 0.30 asks so in one process.

        There it means the form that crosses to another process, in which this would be a mapping.
        """
        return getattr(self, field)


class Meter:
    """Turns totals into additions."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def read(self, totals: dict[str, float]) -> AquaStats | None:
        """What was added since the last reading; None if nothing was."""
        last = self.last
        if totals == last:
            return None
        self.last = totals
        added = {name: total - last.get(name, 0) for name, total in totals.items()}
        # A level of 0 is told once: absent, it would be unknown.
        known = {name for name in added if name not in GAUGES or name in last}
        return AquaStats(
            data={name: value for name, value in added.items() if value or name not in known}
        )


class AquaPromMetrics(KVConnectorPromMetrics):
    """The counters and gauges on `/metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._levels: Counter[tuple[str, int]] = Counter()
        counter, gauge = metric_types[prometheus.Counter], metric_types[prometheus.Gauge]
        counters = {
            name: counter(name=f"aqua:{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        gauges = {
            name: gauge(
                name=f"aqua:{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="sum",
            )
            for name, text in GAUGES.items()
        }
        self._label_values = per_engine_labelvalues
        self._metrics = {
            name: create_metric_per_engine(family, per_engine_labelvalues)
            for name, family in counters.items()
        }
        # A level is not shown as 0 before it is known.
        self._unseen = gauges

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine sent."""
        for name, value in transfer_stats_data.items():
            if name in self._unseen:
                self._metrics[name] = create_metric_per_engine(
                    self._unseen.pop(name), self._label_values
                )
            metric = self._metrics[name][engine_idx]
            if name in GAUGES:
                self._levels[name, engine_idx] += value
                metric.set(self._levels[name, engine_idx])
            else:
                # A time may fall where a clock was set back, and vLLM ends all requests over an
                # error here.
                metric.inc(max(0.0, value))
