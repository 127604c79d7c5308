"""What aqua-place promises, measured: CPU seconds, proven gaps, coverage, re-placement, memory.

    python benchmarks/placement.py [FOLDER] [--json] [--quick]
    python benchmarks/placement.py --sweep [--only WORD] [--json]

Without a folder it generates the seeded families of `aqua_placer.problem.families`; with one it
solves every problem file there with `coverage` and `abs`. `--sweep` solves every kind of problem
there is once with both (servers of 2 to 72 GPUs, groups of 16 shards, cards of two sizes, weights,
part of the GPUs unused): a few minutes that show what a change of the search buys or costs.

Times are CPU seconds of solving as plans report them (reading files and writing JSON not included),
on one thread; every plan is verified. The last lines list each promise, what was measured and
whether it holds; `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from _placement_promises import promises, sweep_promises
from _placement_rows import (
    LIMIT_S,
    Row,
    coverage_rows,
    gurobi_rows,
    minmax_rows,
    other_rows,
    rack_rows,
    replan_rows,
    solve,
    sweep_rows,
)
from aqua_placer.benchmark import sources
from aqua_placer.budget import Budget
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Objective

OTHER_GPUS = 1024
"""Clusters up to which instances beyond the families are measured."""


def sweep(only: str) -> Row:
    """Objective, bound, gap, coverage and CPU seconds of every kind, and whether the bars hold."""
    rows, keys = sweep_rows(only), ("value", "bound", "gap_percent", "coverage_percent", "cpu_s")
    return {
        "sweep": {
            f"{row['objective']} {row['problem']}": {key: round(row[key], 4) for key in keys}
            for row in rows
        },
        "promises": sweep_promises(rows),
    }


def help_seconds() -> float:
    """Median CPU seconds of `aqua-place --help`, from the outside."""
    command = [str(Path(sys.executable).parent / "aqua-place"), "--help"]
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent)


def main() -> int:
    """Measure and print; 1 when a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="problem files instead of families")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="up to 1,024 GPUs, one seed")
    parser.add_argument("--sweep", action="store_true", help="every kind of problem once")
    parser.add_argument("--only", default="", help="of the sweep, labels that contain this")
    parser.add_argument("--seeds", type=int, default=3, help="seeds up to 1,024 GPUs")
    options = parser.parse_args()
    started_s = time.perf_counter()
    # Warm up: the first solve pays for importing HiGHS.
    place(instance_from(generate("ref50", 16, 0)), Request(), Budget(LIMIT_S))
    result: Row
    if options.sweep:
        result = sweep(options.only)
    elif options.folder is not None:
        rows = [
            solve(make(), objective, label)[1]
            for label, make in sources(options.folder, [], [], 1)
            for objective in (Objective.COVERAGE, Objective.ABS)
        ]
        result = {"folder": rows, "promises": []}
    else:
        sizes = [128, 1024] if options.quick else [128, 1024, 8192, 65536]
        seeds = 1 if options.quick else options.seeds
        groups = {
            "minmax": list(minmax_rows(sizes, seeds)),
            "racks": list(rack_rows(7200 if options.quick else 65520)),
            "coverage": list(coverage_rows([size for size in sizes if size != 8192], seeds)),
            "others": list(other_rows([size for size in sizes if size <= OTHER_GPUS], seeds)),
            "gurobi": list(gurobi_rows(seeds)),
            "replans": list(
                replan_rows([(1024, 0.05)] if options.quick else [(1024, 0.05), (65536, 0.01)])
            ),
        }
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        result = {
            **groups,
            "promises": promises(
                **groups,
                start_s=help_seconds(),
                peak_mib=peak_mib,
            ),
        }
    result["machine"] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.processor() or platform.machine(),
        "seconds": time.perf_counter() - started_s,
    }
    if options.json:
        print(json.dumps(result))
    else:
        for row in result["promises"]:
            state = "holds" if row["holds"] else "MISSED"
            print(
                f"{state:7s} {row['promise']:62s} {row['measured']:10.3f} "
                f"(limit {row['limit']:g} {row['unit']}; {row['problems']} problems)"
            )
    return 0 if all(row["holds"] for row in result["promises"]) else 1


if __name__ == "__main__":
    sys.exit(main())
