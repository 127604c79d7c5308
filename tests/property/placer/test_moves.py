"""Re-placement: steps are executable, limits hold, the target is reached."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aqua_placer.budget import Budget
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.solve.placement import place
from aqua_protocol.plan import MoveKind, Plan
from harness.changed_problems import churned
from harness.placement import small_problems
from harness.slices import examples

QUICK = settings(max_examples=examples(6, whole=60))


def execute(instance: Instance, today: Plan | None, plan: Plan) -> None:
    """Carry the steps out on a model of the cluster; fail where a GPU is taken twice."""
    capacity = {
        instance.servers.name(index): int(count)
        for index, count in enumerate(instance.servers.capacity)
    }
    where: dict[str, tuple[str, list[int]]] = {}
    if today is not None:
        where = {entry.group: (entry.server, entry.gpus) for entry in today.assignments}
    holder = {(server, gpu): group for group, (server, own) in where.items() for gpu in own}
    for step, move in enumerate(plan.moves):
        assert move.step == step
        if move.from_server is not None:
            assert where.pop(move.group) == (move.from_server, move.from_gpus)
            for gpu in move.from_gpus:
                assert holder.pop((move.from_server, gpu)) == move.group
        else:
            assert move.kind in (MoveKind.START, MoveKind.RESUME)
            assert move.group not in where
        if move.to_server is not None:
            for gpu in move.to_gpus:
                assert 0 <= gpu < capacity[move.to_server]
                assert (move.to_server, gpu) not in holder, "the GPU is taken"
                holder[move.to_server, gpu] = move.group
            where[move.group] = (move.to_server, move.to_gpus)
    assert where == {entry.group: (entry.server, entry.gpus) for entry in plan.assignments}


@QUICK
@given(small_problems(), st.data())
def test_steps_lead_from_any_placement_to_the_plan_without_overfilling(
    problem: dict[str, Any], data: st.DataObject
) -> None:
    instance = instance_from(problem)
    today = place(instance, Request(seed=data.draw(st.integers(0, 3))), Budget(30))
    sizes = data.draw(st.permutations(problem["groups"]["r_gb"]))
    later = instance_from({**problem, "groups": {**problem["groups"], "r_gb": list(sizes)}})
    plan, _ = relocate(later, today, Request(), Relocation(epsilon=0.0), Budget(30))
    execute(later, today, plan)
    assert check_plan(later, plan).passed


@QUICK
@given(st.integers(0, 50), st.integers(0, 8), st.booleans())
def test_the_limit_on_moves_holds(seed: int, max_moves: int, in_place: bool) -> None:
    problem = generate("tpmix", 64, seed)
    instance = instance_from(problem)
    today = place(instance, Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    later = instance_from(churned(problem, servers, 0.1, seed, in_place=in_place))
    plan, _ = relocate(later, today, Request(), Relocation(0.0, max_moves), Budget(30))
    assert plan.migrations <= max_moves
    execute(later, today, plan)


@settings(max_examples=examples(2, whole=8))
@given(
    st.integers(0, 50),
    st.sampled_from(["tpmix", "tpmix-cont", "refmix-cont"]),
    st.booleans(),
    st.sampled_from([1.0, 0.9]),
)
def test_more_moves_never_cover_less(
    seed: int, family: str, in_place: bool, occupancy: float
) -> None:
    problem = generate(family, 64, seed, occupancy=occupancy)
    today = place(instance_from(problem), Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    later = instance_from(churned(problem, servers, 0.15, seed, in_place=in_place))
    last = 0.0
    for limit in range(0, 14, examples(3, whole=1)):
        plan, _ = relocate(later, None, Request(), Relocation(0.0, limit), Budget(30))
        assert plan.migrations <= limit
        assert check_plan(later, plan).passed
        assert plan.coverage_gb >= last - 1e-6, limit
        last = plan.coverage_gb


def test_the_same_seed_moves_the_same_groups() -> None:
    problem = generate("tpmix-cont", 256, 1)
    today = place(instance_from(problem), Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    later = instance_from(churned(problem, servers, 0.1, 1, in_place=True))
    first, second = (
        relocate(later, None, Request(seed=3), Relocation(), Budget(30))[0] for _ in range(2)
    )
    assert first.moves
    assert first.plan_hash == second.plan_hash


def test_a_plan_that_still_fits_moves_nothing() -> None:
    instance = instance_from(generate("tpmix", 128, 0))
    today = place(instance, Request(), Budget(30))
    plan, result = relocate(instance, today, Request(), Relocation(), Budget(30))
    assert result.reached
    assert plan.moves == []
    assert plan.migrations == 0


def test_groups_that_left_are_stopped_before_others_take_their_gpus() -> None:
    before = {
        "servers": [{"count": 1, "gpus": 2, "hbm_gb": 80}],
        "groups": {"name": ["old", "stay"], "tp": [1, 1], "r_gb": [10.0, -5.0]},
    }
    after = {**before, "groups": {"name": ["new", "stay"], "tp": [1, 1], "r_gb": [20.0, -5.0]}}
    today = place(instance_from(before), Request(), Budget(10))
    plan, _ = relocate(instance_from(after), today, Request(), Relocation(), Budget(10))
    assert [move.kind for move in plan.moves] == [MoveKind.STOP, MoveKind.START]
    execute(instance_from(after), today, plan)
