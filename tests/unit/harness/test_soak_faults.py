"""The faults of a soak: the same by seed, all kinds to all, and none where it must not be."""

from __future__ import annotations

from itertools import combinations

from harness.soak_faults import VICTIMS, FaultKind, plan

PERIOD_S = 180.0


def test_a_seed_repeats_a_period() -> None:
    assert plan(1, 3, PERIOD_S) == plan(1, 3, PERIOD_S)
    assert plan(1, 3, PERIOD_S) != plan(1, 4, PERIOD_S)
    assert plan(1, 3, PERIOD_S) != plan(2, 3, PERIOD_S)


def test_every_kind_meets_all_its_victims() -> None:
    met = {(f.kind, f.victim) for period in range(40) for f in plan(0, period, PERIOD_S)}
    assert met == {(kind, victim) for kind in FaultKind for victim in VICTIMS[kind]}


def test_steady_services_are_never_killed() -> None:
    assert not any(victim.endswith("-steady") for victim in VICTIMS[FaultKind.KILL])


def test_one_part_of_a_service_has_one_fault_at_a_time_and_none_at_the_end() -> None:
    for period in range(10):
        faults = plan(0, period, PERIOD_S)
        assert all(0 <= f.begins_s <= f.ends_s <= PERIOD_S for f in faults)
        for one, other in combinations(faults, 2):
            if one.part == other.part:
                assert one.ends_s <= other.begins_s
