"""Every way that a plan and what runs can differ, on a real coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aqua_client import CoordinatorClient
from aqua_placer.budget import Budget
from aqua_placer.plan.files import push
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.rollout.drift import DriftKind, PlanDrift, find_drift
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import Position, positions_after
from aqua_placer.solve.placement import place
from aqua_protocol.leases import LeaseRequest, Pairing, PlacementPlan
from aqua_protocol.plan import Plan
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.paper_fleet import PaperFleet, domain_of, gpu_of, node_of

PROBLEM = {
    "servers": [{"name": "dgx", "count": 3, "gpus": 4, "hbm_gb": 80}],
    "models": [
        {"name": "image", "replicas": 5, "spare_gb": 40},
        {"name": "llama", "replicas": 2, "tp": 2, "need_gb": 30},
        {"name": "small", "need_gb": 50},
        {"name": "plain", "memory_gb": 0},
    ],
}
ROLES = {"image": "producer", "llama": "consumer", "small": "consumer", "plain": ""}
NOTHING = ClusterMapping()
EXACT = ClusterMapping.model_validate(
    {
        "servers": {
            f"dgx/{number}": {
                "node": node_of(f"dgx/{number}"),
                "gpus": [gpu_of(f"dgx/{number}", gpu) for gpu in range(4)],
            }
            for number in range(3)
        }
    }
)


@pytest.fixture(scope="module")
def solved() -> tuple[Instance, Plan]:
    instance = instance_from(PROBLEM)
    return instance, place(instance, Request(), Budget(30))


@pytest.fixture
def fleet(client: CoordinatorClient, solved: tuple[Instance, Plan]) -> Iterator[PaperFleet]:
    """The plan, running as it says, and in force."""
    _, plan = solved
    roles = {entry.group: ROLES[entry.group.split(".")[0]] for entry in plan.assignments}
    fleet = PaperFleet(client, roles)
    fleet.go_to(plan)
    push(plan, client.url, None)
    yield fleet
    for group in [*fleet.running]:
        fleet.stop(group)


def kinds(found: PlanDrift) -> set[tuple[DriftKind, str]]:
    return {(one.kind, one.subject) for one in found.differences}


@pytest.mark.parametrize("mapping", [NOTHING, EXACT], ids=["by members", "by mapping"])
def test_what_runs_as_planned_has_no_drift(
    fleet: PaperFleet,
    client: CoordinatorClient,
    solved: tuple[Instance, Plan],
    mapping: ClusterMapping,
) -> None:
    instance, plan = solved
    found = find_drift(plan, client, mapping, instance)
    assert found.in_step, found.differences
    assert found.members_planned == found.members_seen == sum(map(len, fleet.running.values()))
    assert found.servers == {entry.server: domain_of(entry.server) for entry in plan.assignments}


def test_without_the_problem_a_group_that_never_reports_is_absent(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    del fleet
    assert kinds(find_drift(solved[1], client, NOTHING)) == {(DriftKind.MEMBER_ABSENT, "plain")}


@pytest.mark.parametrize("mapping", [NOTHING, EXACT], ids=["by members", "by mapping"])
def test_members_that_left_moved_or_came_are_told_apart(
    fleet: PaperFleet,
    client: CoordinatorClient,
    solved: tuple[Instance, Plan],
    mapping: ClusterMapping,
) -> None:
    instance, plan = solved
    positions = positions_after(plan)
    fleet.stop("llama.0")
    away = next(name for name in sorted(positions) if name.startswith("image"))
    here = positions[away].server
    there = next(one.server for one in positions.values() if one.server != here)
    fleet.start(away, Position(there, positions[away].gpus))
    client.report_consumer(stranger := PaperConsumer("stranger").report())
    try:
        found = find_drift(plan, client, mapping, instance)
    finally:
        client.remove_consumer("stranger", stranger.incarnation)
    assert kinds(found) == {
        (DriftKind.MEMBER_ABSENT, "llama.0.0"),
        (DriftKind.MEMBER_ABSENT, "llama.0.1"),
        (DriftKind.MEMBER_MISPLACED, away),
        (DriftKind.MEMBER_UNPLANNED, "stranger"),
    }
    (moved,) = (one for one in found.differences if one.subject == away)
    assert here in moved.planned
    assert all(one.remedy for one in found.differences)


def test_one_gpu_further_on_the_same_node_is_drift_where_gpus_are_known(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    instance, plan = solved
    (gpu,) = positions_after(plan)["small"].gpus
    server = positions_after(plan)["small"].server
    fleet.start("small", Position(server, ((gpu + 1) % 4,)))
    assert find_drift(plan, client, NOTHING, instance).in_step
    assert kinds(find_drift(plan, client, EXACT, instance)) == {
        (DriftKind.MEMBER_MISPLACED, "small")
    }


def test_servers_of_a_class_may_stand_for_each_other(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    instance, plan = solved
    turned = {"dgx/0": "dgx/1", "dgx/1": "dgx/2", "dgx/2": "dgx/0"}
    for group, position in positions_after(plan).items():
        fleet.start(group, Position(turned[position.server], position.gpus))
    found = find_drift(plan, client, NOTHING, instance)
    assert found.in_step
    assert found.servers == {server: domain_of(other) for server, other in turned.items()}
    misplaced = kinds(find_drift(plan, client, EXACT, instance))
    assert {kind for kind, _ in misplaced} == {DriftKind.MEMBER_MISPLACED}


def test_a_member_in_the_other_role_is_drift(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    instance, plan = solved
    at = positions_after(plan)["small"].server
    fleet.stop("small")
    lender = PaperProducer("small").report(domain=domain_of(at), node=node_of(at))
    client.report_producer(lender)
    try:
        assert kinds(find_drift(plan, client, NOTHING, instance)) == {
            (DriftKind.ROLE_DIFFERS, "small")
        }
    finally:
        client.remove_producer("small", lender.incarnation)


def test_another_plan_in_force_and_other_pairings_under_its_name_are_drift(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    del fleet
    instance, plan = solved
    client.put_placements(PlacementPlan(plan_hash="f" * 64, pairings=[]))
    assert kinds(find_drift(plan, client, NOTHING, instance)) == {
        (DriftKind.PLAN_NOT_IN_FORCE, "plan")
    }
    held = [Pairing(consumer_id="small", producers=["image.9"])]
    client.put_placements(PlacementPlan(plan_hash=plan.plan_hash, pairings=held))
    found = find_drift(plan, client, NOTHING, instance)
    assert {one.kind for one in found.differences} == {DriftKind.PAIRING_DIFFERS}
    (small,) = (one for one in found.differences if one.subject == "small")
    assert small.seen == "image.9"


def test_a_lease_from_another_than_the_match_is_drift_until_it_ends(
    fleet: PaperFleet, client: CoordinatorClient, solved: tuple[Instance, Plan]
) -> None:
    instance, plan = solved
    match = next(match for match in plan.matches if match.consumer == "small")
    other = next(
        name
        for name in sorted(fleet.running)
        if name.startswith("image") and name != match.producer
    )
    at = positions_after(plan)["small"].server
    (lender,) = fleet.running[other]
    assert isinstance(lender, PaperProducer)
    lender.books_id = client.report_producer(lender.report(domain=domain_of(at))).books_id
    client.report_producer(lender.report(domain=domain_of(at)))
    pairing = Pairing(consumer_id="small", producers=[other])
    client.put_placements(PlacementPlan(plan_hash="0" * 64, pairings=[pairing]))
    lease = client.grant_lease(LeaseRequest(consumer_id="small", bytes=SLAB, slab_bytes=SLAB)).lease
    push(plan, client.url, None)
    found = find_drift(plan, client, NOTHING, instance)
    assert (DriftKind.LEASE_OFF_PLAN, "small") in kinds(found)
    client.release_lease(lease.lease_id, lease.epoch)
    kept = {kind for kind, _ in kinds(find_drift(plan, client, NOTHING, instance))}
    assert DriftKind.LEASE_OFF_PLAN not in kept
