"""What `aqua-place bench` measures: one row per problem, in CPU seconds of solving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInvalidError
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import FAMILIES, generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from, read_problem
from aqua_placer.problem.request import Request
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Objective, Plan

SUFFIXES: Final = (".json", ".yaml", ".yml", ".json.gz", ".yaml.gz")
COLUMNS: Final = (
    *("problem", "gpus", "value", "bound", "gap_percent", "coverage_percent", "cpu_s", "valid"),
)


def sources(
    folder: Path | None, families: Sequence[str], gpus: Sequence[int], seeds: int
) -> Iterator[tuple[str, Callable[[], Instance]]]:
    """Labels and makers of the problems to measure.

    Raises:
        ProblemInvalidError: The folder holds no problem file.
    """
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.name.endswith(SUFFIXES))
        if not files:
            raise ProblemInvalidError(
                f"no problem files in {folder}", remedy=f"Put {', '.join(SUFFIXES)} files there."
            )
        for path in files:
            yield str(path.relative_to(folder)), partial(read_problem, path)
        return
    for name in families or FAMILIES:
        for size in gpus:
            for seed in range(seeds):
                yield f"{name}-{size}-s{seed}", partial(_generated, name, size, seed)


def _generated(name: str, gpus: int, seed: int) -> Instance:
    return instance_from(generate(name, gpus, seed))


def measure(
    label: str, instance: Instance, objective: Objective, time_limit_s: float
) -> dict[str, Any]:
    """Solve once and verify the plan."""
    plan = place(instance, Request(objective=objective), Budget(time_limit_s))
    return row_of(label, instance, plan)


def row_of(label: str, instance: Instance, plan: Plan) -> dict[str, Any]:
    """What a table says of a plan, and whether the verifier agrees with it."""
    bound = plan.coverage_bound_gb
    return {
        "problem": label,
        "gpus": instance.servers.total_gpus,
        "value": plan.value,
        "bound": plan.bound,
        "gap_percent": 100 * plan.gap,
        "proven": plan.proven,
        "coverage_percent": 100 * plan.coverage_gb / bound if bound else 100.0,
        "balance": plan.balance,
        "balance_bound": plan.balance_bound,
        "cpu_s": plan.cpu_seconds,
        "valid": check_plan(instance, plan).passed,
    }
