"""A day of a thousand GPUs by events, and how far that is off planning every step by itself.

    python benchmarks/simulator_scale.py [--gpus 1000] [--hours 24] [--per-gpu 0.1] [--json]

Half of the GPUs serve chats and lend, half serve documents and run short of KV memory; the load
goes up and down once a day and in bursts of a minute. The whole fleet is simulated with harvesting
and fair slices, in this process and on one thread, compiled before. Then ten such GPUs for
`--check-hours` of the same load, without Aqua and with it, by events and step by step: the errors
are of the former against the latter. Promises: 1,000 GPUs and 24 hours in 10 minutes and 4 GiB,
errors within 2 %.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any, Final

import numpy as np

from aqua_cli import progress
from aqua_simulator.whatif.cluster import Cluster, DeploymentList, cluster_of
from aqua_simulator.whatif.fleet_day import serve_fleet
from aqua_simulator.whatif.members import ServingTerms
from aqua_simulator.whatif.online import OnlineResult, serve_day
from aqua_simulator.whatif.recorded_day import ModelLoad
from aqua_simulator.whatif.step_times import StepCoefficients

CHECKED: Final = ("output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s")
TIMES: Final = StepCoefficients(0.012, 1e-4, 3e-7, 1e-9, is_fitted=True)
PROMISES: Final = {"wall_s": 600.0, "peak_rss_bytes": 4 * 2**30, "worst_error_percent": 2.0}


def fleet_of(gpus: int) -> Cluster:
    """Half of them chats, which lend, and half documents, which borrow."""
    common = {"model": "Llama-3.1-8B", "gpu": "A100-80GB", "server": "a"}
    listed = DeploymentList.model_validate(
        {
            "models": [
                {"name": "chat", "replicas": gpus - gpus // 2, "kv_tokens": 16_000, **common},
                {"name": "docs", "replicas": gpus // 2, "kv_tokens": 16_000, **common},
            ],
            "links": {"peer_gb_per_s": 250, "host_gb_per_s": 25},
        }
    )
    return cluster_of(listed, "benchmark")[0]


def load_of(seed: int, per_s: float, span_s: float, median: tuple[float, float]) -> ModelLoad:
    """Poisson by the minute, with the ups and downs of a day and bursts; log-normal lengths."""
    generator = np.random.default_rng(seed)
    minutes = np.arange(0.0, span_s, 60.0)
    rate = per_s * (1.0 + 0.6 * np.sin(2.0 * np.pi * minutes / 86_400.0))
    rate *= np.where(generator.random(len(minutes)) < 0.03, 4.0, 1.0)
    counts = generator.poisson(rate * 60.0)
    arrival_s = np.sort(np.repeat(minutes, counts) + 60.0 * generator.random(counts.sum()))
    prompts, outputs = (
        np.clip(generator.lognormal(np.log(each), 0.7, len(arrival_s)), 1, 3 * each).astype(int)
        for each in median
    )
    unknown = np.full(len(arrival_s), np.nan)
    return ModelLoad(arrival_s, prompts, outputs, unknown, unknown)


def loads_of(gpus: int, per_gpu: float, span_s: float, seed: int) -> dict[str, ModelLoad]:
    """Of both models."""
    chats, docs = gpus - gpus // 2, gpus // 2
    return {
        "chat": load_of(seed, per_gpu * chats, span_s, (800.0, 500.0)),
        "docs": load_of(seed + 1, per_gpu * docs, span_s, (3000.0, 400.0)),
    }


def errors_of(per_gpu: float, span_s: float, seed: int) -> dict[str, float]:
    """Of ten GPUs by events against step by step, in percent, by scenario, model and number."""
    cluster, loads = fleet_of(10), loads_of(10, per_gpu, span_s, seed)
    times = dict.fromkeys(loads, TIMES)
    requests = {name: load.arrivals() for name, load in loads.items()}
    found: dict[str, float] = {}
    for scenario, has_aqua in (("without Aqua", False), ("with Aqua", True)):
        terms = ServingTerms(is_harvesting=has_aqua, is_fair=has_aqua, short=("docs",))
        exact = serve_day(cluster, times, requests, span_s, terms)
        ours = serve_fleet(cluster, times, loads, span_s, terms)
        for name in loads:
            for key in (*CHECKED, "busy_s"):
                off = ours.by_model[name][key] / exact.by_model[name][key] - 1.0
                found[f"{scenario}, {name}, {key}"] = 100.0 * off
        if has_aqua:
            found |= _bytes_off(ours, exact)
    return found


def _bytes_off(ours: OnlineResult, exact: OnlineResult) -> dict[str, float]:
    pairs = {
        "memory lent": (ours.lending.offered_gb_s, exact.lending.offered_gb_s),
        "memory used": (ours.lending.used_gb_s, exact.lending.used_gb_s),
    }
    return {key: 100.0 * (one / other - 1.0) for key, (one, other) in pairs.items() if other}


def main() -> int:
    """Measure and print; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--per-gpu", type=float, default=0.1, help="requests/s, a mean")
    parser.add_argument("--check-hours", type=float, default=1.0, help="of ten GPUs, step by step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    errors = errors_of(options.per_gpu, options.check_hours * 3600.0, options.seed)
    span_s = options.hours * 3600.0
    cluster = fleet_of(options.gpus)
    loads = loads_of(options.gpus, options.per_gpu, span_s, options.seed)
    begun_s, worked_s = time.perf_counter(), time.process_time()
    with progress("Simulating", total=1.0, quiet=options.json, log_every_s=30.0) as shown:
        result = serve_fleet(
            cluster,
            dict.fromkeys(loads, TIMES),
            loads,
            span_s,
            ServingTerms(is_harvesting=True, is_fair=True, short=("docs",)),
            on_progress=lambda done: shown.update(done=done),
        )
    report: dict[str, Any] = {
        "gpus": options.gpus,
        "simulated_s": span_s,
        "requests": sum(len(load) for load in loads.values()),
        "wall_s": time.perf_counter() - begun_s,
        "cpu_s": time.process_time() - worked_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "busy_share": sum(each["busy_s"] for each in result.by_model.values())
        / (options.gpus * span_s),
        "preemptions": sum(each["preemption_count"] for each in result.by_model.values()),
        "reclaims": result.lending.reclaim_count,
        "errors_percent": errors,
        "worst_error_percent": max(map(abs, errors.values())),
    }
    report["promises"] = [
        {"promise": key, "limit": limit, "measured": report[key], "holds": report[key] <= limit}
        for key, limit in PROMISES.items()
    ]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for key, value in report.items():
            if not isinstance(value, (dict, list)):
                print(f"{key}: {value:.5g}")
        for key, value in errors.items():
            print(f"  {key}: {value:+.3f} %")
        for one in report["promises"]:
            print(f"{one['promise']} <= {one['limit']:g}: {'holds' if one['holds'] else 'FAILS'}")
    return 0 if all(one["holds"] for one in report["promises"]) else 1


if __name__ == "__main__":
    sys.exit(main())
