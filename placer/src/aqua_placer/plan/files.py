"""Plans as files, read with every mistake named; and their sending.

The coordinator obeys a plan's matches as pairings of member names. A group of one shard is the
member of its own name; shard `i` of a larger group is `name.i`, which is how the shards of a
deployment register. `push` replaces what the coordinator holds, with a token of role operator.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from aqua_placer.errors import PlanInvalidError
from aqua_placer.problem.document import read_document
from aqua_placer.problem.instance import Instance, Placement
from aqua_protocol.ids import MAX_NAME_LENGTH, NAME_PATTERN
from aqua_protocol.leases import MAX_PAIRINGS, Pairing, PlacementPlan
from aqua_protocol.plan import Plan
from aqua_protocol.wire import first_fault

REASON_LENGTH: Final = 512
"""Characters of a pairing's reason, fixed by the schema of the wire."""


def plan_from(document: Any, source: str) -> Plan:  # noqa: ANN401 - parsed JSON or YAML
    """The plan that a parsed document holds.

    Raises:
        PlanInvalidError: It is not a plan.
    """
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        raise PlanInvalidError(
            f"{source} is not a plan: {first_fault(error)}",
            remedy="Use a file that `aqua-place solve` or `replan` wrote with --output.",
        ) from error


def read_plan(path: Path) -> Plan:
    """Read a plan file, JSON or YAML, `.gz` or not.

    Raises:
        PlanInvalidError: It is not a plan.
        ProblemInvalidError: It cannot be read at all.
    """
    return plan_from(read_document(path), str(path))


def require_problem(plan: Plan, instance: Instance, plan_file: Path, file: Path) -> None:
    """Refuse a plan that was not made for this problem.

    Raises:
        PlanInvalidError: It was made for another.
    """
    if plan.problem_hash != instance.digest:
        raise PlanInvalidError(
            f"{plan_file} was made for another problem than {file}",
            remedy="Give the file it was solved from, or solve again.",
        )


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


def member_name(group: str, shard: int, shard_count: int) -> str:
    """Name under which a shard of a group reports."""
    return group if shard_count == 1 else f"{group}.{shard}"


def pairings_of(plan: Plan) -> PlacementPlan:
    """What the coordinator is told.

    Raises:
        PlanInvalidError: A name that no member may have, or more matches than one plan holds.
    """
    if len(plan.matches) > MAX_PAIRINGS:
        raise PlanInvalidError(
            f"the plan has {len(plan.matches)} matches, the coordinator takes {MAX_PAIRINGS}",
            remedy="Split the cluster between coordinators.",
        )
    shards = Counter({entry.group: len(entry.gpus) for entry in plan.assignments})

    def member(group: str, shard: int) -> str:
        name = member_name(group, shard, shards[group])
        if not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_NAME_LENGTH:
            raise PlanInvalidError(
                f"{name!r} cannot be the name of a member",
                remedy="Use letters, digits and inner . _ : - in the problem, up to 128.",
            )
        return name

    return PlacementPlan(
        plan_hash=plan.plan_hash,
        pairings=[
            Pairing(
                consumer_id=member(match.consumer, match.consumer_shard),
                producers=[member(match.producer, match.producer_shard)],
                reason=match.reason[:REASON_LENGTH],
            )
            for match in plan.matches
        ],
    )


def push(plan: Plan, url: str, token: str | None) -> int:
    """Replace the coordinator's placement; returns how many pairings it took.

    Raises:
        PlanInvalidError: See `pairings_of`.
        AquaError: What the coordinator answered, as its own type.
        UnavailableError: No coordinator answers there.
    """
    from aqua_client import CoordinatorClient

    body = pairings_of(plan)
    with CoordinatorClient(url, token) as client:
        client.put_placements(body)
    return len(body.pairings)
