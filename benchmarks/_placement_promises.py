"""What aqua-place promises: each promise beside what rows say of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from _placement_rows import Row

SHORTFALL_PERCENT = 0.5
"""Of coverage below its bound, at most: profiles are good to 1.8%."""

SWEEP_CPU_S = 180.0
"""Of all problems of the sweep together: some 60 on a quiet machine."""


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


def sweep_promises(rows: list[Row]) -> list[Row]:
    """The promises that are about every kind of problem."""
    covering = [row for row in rows if row["objective"] == "coverage"]
    return [
        promised("coverage: worst shortfall", covering, uncovered, SHORTFALL_PERCENT, "%"),
        promised("plans that `check` refuses", rows, refused, 0, "plans"),
        promised("CPU seconds of the sweep", rows, total_cpu, SWEEP_CPU_S, "CPU s"),
    ]
