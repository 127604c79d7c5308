from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Any

import pytest

from aqua_protocol import LeaseState as State
from aqua_protocol.errors import InvalidTransitionError
from aqua_protocol.lease import BOOKED_STATES, LEASE
from aqua_protocol.lease import LeaseEvent as Event
from aqua_protocol.machine import StateMachine
from aqua_protocol.slab import HELD_STATES, SLAB, SlabEvent, SlabState

MACHINES = [
    pytest.param(LEASE, State, Event, id="lease"),
    pytest.param(SLAB, SlabState, SlabEvent, id="slab"),
]


@pytest.mark.parametrize(("machine", "states", "events"), MACHINES)
class TestEveryMachine:
    def test_every_pair_is_either_allowed_or_refused_with_both_names(
        self, machine: StateMachine[Any, Any], states: type[StrEnum], events: type[StrEnum]
    ) -> None:
        for state, event in itertools.product(states, events):
            if machine.allows(state, event):
                assert machine.next(state, event) in states
            else:
                with pytest.raises(InvalidTransitionError) as caught:
                    machine.next(state, event)
                assert caught.value.details == {
                    "noun": machine.noun,
                    "state": state,
                    "event": event,
                }

    def test_every_state_is_reachable_and_every_event_does_something(
        self, machine: StateMachine[Any, Any], states: type[StrEnum], events: type[StrEnum]
    ) -> None:
        reached = {machine.initial}
        while True:
            further = {to for (at, _), to in machine.transitions.items() if at in reached} - reached
            if not further:
                break
            reached |= further
        assert reached == set(states)
        assert {event for _, event in machine.transitions} == set(events)

    def test_every_live_state_leads_to_an_end(
        self, machine: StateMachine[Any, Any], states: type[StrEnum], events: type[StrEnum]
    ) -> None:
        ends = set(machine.terminal)
        while True:
            further = {at for (at, _), to in machine.transitions.items() if to in ends} - ends
            if not further:
                break
            ends |= further
        assert ends == set(states)

    def test_every_state_and_event_is_explained(
        self, machine: StateMachine[Any, Any], states: type[StrEnum], events: type[StrEnum]
    ) -> None:
        assert len(machine.meanings) == len(states) + len(events)
        assert all(machine.meanings[word].endswith(".") for word in [*states, *events])

    def test_the_diagram_has_every_arrow_of_the_table(
        self, machine: StateMachine[Any, Any], states: type[StrEnum], events: type[StrEnum]
    ) -> None:
        drawn = set()
        for line in machine.mermaid().splitlines():
            arrow, colon, labels = line.strip().partition(" : ")
            if colon:
                at, to = arrow.split(" --> ")
                drawn |= {((at, event), to) for event in labels.split(", ")}
        assert drawn == set(machine.transitions.items())


def test_a_lease_leaves_the_books_only_by_its_producer_unless_it_never_attached() -> None:
    by_producer = {Event.RETURN_ALL, Event.PRODUCER_LOST}
    for (state, event), after in LEASE.transitions.items():
        if state in BOOKED_STATES and after not in BOOKED_STATES and state is not State.GRANTED:
            assert event in by_producer, (state, event)


def test_a_slab_becomes_free_only_by_its_holders_answer() -> None:
    for (state, event), after in SLAB.transitions.items():
        if after is SlabState.FREE:
            assert event is SlabEvent.RETURN, (state, event)


def test_a_quarantined_slab_is_never_lent_again() -> None:
    reached = {SlabState.QUARANTINED}
    for _ in SlabState:
        reached |= {to for (at, _), to in SLAB.transitions.items() if at in reached}
    assert reached == {SlabState.QUARANTINED, SlabState.RETIRED}


def test_held_slabs_are_those_that_somebody_may_have_mapped() -> None:
    assert set(SlabState) - HELD_STATES == {SlabState.FREE, SlabState.RETIRED}
