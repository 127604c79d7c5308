from __future__ import annotations

import itertools

import pytest

from aqua_protocol.errors import InvalidTransitionError
from aqualib.memory.frame import (
    FRAME,
    MOVING_STATES,
    OPEN_STATES,
    FrameEvent,
    FrameState,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(FrameState, FrameEvent)))
def test_every_pair_is_either_allowed_or_refused_with_both_names(
    state: FrameState, event: FrameEvent
) -> None:
    if FRAME.allows(state, event):
        assert FRAME.next(state, event) in FrameState
    else:
        with pytest.raises(InvalidTransitionError) as caught:
            FRAME.next(state, event)
        assert caught.value.details == {"noun": "frame", "state": state, "event": event}


def test_every_state_is_reachable_every_event_does_something_and_all_is_explained() -> None:
    reached = {FRAME.initial}
    for _ in FrameState:
        reached |= {to for (at, _), to in FRAME.transitions.items() if at in reached}
    assert reached == set(FrameState)
    assert {event for _, event in FRAME.transitions} == set(FrameEvent)
    assert set(FRAME.meanings) == {*FrameState, *FrameEvent}


def test_bytes_change_place_only_through_a_state_with_a_closed_gate() -> None:
    for (before, event), after in FRAME.transitions.items():
        if before in OPEN_STATES:
            assert after in MOVING_STATES, (before, event)


def test_a_move_can_always_be_called_off() -> None:
    for state in MOVING_STATES:
        assert FRAME.next(state, FrameEvent.ABANDON) in OPEN_STATES


def test_lost_bytes_come_back_only_as_an_empty_frame() -> None:
    ways_out = {event for (state, event) in FRAME.transitions if state is FrameState.LOST}
    assert ways_out == {FrameEvent.EMPTY}
