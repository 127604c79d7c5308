"""What fair policies do to bursts, simulated: many bursts, engines and seeds, against FCFS.

python benchmarks/fair_policies.py [--seeds 2] [--json]
Every burst runs on the serving engine under first come, first served, under Aqua's section 7 (read
fairly, and word by word) and under our `first-token`, over NVLink, with copies on top. Gains are
FCFS over the policy (more is better), ratios the policy over FCFS (less is better); each is a mean
over seeds, and `worst` is the worst single burst. Bursts without any queue (FCFS waits less than a
second) say nothing and are left out, counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aqua_protocol.decoders import DECODERS
from aqua_protocol.hardware import GPUS
from aqua_schedulers.cfs import PagingTier, PolicyName
from aqua_simulator.papers.aqua import BurstExperiment
from aqua_simulator.serving.request import Served
from aqua_simulator.workloads.sources import SOURCES

Ints = NDArray[np.int64]
Draw = Callable[[int, np.random.Generator], tuple[Ints, Ints]]

LENGTHS: Final[dict[str, Draw]] = {
    "ShareGPT": SOURCES["ShareGPT"].lengths,
    "uniform": lambda count, rng: (rng.integers(8, 128, count), rng.integers(16, 192, count)),
    "exponential": lambda count, rng: (
        rng.integers(20, 400, count),
        np.ceil(rng.exponential(200, count)).astype(np.int64),
    ),
    "equal": lambda count, _rng: (np.full(count, 100), np.full(count, 128)),
}
KV_TOKENS: Final = {"ShareGPT": 12_000, "uniform": 1_200, "exponential": 3_000, "equal": 1_200}
SHAPES: Final = {
    "doubled for 30 s": (2.0, 30.0),
    "eightfold for 5 s": (8.0, 5.0),
}
POLICIES: Final = (PolicyName.CFS, PolicyName.LEAST_SERVED, PolicyName.FIRST_TOKEN)
QUEUED_S: Final = 1.0

LOWER_IS_WORSE: Final = ("ttft_p99_gain", "ttft_max_gain", "throughput_ratio_vs_fcfs")


def compare(policy: list[Served], fcfs: list[Served]) -> dict[str, float]:
    """One burst under a policy and under FCFS."""

    def times(rows: list[Served], name: str) -> NDArray[np.float64]:
        return np.array([getattr(row, name) for row in rows])

    wait, base_wait = times(policy, "ttft_s"), times(fcfs, "ttft_s")
    done, base_done = times(policy, "completion_s"), times(fcfs, "completion_s")
    return {
        "ttft_p99_gain": float(np.quantile(base_wait, 0.99) / np.quantile(wait, 0.99)),
        "ttft_max_gain": float(base_wait.max() / wait.max()),
        "completion_ratio_vs_fcfs": float(done.mean() / base_done.mean()),
        "completion_max_ratio_vs_fcfs": float(done.max() / base_done.max()),
        "throughput_ratio_vs_fcfs": float(
            times(fcfs, "last_token_s").max() / times(policy, "last_token_s").max()
        ),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases: list[dict[str, object]] = []
    found: dict[PolicyName, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for name, lengths in LENGTHS.items():
        calm = BurstExperiment(
            DECODERS["Llama-3-8B"], GPUS["A100-80GB"], 1, lengths, KV_TOKENS[name], 32e9, 300e9
        )
        rate = calm.stable_rate_per_s()
        for shape, (factor, length_s) in SHAPES.items():
            burst = replace(calm, factor=factor, length_s=length_s)
            for seed in range(options.seeds):
                arrivals = burst.arrivals(rate, seed)
                fcfs = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE).run(arrivals)
                if max(row.ttft_s for row in fcfs) < QUEUED_S:
                    cases.append({"lengths": name, "shape": shape, "seed": seed, "queued": False})
                    continue
                for policy in POLICIES:
                    row = compare(burst.engine(policy, PagingTier.PEER).run(arrivals), fcfs)
                    found[policy].append(row)
                    case = {"lengths": name, "shape": shape, "seed": seed, "queued": True}
                    cases.append({**case, "policy": policy.value, **row})
    result: dict[str, object] = {
        policy.value: {
            key: {
                "mean": float(np.mean([row[key] for row in rows])),
                "worst": (min if key in LOWER_IS_WORSE else max)(row[key] for row in rows),
            }
            for key in rows[0]
        }
        for policy, rows in found.items()
    }
    result["bursts"] = len(found[PolicyName.CFS])
    result["calm"] = sum(not case["queued"] for case in cases)
    if options.json:
        print(json.dumps({**result, "cases": cases}, indent=1))
        return
    for case in cases:
        print(case)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
