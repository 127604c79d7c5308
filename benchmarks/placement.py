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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aqua_placer.benchmark import sources
from aqua_placer.budget import Budget
from aqua_placer.errors import SolverUnavailableError
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import FAMILIES, generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Backend, Request, Solver
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Objective, Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.changed_problems import churned, on_mixed_servers, weighted

LIMIT_S = 60.0
SHORTFALL_PERCENT = 0.5
"""Of coverage below its bound, at most: profiles are good to 1.8%."""

SERVER_GPUS = 8
"""Of the families, where nothing else is said."""

SWEEP_CPU_S = 180.0
"""Of all problems of the sweep together: some 60 on a quiet machine."""

OTHER_GPUS = 1024
"""Clusters up to which instances beyond the families are measured."""

Row = dict[str, Any]


def solve(instance: Instance, objective: Objective, label: str, seed: int = 0) -> tuple[Plan, Row]:
    """Solve, verify, and write the row of the table."""
    plan = place(instance, Request(objective=objective, seed=seed), Budget(LIMIT_S))
    verdicts = check_plan(instance, plan)
    bound = plan.coverage_bound_gb
    row = {
        "problem": label,
        "gpus": instance.servers.total_gpus,
        "objective": objective.value,
        "value": plan.value,
        "bound": plan.bound,
        "gap_percent": 100 * plan.gap,
        "proven": plan.proven,
        "coverage_percent": 100 * plan.coverage_gb / bound if bound else 100.0,
        "balance": plan.balance,
        "balance_bound": plan.balance_bound,
        "quantum_gb": max(instance.quantum_gb, 1.0),
        "cpu_s": plan.cpu_seconds,
        "valid": verdicts.passed,
    }
    say(
        f"{label:28s} {objective.value:9s} value {plan.value:12.2f} bound {plan.bound:12.2f} "
        f"gap {row['gap_percent']:8.4f}% cover {row['coverage_percent']:8.3f}% "
        f"balance {plan.balance:8.2f} cpu {plan.cpu_seconds:7.3f} s "
        f"{'proven ' if plan.proven else ''}{'' if verdicts.passed else 'INVALID'}"
    )
    return plan, row


def say(text: str) -> None:
    """Progress goes to standard error; the result alone to standard output."""
    print(text, file=sys.stderr, flush=True)


def family(
    name: str, gpus: int, seed: int, *, server_gpus: int = SERVER_GPUS, occupancy: float = 1.0
) -> tuple[str, dict[str, Any]]:
    """Label and problem."""
    label = f"{name}-{gpus}-s{seed}"
    if server_gpus != SERVER_GPUS:
        label += f"-ser{server_gpus}"
    if occupancy != 1.0:
        label += f"-occ{occupancy:g}"
    return label, generate(name, gpus, seed, server_gpus=server_gpus, occupancy=occupancy)


def minmax_rows(sizes: list[int], seeds: int) -> Iterator[Row]:
    """`abs` on typed and all-distinct families and on racks."""
    for gpus in sizes:
        for name in FAMILIES:
            for suffix in ("", "-cont"):
                for seed in range(seeds if gpus <= 1024 else 1):
                    for occupancy in (1.0, 0.9):
                        label, problem = family(name + suffix, gpus, seed, occupancy=occupancy)
                        yield solve(instance_from(problem), Objective.ABS, label)[1]


def rack_rows(gpus: int) -> Iterator[Row]:
    """Racks of 72 GPUs."""
    for name in FAMILIES:
        label, problem = family(name, gpus, 0, server_gpus=72)
        yield solve(instance_from(problem), Objective.ABS, label)[1]


def coverage_rows(sizes: list[int], seeds: int) -> Iterator[Row]:
    """`coverage`, beside the `abs` optimum of the same problem."""
    for gpus in sizes:
        for name in FAMILIES:
            for suffix in ("", "-cont"):
                for seed in range(seeds if gpus <= 1024 else 1):
                    label, problem = family(name + suffix, gpus, seed)
                    instance = instance_from(problem)
                    _, row = solve(instance, Objective.COVERAGE, label)
                    even, _ = solve(instance, Objective.ABS, label)
                    row["abs_value"] = even.value
                    row["abs_coverage_percent"] = (
                        100 * even.coverage_gb / row["bound"] if row["bound"] else 100.0
                    )
                    yield row


def other_rows(sizes: list[int], seeds: int) -> Iterator[Row]:
    """Instances beyond the notes' families: weights, servers of several sizes, of 4, part empty."""
    for gpus in sizes:
        for name in ("tpmix", "tpscarce", "tpmix-cont", "tpscarce-cont"):
            for seed in range(seeds):
                label, problem = family(name, gpus, seed)
                for suffix, changed in (
                    ("weighted", weighted(problem, seed)),
                    ("mixed", on_mixed_servers(problem)),
                    ("mixed-weighted", on_mixed_servers(weighted(problem, seed))),
                ):
                    instance = instance_from(changed)
                    yield solve(instance, Objective.COVERAGE, f"{label}-{suffix}")[1]
                for server_gpus, occupancy in ((4, 1.0), (SERVER_GPUS, 0.6)):
                    label, problem = family(
                        name, gpus, seed, server_gpus=server_gpus, occupancy=occupancy
                    )
                    yield solve(instance_from(problem), Objective.ABS, label)[1]


def with_groups_of_16(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with a third of its single consumers joined into groups of 16 shards."""
    groups = list(zip(problem["groups"]["tp"], problem["groups"]["r_gb"], strict=True))
    single = [size for shards, size in groups if shards == 1 and size < 0]
    count = max(1, len(single) // 48)
    joined = [(16, statistics.mean(single[16 * i : 16 * i + 16])) for i in range(count)]
    rest = [(1, size) for size in single[16 * count :]]
    others = [group for group in groups if group[0] > 1 or group[1] >= 0]
    everything = [*joined, *rest, *others]
    columns = {
        "name": [f"g{index}" for index in range(len(everything))],
        "tp": [shards for shards, _ in everything],
        "r_gb": [size for _, size in everything],
    }
    return {**problem, "groups": columns}


def on_two_cards(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with half of its servers on cards of 96 GB, where models spare 16 GB more."""
    (servers,) = problem["servers"]
    half = servers["count"] // 2
    counts = Counter(zip(problem["groups"]["tp"], problem["groups"]["r_gb"], strict=True))
    return {
        "servers": [
            {**servers, "name": "old", "count": servers["count"] - half},
            {**servers, "name": "new", "count": half, "hbm_gb": 96},
        ],
        "models": [
            {
                "name": f"m{index}",
                "tp": shards,
                "memory_gb": size,
                "replicas": count,
                "profiled_hbm_gb": servers["hbm_gb"],
            }
            for index, ((shards, size), count) in enumerate(counts.items())
        ],
    }


def sweep_problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of problem, small: label and problem."""
    for name in FAMILIES:
        for suffix in ("", "-cont"):
            for seed in range(2):
                yield family(name + suffix, 128, seed)
    for name in ("ref50", "tpmix", "tpscarce"):
        for suffix in ("", "-cont"):
            yield family(name + suffix, 1024, 0)
    for server_gpus in (2, 3, 4, 5, 6, 12, 16, 72):
        # Groups of four do not fit servers of two or three GPUs.
        names = ("refmix", "scarce") if server_gpus < 4 else ("tpmix", "tpscarce")
        gpus = {5: 120, 72: 288}.get(server_gpus, 144)
        for name in names:
            for suffix in ("", "-cont"):
                yield family(name + suffix, gpus, 0, server_gpus=server_gpus)
    yield from unusual_problems()


def unusual_problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Weights, servers and cards of several sizes, unused GPUs, groups of 16 shards."""
    for name in ("tpmix", "tpscarce", "tpmix-cont", "tpscarce-cont"):
        label, problem = family(name, 128, 1)
        yield f"{label}-weighted", weighted(problem, 1)
        yield f"{label}-mixed", on_mixed_servers(problem)
        yield f"{label}-mixed-weighted", on_mixed_servers(weighted(problem, 1))
        yield f"{label}-two-cards", on_two_cards(problem)
        yield family(name, 128, 1, occupancy=0.6)
        yield family(name, 128, 1, occupancy=0.9)
        label, problem = family(name, 144, 2, server_gpus=16)
        yield f"{label}-weighted", weighted(problem, 2)
        for gpus, server_gpus in ((256, 32), (288, 72)):
            label, problem = family(name, gpus, 1, server_gpus=server_gpus)
            yield f"{label}-tp16", with_groups_of_16(problem)


def sweep(only: str) -> Row:
    """Objective, bound, gap, coverage and CPU seconds of every kind, and whether the bars hold."""
    rows = [
        solve(instance_from(problem), objective, label)[1]
        for objective in (Objective.COVERAGE, Objective.ABS)
        for label, problem in sweep_problems()
        if only in label
    ]
    covering = [row for row in rows if row["objective"] == "coverage"]
    keys = ("value", "bound", "gap_percent", "coverage_percent", "cpu_s")
    return {
        "sweep": {
            f"{row['objective']} {row['problem']}": {key: round(row[key], 4) for key in keys}
            for row in rows
        },
        "promises": [
            promised("coverage: worst shortfall", covering, uncovered, SHORTFALL_PERCENT, "%"),
            promised("plans that `check` refuses", rows, refused, 0, "plans"),
            promised("CPU seconds of the sweep", rows, total_cpu, SWEEP_CPU_S, "CPU s"),
        ],
    }


def gurobi_rows(seeds: int) -> Iterator[Row]:
    """Side by side with the paper's program, on a size that Gurobi's free licence takes."""
    for seed in range(seeds):
        label, problem = family("tpscarce", 64, seed)
        instance = instance_from(problem)
        ours = place(instance, Request(), Budget(LIMIT_S))
        random_optimum = place(instance, Request(Objective.ABS, seed=seed), Budget(LIMIT_S))
        request = Request(Objective.ABS, Solver.MILP, Backend.GUROBI, seed=seed)
        try:
            theirs = place(instance, request, Budget(10.0))
        except SolverUnavailableError as error:
            say(f"{label}: {error.message}")
            return
        row = {
            "problem": label,
            "ours_gb": ours.coverage_gb,
            "paper_optimal_gb": random_optimum.coverage_gb,
            "gurobi_gb": theirs.coverage_gb,
            "gurobi_gap_percent": 100 * theirs.gap,
            "gurobi_cpu_s": theirs.cpu_seconds,
            "ours_cpu_s": ours.cpu_seconds,
        }
        say(f"{label:28s} covered: ours {ours.coverage_gb:g}, Gurobi's {theirs.coverage_gb:g} GB")
        yield row


def replan_rows(cases: list[tuple[int, float]]) -> Iterator[Row]:
    """Churn and re-place; newcomers take the place of leavers, or sizes change in place."""
    for gpus, share in cases:
        for name in ("tpmix", "tpscarce", "refmix"):
            problem = generate(name, gpus, 0)
            today = place(instance_from(problem), Request(), Budget(LIMIT_S))
            servers = [entry.server_index for entry in today.assignments]
            for in_place in (False, True):
                later = instance_from(churned(problem, servers, share, 1, in_place=in_place))
                fresh = place(later, Request(), Budget(LIMIT_S))
                plan, result = relocate(later, None, Request(), Relocation(0.01), Budget(LIMIT_S))
                row = {
                    "problem": f"{name}-{gpus}-{share:g}{'-in-place' if in_place else ''}",
                    "gpus": gpus,
                    "in_place": in_place,
                    "coverage_percent": 100 * plan.coverage_gb / fresh.coverage_gb,
                    "moved_percent": 100 * result.migrated_shards / int(later.tp.sum()),
                    "cpu_s": plan.cpu_seconds,
                    "valid": check_plan(later, plan).passed,
                }
                say(
                    f"{row['problem']:28s} replan    covers {row['coverage_percent']:.3f}% of "
                    f"optimal, moves {row['moved_percent']:.3f}%, cpu {row['cpu_s']:.3f} s"
                )
                yield row


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


def promised(
    what: str, rows: list[Row], measure: Callable[[list[Row]], float], most: float, unit: str
) -> Row:
    """One promise with what was measured."""
    measured = measure(rows)
    return {
        "promise": what,
        "measured": measured,
        "limit": most,
        "unit": unit,
        "holds": bool(measured <= most + 1e-9),
        "problems": len(rows),
    }


def cpu(rows: list[Row]) -> float:
    """Worst CPU seconds."""
    return float(max(row["cpu_s"] for row in rows))


def total_cpu(rows: list[Row]) -> float:
    """CPU seconds of all."""
    return float(sum(row["cpu_s"] for row in rows))


def middle(rows: list[Row]) -> float:
    """Median CPU seconds."""
    return float(statistics.median(row["cpu_s"] for row in rows))


def unproven(rows: list[Row]) -> float:
    """Plans whose value does not meet its bound."""
    return float(sum(not row["proven"] for row in rows))


def gap(rows: list[Row]) -> float:
    """Worst gap in percent."""
    return float(max(row["gap_percent"] for row in rows))


def uncovered(rows: list[Row]) -> float:
    """Worst shortfall of the coverage bound in percent."""
    return float(max(100 - row["coverage_percent"] for row in rows))


def refused(rows: list[Row]) -> float:
    """Plans that do not pass the check."""
    return float(sum(not row["valid"] for row in rows))


def promises(
    minmax: list[Row],
    racks: list[Row],
    coverage: list[Row],
    others: list[Row],
    gurobi: list[Row],
    replans: list[Row],
    start_s: float,
    peak_mib: float,
) -> list[Row]:
    """Each promise with what was measured; only those whose sizes were run."""
    found: list[Row] = []

    def promise(
        what: str, rows: list[Row], measure: Callable[[list[Row]], float], most: float, unit: str
    ) -> None:
        if rows:
            found.append(promised(what, rows, measure, most, unit))

    for gpus, most in ((128, 2.0), (1024, 1.0), (65536, 1.0)):
        rows = [r for r in minmax if r["gpus"] == gpus and "-cont" not in r["problem"]]
        promise(f"abs, typed, {gpus}: unproven", rows, unproven, 0, "problems")
        promise(f"abs, typed, {gpus}: worst", rows, cpu, most, "CPU s")
        if gpus == 128:
            promise("abs, typed, 128: median", rows, middle, 0.1, "CPU s")
    for gpus, most in ((128, 1.5), (1024, 0.2), (8192, 1.0), (65536, 10.0)):
        rows = [r for r in minmax if r["gpus"] == gpus and "-cont" in r["problem"]]
        promise(f"abs, all distinct, {gpus}: worst gap", rows, gap, 1.0, "%")
        promise(f"abs, all distinct, {gpus}: worst", rows, cpu, most, "CPU s")
    promise("abs, racks of 72: unproven", racks, unproven, 0, "problems")
    promise("abs, racks of 72: worst", racks, cpu, 1.0, "CPU s")
    for gpus, most in ((128, 3.0), (1024, 10.0), (65536, 10.0)):
        rows = [r for r in coverage if r["gpus"] == gpus]
        typed = [r for r in rows if "-cont" not in r["problem"]]
        promise(
            f"coverage, typed, {gpus}: worst shortfall", typed, uncovered, SHORTFALL_PERCENT, "%"
        )
        distinct = [r for r in rows if "-cont" in r["problem"]]
        promise(
            f"coverage, all distinct, {gpus}: worst shortfall",
            distinct,
            uncovered,
            SHORTFALL_PERCENT,
            "%",
        )
        promise(f"coverage, {gpus}: worst", rows, cpu, most, "CPU s")
        promise(
            f"coverage, typed, {gpus}: most quanta above the abs optimum",
            typed,
            lambda rs: max((r["balance"] - r["abs_value"]) / r["quantum_gb"] for r in rs),
            1.0,
            "quanta",
        )
    for gpus, most in ((128, 3.0), (1024, 10.0)):
        rows = [r for r in others if r["gpus"] == gpus and r["objective"] == "coverage"]
        promise(
            f"other instances, coverage, {gpus}: worst shortfall",
            rows,
            uncovered,
            SHORTFALL_PERCENT,
            "%",
        )
        promise(f"other instances, coverage, {gpus}: worst", rows, cpu, most, "CPU s")
        rows = [r for r in others if r["gpus"] == gpus and r["objective"] == "abs"]
        promise(f"other instances, abs, {gpus}: worst gap", rows, gap, 1.0, "%")
    scarce = [r for r in coverage if r["problem"].startswith("tpscarce-") and r["gpus"] <= 1024]
    typed_scarce = [r for r in scarce if "-cont" not in r["problem"]]
    promise(
        "tpscarce: least gain in coverage over a paper-optimal placement",
        typed_scarce,
        lambda rs: (
            -statistics.mean(
                100 * (r["coverage_percent"] / r["abs_coverage_percent"] - 1) for r in rs
            )
        ),
        -10.0,
        "% (mean, negated)",
    )
    promise(
        "tpscarce-64: gain in coverage over Gurobi's own placements",
        gurobi,
        lambda rs: -100 * (sum(r["ours_gb"] for r in rs) / sum(r["gurobi_gb"] for r in rs) - 1),
        -10.0,
        "% (total, negated)",
    )
    for gpus, most in ((1024, 1.0), (65536, 10.0)):
        rows = [r for r in replans if r["gpus"] == gpus]
        promise(f"re-placement, {gpus}: worst shortfall of optimal", rows, uncovered, 1.0, "%")
        promise(
            f"re-placement, {gpus}: most moved, sizes changed in place too",
            rows,
            lambda rs: max(r["moved_percent"] for r in rs),
            1.0,
            "% of shards",
        )
        promise(f"re-placement, {gpus}: worst", rows, cpu, most, "CPU s")
    everything = [*minmax, *racks, *coverage, *others, *replans]
    promise(
        "plans that `check` refuses",
        everything,
        refused,
        0,
        "plans",
    )
    promise("aqua-place --help", [{}], lambda _: start_s, 0.5, "CPU s")
    promise("peak memory of this whole run", [{}], lambda _: peak_mib, 1024, "MiB")
    return found


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
