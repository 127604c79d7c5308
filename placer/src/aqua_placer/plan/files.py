"""Plans as files: written whole or not at all, read with every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from aqua_cli import write_json
from aqua_placer.errors import PlanInvalidError
from aqua_placer.problem.document import read_document
from aqua_placer.problem.instance import Instance, Placement
from aqua_protocol.plan import Plan


def plan_from(document: Any, source: str) -> Plan:  # noqa: ANN401 - parsed JSON or YAML
    """The plan that a parsed document holds.

    Raises:
        PlanInvalidError: It is not a plan.
    """
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        raise PlanInvalidError(
            f"{source} is not a plan: {place}: {first['msg']}",
            remedy="Use a file that `aqua-place solve` or `replan` wrote with --output.",
        ) from error


def read_plan(path: Path) -> Plan:
    """Read a plan file, JSON or YAML, `.gz` or not.

    Raises:
        PlanInvalidError: It is not a plan.
        ProblemInvalidError: It cannot be read at all.
    """
    return plan_from(read_document(path), str(path))


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan as JSON (gzipped for `.gz`); a crash leaves the old file or the new one.

    Raises:
        ConfigError: The folder cannot be written.
    """
    write_json(path, plan)


def placement_of(instance: Instance, plan: Plan) -> tuple[Placement, list[list[int]]]:
    """Server and GPUs of each group of `instance` under `plan`; -1 and [] for groups it lacks.

    Raises:
        PlanInvalidError: It names servers that the problem does not have.
    """
    entries = {entry.group: entry for entry in plan.assignments}
    placement = np.full(instance.num_groups, -1, dtype=np.int64)
    gpus: list[list[int]] = [[] for _ in range(instance.num_groups)]
    for group, name in enumerate(instance.names):
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.server_index >= instance.servers.count or (
            instance.servers.name(entry.server_index) != entry.server
        ):
            raise PlanInvalidError(
                f"the plan puts {name!r} on {entry.server}, which this problem does not have",
                remedy="Use a plan made for this cluster.",
            )
        placement[group] = entry.server_index
        gpus[group] = list(entry.gpus)
    return placement, gpus
