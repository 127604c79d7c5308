"""A plan's matches as the coordinator obeys them: pairings of member names.

A group of one shard is the member of its own name; shard `i` of a larger group is `name.i`, which
is how the shards of a deployment register. Sends `PUT /v1/placements` with a bearer token.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import httpx
from pydantic import ValidationError

from aqua_placer.errors import PlanInvalidError
from aqua_protocol import AquaError, ErrorBody, UnavailableError, error_from_body
from aqua_protocol.ids import MAX_NAME_LENGTH, NAME_PATTERN
from aqua_protocol.leases import MAX_PAIRINGS, Pairing, PlacementPlan
from aqua_protocol.plan import Plan

REASON_LENGTH: Final = 512
TIMEOUT_S: Final = 30.0


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


def push(plan: Plan, url: str, token: str | None, *, client: httpx.Client | None = None) -> int:
    """Replace the coordinator's placement; returns how many pairings it took.

    Raises:
        PlanInvalidError: See `pairings_of`.
        AquaError: What the coordinator answered, as its own type.
        UnavailableError: Nobody answers there.
    """
    body = pairings_of(plan)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    own = client or httpx.Client(timeout=TIMEOUT_S)
    try:
        answer = own.put(
            f"{url.rstrip('/')}/v1/placements",
            content=body.model_dump_json(),
            headers={**headers, "Content-Type": "application/json"},
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(
            f"no coordinator answers at {url}: {error}",
            remedy="Check --url (AQUA_COORDINATOR_URL) and that the coordinator runs.",
        ) from error
    finally:
        if client is None:
            own.close()
    if answer.is_success:
        return len(body.pairings)
    raise _refusal(answer, url)


def _refusal(answer: httpx.Response, url: str) -> AquaError:
    try:
        return error_from_body(ErrorBody.model_validate_json(answer.content))
    except ValidationError:
        return UnavailableError(
            f"{url} answered {answer.status_code} without an Aqua error body",
            remedy="Check that the address is a coordinator's, not a proxy's.",
        )
