"""How near `aqua sim whatif` comes to days whose step times it is not told.

    python benchmarks/whatif_calibration.py [--days 8] [--seed 0] [--minutes 20] [--json]

Each day is drawn: one to three models on one to four engines each, idle to overloaded, lengths
uniform or log-normal, coefficients of step times one to four times the data sheet's and the same
for engines of one kind. The simulator serves it with these, and only what users would have seen is
kept. Step times are then found by least squares alone (`fitted`) and with what that gets wrong
taken off (`calibrated`), and rows compare what follows from them with what follows from the planted
ones: time to the first token, busy time, and offline tokens that co-serving fits in the gaps. The
engine is the same on both sides, so this tries the calibration and not the engine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any, Final

import numpy as np

from aqua_cli import print_table, progress
from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import Cluster, DeploymentList, cluster_of
from aqua_simulator.whatif.fleet_day import recording_of
from aqua_simulator.whatif.jobs import GapJob, OnlineJob, SimulationInput
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad
from aqua_simulator.whatif.step_times import (
    StepCoefficients,
    fitted,
    kinds_of,
    sheet_coefficients,
)

Times = dict[str, StepCoefficients]
NUMBERS: Final = {
    "ttft_mean_s": "time to the first token, mean",
    "ttft_p99_s": "time to the first token, p99",
    "busy_s": "busy time of engines",
    "offline_tokens_per_s": "offline tokens",
}
BATCH: Final = 16
"""Requests that are thought to decode together where a load is drawn to so much of capacity."""


def lengths_of(generator: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """Lengths around a drawn median, log-normal or uniform."""
    median = np.exp(generator.uniform(np.log(low), np.log(high)))
    if generator.random() < 0.5:
        return np.clip(generator.lognormal(np.log(median), 0.7, count), 2, 10 * median).astype(int)
    return generator.integers(2, int(2 * median), count)


def load_of(
    generator: np.random.Generator, times: StepCoefficients, engines: int, span_s: float
) -> ModelLoad:
    """Requests that come by chance, at a share of about what the engines can serve."""
    prompts, outputs = lengths_of(generator, 4096, 60, 3000), lengths_of(generator, 4096, 20, 400)
    step_s = times.step_s + BATCH * times.context_s * (prompts.mean() + outputs.mean() / 2)
    request_s = times.token_s * prompts.mean() + outputs.mean() * (step_s / BATCH + times.token_s)
    per_s = engines * np.exp(generator.uniform(np.log(0.01), np.log(1.2))) / request_s
    count = int(generator.poisson(per_s * span_s)) + 9
    unknown = np.full(count, np.nan)
    arrival_s = np.sort(generator.random(count)) * span_s
    prompts, outputs = (generator.choice(lengths, count) for lengths in (prompts, outputs))
    return ModelLoad(arrival_s, prompts, outputs, unknown, unknown)


def day_of(seed: int, span_s: float) -> tuple[Cluster, Times, RecordedLoad]:
    """A cluster, the step times that its day hides, and the day."""
    generator = np.random.default_rng(seed)
    names = [f"model-{number}" for number in range(generator.integers(1, 4))]
    models = [
        {
            "name": name,
            "model": str(generator.choice(["Llama-3.1-8B", "Mistral-7B", "Llama-2-7B"])),
            "gpu": str(generator.choice(["A100-80GB", "H100-80GB"])),
            "replicas": int(generator.integers(1, 5)),
        }
        for name in names
    ]
    cluster, _ = cluster_of(DeploymentList.model_validate({"models": models}), "drawn")
    planted: Times = {}
    loads: dict[str, ModelLoad] = {}
    for names in kinds_of(cluster.engines).values():
        sheet = sheet_coefficients(cluster.engines[names[0]])
        keys = ("step_s", "token_s", "context_s", "pair_s")
        slower = {key: getattr(sheet, key) * generator.uniform(1.0, 4.0) for key in keys}
        front_s = generator.uniform(0.0, 0.03)
        times = replace(sheet, front_s=front_s, is_fitted=True, **slower)
        planted |= dict.fromkeys(names, times)
    for name, shape in cluster.engines.items():
        loads[name] = load_of(generator, planted[name], shape.deployed.replicas, span_s)
    return cluster, planted, RecordedLoad(span_s, recording_of(cluster, planted, loads, span_s), [])


def outcome(cluster: Cluster, day: RecordedLoad, times: Times) -> dict[tuple[str, str], float]:
    """What follows from step times, by model and number."""
    background = SimulationInput(cluster, day, times, sample_count=3, sample_s=60.0)
    online = OnlineJob(0).run(background).by_model
    found: dict[tuple[str, str], float] = {}
    for name in cluster.engines:
        found |= {(name, key): float(online[name][key]) for key in NUMBERS if key in online[name]}
        sample = GapJob(0, name).run(background)
        found[name, "offline_tokens_per_s"] = sample.offline_tokens_per_s
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="of a day")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    off: dict[str, dict[str, list[float]]] = {}
    with progress("Days", total=options.days, quiet=options.json, log_every_s=30.0) as shown:
        for number in range(options.days):
            cluster, planted, day = day_of(options.seed + number, 60.0 * options.minutes)
            known = outcome(cluster, day, planted)
            by_method = {
                "fitted": fitted(day.loads, cluster.engines),
                "calibrated": calibrated(cluster, day),
            }
            for method, times in by_method.items():
                for (name, key), value in outcome(cluster, day, times).items():
                    # Of the larger one: an engine that is overloaded all day has no gaps.
                    larger = max(value, known[name, key])
                    error = 100.0 * abs(value - known[name, key]) / larger if larger else 0.0
                    off.setdefault(key, {}).setdefault(method, []).append(error)
            shown.update(done=number + 1)
    report: dict[str, Any] = {
        "days": options.days,
        "models": len(off["busy_s"]["fitted"]),
        "error_percent": {
            key: {
                method: {
                    "median": float(np.median(errors)),
                    "p90": float(np.quantile(errors, 0.9)),
                    "worst": max(errors),
                }
                for method, errors in methods.items()
            }
            for key, methods in off.items()
        },
    }
    if options.json:
        print(json.dumps(report))
        return
    print_table(
        f"Off what is planted, % ({report['days']} days, {report['models']} models)",
        ("", "step times", "median", "9 of 10 within", "worst"),
        [
            (text, method, *(f"{value:.1f}" for value in errors.values()))
            for key, text in NUMBERS.items()
            for method, errors in report["error_percent"][key].items()
        ],
    )


if __name__ == "__main__":
    main()
