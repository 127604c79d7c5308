"""The profiler's search on servers whose sustained rate is known, on a virtual clock.

    python benchmarks/profiler_search.py [--seeds 20] [--budget-s 600] [--only NAME]
        [--predicted 1.0] [--json]

The servers are honest queues and engines that work in steps (`tests/harness`); their truth is found
by brute force, with requests drawn one by one, and is itself good to 1 to 4%. Of each: the error of
the rate found, how many searches are beyond 5%, how many ended without being sure (partial), the
most requests sent as a share of a linear sweep's (200 at each step of 0.5 requests/s), and in how
many searches 1.2 times the rate that was found is beyond the truth.

`--predicted F` begins each search at F times the truth, and "prior" is how many requests that takes
to the same end, relative to a search without.

Bars: none beyond 5%, at most half of the sweep's requests, and beyond the truth in all.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from aqua_profiler.spec import LatencyObjective
from harness.known_servers import CASES, Case
from harness.queueing import search, true_rate_in_steps, unloaded_of

OVERLOAD: Final = 1.2
TOLERANCE: Final = 0.05
SWEEP_STEP_PER_S, SWEEP_REQUESTS = 0.5, 200
TRUTH_REQUESTS: Final = 30_000


def measure(
    case: Case, seeds: int, budget_s: float, predicted: float | None = None
) -> dict[str, Any]:
    """The figures of one server."""
    objective = LatencyObjective()
    truth = true_rate_in_steps(
        case.server,
        case.lengths,
        objective,
        low=case.low,
        high=case.high,
        requests=TRUTH_REQUESTS,
    )
    errors, partial, sent, reasons = [], 0, [], set()
    blind = 0
    for seed in range(seeds):
        unloaded = unloaded_of(case.server, case.lengths.drawn(seed), seed)
        verdict, trials, _ = search(
            lambda: case.server,
            case.lengths,
            seed,
            objective,
            unloaded=unloaded,
            budget_s=budget_s,
            predicted_per_s=None if predicted is None else predicted * truth,
        )
        if predicted is not None:
            _, without, _ = search(
                lambda: case.server,
                case.lengths,
                seed,
                objective,
                unloaded=unloaded,
                budget_s=budget_s,
            )
            blind += sum(trial.sent for trial in without)
        errors.append((verdict.estimate.rate_per_s or math.nan) / truth - 1)
        partial += not verdict.complete
        sent.append(sum(trial.sent for trial in trials))
        reasons.add(verdict.estimate.limited_by or "nothing")
    sweep = SWEEP_REQUESTS * (int(truth / SWEEP_STEP_PER_S) + 1)
    return {
        "limited_by": sorted(reasons),
        "truth_per_s": truth,
        "mean_error": statistics.fmean(errors),
        "sd": statistics.stdev(errors) if seeds > 1 else 0.0,
        "worst_error": max(errors, key=abs),
        "beyond_5_percent": sum(abs(error) > TOLERANCE for error in errors),
        "violated_at_1_2": sum((1 + error) * OVERLOAD > 1 for error in errors),
        "partial": partial,
        "requests_share": max(sent) / sweep,
        "seeds": seeds,
        "requests": sum(sent),
        "requests_without_prediction": blind or None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=20, help="searches of each server")
    parser.add_argument("--budget-s", type=float, default=600.0, help="of each search")
    parser.add_argument("--only", help="servers whose name contains this")
    parser.add_argument("--predicted", type=float, help="begin at so many times the truth")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = dict(rows(options, show=not options.json))
    if options.json:
        print(json.dumps({"servers": found, "budget_s": options.budget_s}))


def rows(options: argparse.Namespace, *, show: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each server's figures, printed as they come."""
    only, seeds, budget_s = options.only or "", options.seeds, options.budget_s
    if show:
        figures = f"{'truth':>7}{'mean':>7}{'sd':>6}{'worst':>7}"
        print(f"{'server':36}{figures}  >5% 1.2x part. requests prior")
    for name, case in CASES.items():
        if only not in name:
            continue
        row = measure(case, seeds, budget_s, options.predicted)
        yield name, row
        if show:
            without = row["requests_without_prediction"]
            prior = f"{row['requests'] / without:6.2f}" if without else 6 * " "
            print(
                f"{name:36}{row['truth_per_s']:7.2f}{row['mean_error']:+7.1%}{row['sd']:6.1%}"
                f"{row['worst_error']:+7.1%}{row['beyond_5_percent']:5}"
                f"{row['violated_at_1_2']:5}{row['partial']:6}{row['requests_share']:9.2f}{prior}"
                f"  {'/'.join(row['limited_by'])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
