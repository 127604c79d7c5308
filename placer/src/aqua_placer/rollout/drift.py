"""Drift: how what runs differs from what a plan says, as typed differences.

Compared are the pairings that the coordinator obeys, the members that report to it (there or not,
in which role, where) and who leases from whom. Not compared is what changes from second to second
by design: how much is offered and leased. A lease is drift only where the plan says who lends: a
consumer that the plan leaves unmatched may borrow from whom it can.

A group that neither lends nor borrows never reports; only the problem says which those are. The
problem also tells the role of producers that serve no one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from pydantic import BaseModel, Field, computed_field

from aqua_client import CoordinatorClient
from aqua_placer.plan.files import pairings_of
from aqua_placer.problem.instance import Instance
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import Position, members_of, positions_after
from aqua_placer.rollout.sightings import ClusterView, Sites
from aqua_protocol.lease import LEASE
from aqua_protocol.plan import Plan

MAX_LISTED = 3
"""Members in one sentence. Doubled, it is longer; the pairings are in the plan."""


class DriftKind(StrEnum):
    """How a plan and what runs can differ."""

    PLAN_NOT_IN_FORCE = "plan_not_in_force"
    PAIRING_DIFFERS = "pairing_differs"
    MEMBER_ABSENT = "member_absent"
    MEMBER_MISPLACED = "member_misplaced"
    MEMBER_UNPLANNED = "member_unplanned"
    ROLE_DIFFERS = "role_differs"
    LEASE_OFF_PLAN = "lease_off_plan"


REMEDIES = {
    DriftKind.PLAN_NOT_IN_FORCE: "aqua place push PLAN",
    DriftKind.PAIRING_DIFFERS: "aqua place push PLAN",
    DriftKind.MEMBER_ABSENT: "start it, with AQUA_MEMBER set to its group's name",
    DriftKind.MEMBER_MISPLACED: "move it, or plan anew with `replan`",
    DriftKind.MEMBER_UNPLANNED: "add it to the problem and plan anew with `replan`, or stop it",
    DriftKind.ROLE_DIFFERS: "start it with the flags of its role, or plan anew",
    DriftKind.LEASE_OFF_PLAN: "wait until it is released, or revoke it",
}


class Difference(BaseModel):
    """One thing that is not as planned."""

    kind: DriftKind
    subject: str = Field(description="Name of the member, or `plan`.")
    planned: str
    seen: str
    remedy: str


class PlanDrift(BaseModel):
    """All differences of one comparison."""

    plan_hash: str
    step: int | None = Field(default=None, description="Compared with the state after this step.")
    members_planned: int
    members_seen: int
    servers: dict[str, str] = Field(description="Domain of each server that is told by members.")
    differences: list[Difference] = Field(default_factory=list)

    @computed_field  # type: ignore[prop-decorator] # as pydantic asks for
    @property
    def in_step(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def find_drift(
    plan: Plan,
    client: CoordinatorClient,
    mapping: ClusterMapping,
    instance: Instance | None = None,
    step_count: int | None = None,
) -> PlanDrift:
    """Compare a plan, or the state after some of its steps, with what the coordinator sees.

    Args:
        instance: The plan's problem, which tells the roles of groups without a match.
        step_count: Compare places after this many moves only; pairings and leases are the plan's.

    Raises:
        AquaError: What the coordinator answered, as its own type.
        PlanInvalidError: A name that no member may have, or there are no such steps.
    """
    positions = positions_after(plan, step_count)
    roles = _roles(plan, instance)
    view = ClusterView.read(client)
    sites = Sites.found(positions, view, mapping)
    differences: list[Difference] = []
    if step_count is None:
        differences += _pairing_drift(plan, client)
    differences += member_drift(positions, roles, view, sites)
    if step_count is None:
        differences += _lease_drift(plan, client)
    return PlanDrift(
        plan_hash=plan.plan_hash,
        step=step_count,
        members_planned=sum(
            len(position.gpus) for group, position in positions.items() if roles.get(group) != ""
        ),
        members_seen=len(view.members),
        servers=dict(sites.domains),
        differences=differences,
    )


def _roles(plan: Plan, instance: Instance | None) -> dict[str, str]:
    """Role of each group as far as it is known; "" for one that never reports."""
    roles = {entry.group: "consumer" for entry in plan.unmatched}
    roles |= {match.consumer: "consumer" for match in plan.matches}
    roles |= {match.producer: "producer" for match in plan.matches}
    if instance is not None:
        word = {1: "producer", -1: "consumer", 0: ""}
        placed = {entry.group: entry.server_index for entry in plan.assignments}
        for number, name in enumerate(instance.names):
            if name in placed:
                kind = int(instance.servers.class_of[placed[name]])
                roles[name] = word[int(instance.sign[number, kind])]
    return roles


def member_drift(
    positions: Mapping[str, Position], roles: Mapping[str, str], view: ClusterView, sites: Sites
) -> Iterator[Difference]:
    """Members that are absent, elsewhere, in another role, or in no plan."""
    planned: set[str] = set()
    for group, position in sorted(positions.items()):
        role = roles.get(group)
        names = members_of(group, len(position.gpus))
        planned.update(names)
        for name, gpu in zip(names, position.gpus, strict=True):
            member = view.members.get(name)
            if member is None:
                if role != "":
                    at = f"{role or 'member'} on GPU {gpu} of {position.server}"
                    yield _difference(DriftKind.MEMBER_ABSENT, name, at, "does not report")
                continue
            if role and role not in member.roles:
                yield _difference(DriftKind.ROLE_DIFFERS, name, role, " and ".join(member.roles))
            if (elsewhere := sites.misplaced(member, position.server, gpu)) is not None:
                yield _difference(DriftKind.MEMBER_MISPLACED, name, *elsewhere)
    for name in sorted(set(view.members) - planned):
        member = view.members[name]
        at = f"{' and '.join(member.roles)} on {member.gpu_uuid} of node {member.node}"
        yield _difference(DriftKind.MEMBER_UNPLANNED, name, "not in the plan", at)


def _pairing_drift(plan: Plan, client: CoordinatorClient) -> Iterator[Difference]:
    """The plan that the coordinator obeys is another, or has other pairings under its name."""
    wanted = {pair.consumer_id: pair.producers for pair in pairings_of(plan).pairings}
    page = client.get_placements()
    if page.plan_hash != plan.plan_hash:
        seen = f"plan {page.plan_hash[:12]}" if page.plan_hash else "no plan"
        told = f"plan {plan.plan_hash[:12]}"
        yield _difference(DriftKind.PLAN_NOT_IN_FORCE, "plan", told, seen)
        return
    held = {pair.consumer_id: pair.producers for pair in page.pairings}
    while page.next_cursor is not None:
        page = client.get_placements(cursor=page.next_cursor)
        held |= {pair.consumer_id: pair.producers for pair in page.pairings}
    for name in sorted({*wanted, *held}):
        if wanted.get(name) != held.get(name):
            pair = _listed(wanted.get(name)), _listed(held.get(name))
            yield _difference(DriftKind.PAIRING_DIFFERS, name, *pair)


def _lease_drift(plan: Plan, client: CoordinatorClient) -> Iterator[Difference]:
    """Leases of matched consumers from others than their producers."""
    wanted = {pair.consumer_id: pair.producers for pair in pairings_of(plan).pairings}
    for lease in client.list_leases():
        lenders = wanted.get(lease.consumer_id)
        is_held = lease.state not in LEASE.terminal
        if is_held and lenders is not None and lease.producer_id not in lenders:
            seen = f"{lease.lease_id} ({lease.state}) from {lease.producer_id}"
            told = f"leases from {_listed(lenders)}"
            yield _difference(DriftKind.LEASE_OFF_PLAN, lease.consumer_id, told, seen)


def _listed(names: list[str] | None) -> str:
    if not names:
        return "no producer"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _difference(kind: DriftKind, subject: str, planned: str, seen: str) -> Difference:
    return Difference(kind=kind, subject=subject, planned=planned, seen=seen, remedy=REMEDIES[kind])
