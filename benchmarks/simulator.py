"""What the simulator promises, measured: seconds and memory of a large offline run, policy time.

    python benchmarks/simulator.py [--requests 400000] [--json]

Runs BlendServe's Trace 2 under DFS, the published policy and the default one, in this process and
on one thread. Times are CPU seconds, planning included, drawing the workload not. The policy's own
time is measured in a second run, call by call, which asks it for each step. Compiling happens
before, on a small trace. The last lines list each promise, what was measured and whether it holds.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from typing import Any

import numpy as np

from aqua_simulator.offline.engine import optimal, run
from aqua_simulator.offline.policies import OfflinePolicy, PlanSettings, policy_for
from aqua_simulator.papers.blendserve import TRACES, Experiments

POLICIES = (OfflinePolicy.DFS, OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT)


def measure(experiments: Experiments, name: OfflinePolicy, requests: int) -> dict[str, Any]:
    """One policy on Trace 2."""
    workload = experiments.workload(TRACES[1], requests)
    settings = PlanSettings(experiments.capacity_tokens)
    started = time.process_time()
    policy = policy_for(name, workload, experiments.cost, settings)
    planned = time.process_time()
    capacity = experiments.capacity_tokens
    result = run(workload, policy, experiments.cost, capacity_tokens=capacity)
    ended = time.process_time()
    policy_s = run(
        workload,
        policy_for(name, workload, experiments.cost, settings),
        experiments.cost,
        capacity_tokens=capacity,
        clock=time.perf_counter,
    ).policy_s
    bound = optimal(workload, experiments.cost)
    return {
        "policy": name.value,
        "requests": requests,
        "planning_s": planned - started,
        "simulation_s": ended - planned,
        "steps": result.end.step,
        "policy_mean_ms": float(policy_s.mean() * 1e3),
        "policy_p99_ms": float(np.quantile(policy_s, 0.99) * 1e3),
        "share_of_optimum": bound.optimal_s / result.makespan_s,
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Measure and print; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experiments = Experiments(request_count=options.requests)
    for name in POLICIES:
        measure(experiments, name, 2000)
    rows = [measure(experiments, name, options.requests) for name in POLICIES]
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    slowest = max(row["planning_s"] + row["simulation_s"] for row in rows)
    mean_ms = max(row["policy_mean_ms"] for row in rows)
    p99_ms = max(row["policy_p99_ms"] for row in rows)
    promises = [
        {"promise": "planning and simulation, CPU seconds", "limit": 30.0, "measured": slowest},
        {"promise": "memory, GiB", "limit": 8.0, "measured": memory_gib},
        {"promise": "policy per step, mean ms", "limit": 0.1, "measured": mean_ms},
        {"promise": "policy per step, p99 ms", "limit": 0.25, "measured": p99_ms},
    ]
    for one in promises:
        one["holds"] = one["measured"] < one["limit"]
    report = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "rows": rows,
        "promises": promises,
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for row in rows:
            print(", ".join(f"{key} {_short(value)}" for key, value in row.items()))
        for one in promises:
            verdict = "holds" if one["holds"] else "FAILS"
            print(f"{one['promise']}: {one['measured']:.3f}, limit {one['limit']:g}: {verdict}")
    return 0 if all(one["holds"] for one in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
