"""State machines as data: one table of allowed transitions, and nothing else decides.

A machine is its table. Code asks it for the next state, Lua scripts receive it as generated text,
documents draw it, and tests walk every (state, event) pair, allowed or refused. There are no
actions and no clocks here: callers act on a transition, at the edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from aqua_protocol.errors import InvalidTransitionError

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[StateT, EventT]):
    """A named transition table.

    Attributes:
        noun: What has the state, for messages and diagrams.
        terminal: States that keep no memory booked.
        transitions: (state, event) -> next state; a missing pair is refused.
        meanings: One sentence for every state and every event, for the documents.
    """

    noun: str
    initial: StateT
    terminal: frozenset[StateT]
    transitions: Mapping[tuple[StateT, EventT], StateT]
    meanings: Mapping[StateT | EventT, str]

    def next(self, state: StateT, event: EventT) -> StateT:
        """The state after `event`.

        Raises:
            InvalidTransitionError: The table does not allow `event` in `state`.
        """
        after = self.transitions.get((state, event))
        if after is None:
            message = f"a {self.noun} that is {state} cannot take {event}"
            raise InvalidTransitionError(message, noun=self.noun, state=state, event=event)
        return after

    def mermaid(self) -> str:
        """Draw the table for the documents; events between the same two states share an arrow."""
        arrows: dict[tuple[str, str], list[str]] = {}
        for (state, event), after in self.transitions.items():
            arrows.setdefault((state, after), []).append(event)
        lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {self.initial}"]
        lines += [f"    {a} --> {b} : {', '.join(events)}" for (a, b), events in arrows.items()]
        lines += [f"    {state} --> [*]" for state in sorted(self.terminal)]
        return "\n".join(lines)

    def allows(self, state: StateT, event: EventT) -> bool:
        """Whether the table has the pair."""
        return (state, event) in self.transitions
