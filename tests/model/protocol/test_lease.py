"""The lease protocol, searched to its end: what must hold in every state that faults can lead to.

A slice allows one fault in a run, `make model` two (286,000 states). The invariants are worth
something only if they can fail: each planted bug must be found, and each situation that the
protocol was made for must have been met.
"""

from __future__ import annotations

from typing import Final

import pytest

from harness.lease_protocol import Bug, LeaseProtocol
from harness.lease_situations import SITUATIONS
from harness.lease_state import INVARIANTS, State, books_are_reality
from harness.slices import IS_WHOLE
from harness.state_search import Search, explore, trapped

FAULTS: Final = 2 if IS_WHOLE else 1


@pytest.fixture(scope="module")
def searched() -> Search[State]:
    protocol = LeaseProtocol(faults=FAULTS)
    return explore(protocol.initial(), protocol.steps, INVARIANTS)


@pytest.mark.timeout(1800)
def test_invariants_hold_in_every_state(searched: Search[State]) -> None:
    assert searched.ended
    assert len(searched.came_from) >= (100_000 if IS_WHOLE else 10_000)
    assert {name: searched.path(at) for name, at in searched.violated.items()} == {}


@pytest.mark.timeout(1800)
def test_books_reach_reality_from_every_state_without_a_further_fault(
    searched: Search[State],
) -> None:
    at = trapped(searched, LeaseProtocol().good_steps, books_are_reality)
    assert at is None, searched.path(at)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_search_meets_the_situations_that_the_protocol_is_made_for(
    searched: Search[State], situation: str
) -> None:
    assert any(SITUATIONS[situation](state) for state in searched.came_from)


VIOLATIONS: Final = [
    (Bug.PREDICTABLE_LEASE_IDS, "no_step_fails_for_ever"),
    (Bug.FLOOD_SHUTS_MEMBERS_OUT, "who_is_heard_keeps_its_right"),
    (Bug.MEMORY_PASSES_BETWEEN_TENANTS, "no_tenant_reads_another"),
    (Bug.MEMORY_PASSES_BETWEEN_TENANTS, "no_slab_has_two_owners"),
    (Bug.ADOPTION_WITHOUT_PROOF, "only_true_grants_name_a_consumer"),
    (Bug.NEWER_VERSION_WRITES_AHEAD, "no_step_fails_for_ever"),
    (Bug.REUSE_AT_THE_DEADLINE, "no_reuse_before_acknowledgement"),
    (Bug.GRANTS_OUTLIVE_THEIR_ROOM, "books_never_grant_what_is_not_there"),
    (Bug.STALE_REPORTS_ARE_BOOKED, "who_is_heard_keeps_its_right"),
]


@pytest.mark.parametrize(("bug", "violated"), VIOLATIONS)
def test_planted_bug_is_found(bug: Bug, violated: str) -> None:
    protocol = LeaseProtocol(bug=bug, faults=1)
    invariant = {violated: INVARIANTS[violated]}
    search = explore(protocol.initial(), protocol.steps, invariant, stop_at_violation=True)
    assert violated in search.violated


def test_every_invariant_fails_for_some_bug_and_every_bug_is_planted() -> None:
    assert {invariant for _, invariant in VIOLATIONS} == set(INVARIANTS)
    # One keeps the books from reality without violating anything, and has a test of its own.
    assert {bug for bug, _ in VIOLATIONS} == {*Bug} - {Bug.NONE, Bug.FLOOD_STOPS_THE_CLOCK}


def test_clock_that_stands_still_for_strangers_keeps_the_books_from_reality() -> None:
    protocol = LeaseProtocol(bug=Bug.FLOOD_STOPS_THE_CLOCK, faults=1)
    search = explore(protocol.initial(), protocol.steps, INVARIANTS)
    at = trapped(search, protocol.good_steps, books_are_reality)
    assert at is not None
    assert at.flooded
