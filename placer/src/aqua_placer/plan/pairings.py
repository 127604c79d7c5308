"""A plan's matches as the coordinator obeys them: pairings of member names.

A group of one shard is the member of its own name; shard `i` of a larger group is `name.i`, which
is how the shards of a deployment register. `push` replaces what the coordinator holds, with a token
of role operator.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from aqua_placer.errors import PlanInvalidError
from aqua_protocol.ids import MAX_NAME_LENGTH, NAME_PATTERN
from aqua_protocol.leases import MAX_PAIRINGS, Pairing, PlacementPlan
from aqua_protocol.plan import Plan

REASON_LENGTH: Final = 512
"""Characters of a pairing's reason, fixed by the schema of the wire."""


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
        name = group if shards[group] == 1 else f"{group}.{shard}"
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
