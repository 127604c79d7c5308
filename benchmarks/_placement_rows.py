"""Rows of the tables of placement: one problem solved, verified and measured each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _placement_problems import SERVER_GPUS, family, sweep_problems
from aqua_placer.benchmark import row_of
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

Row = dict[str, Any]


def solve(instance: Instance, objective: Objective, label: str) -> tuple[Plan, Row]:
    """Solve, verify, and write the row of the table."""
    plan = place(instance, Request(objective=objective), Budget(LIMIT_S))
    row = row_of(label, instance, plan) | {
        "objective": objective.value,
        "quantum_gb": max(instance.quantum_gb, 1.0),
    }
    say(
        f"{label:28s} {objective.value:9s} value {plan.value:12.2f} bound {plan.bound:12.2f} "
        f"gap {row['gap_percent']:8.4f}% cover {row['coverage_percent']:8.3f}% "
        f"balance {plan.balance:8.2f} cpu {plan.cpu_seconds:7.3f} s "
        f"{'proven ' if plan.proven else ''}{'' if row['valid'] else 'INVALID'}"
    )
    return plan, row


def say(text: str) -> None:
    """Progress goes to standard error; the result alone to standard output."""
    print(text, file=sys.stderr, flush=True)


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


def sweep_rows(only: str) -> list[Row]:
    """Every kind of problem whose label contains `only`, with both objectives."""
    return [
        solve(instance_from(problem), objective, label)[1]
        for objective in (Objective.COVERAGE, Objective.ABS)
        for label, problem in sweep_problems()
        if only in label
    ]


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
