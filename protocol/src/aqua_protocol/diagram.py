"""Draws a state machine as Mermaid text, straight from its table.

The files under `docs/protocol/` are this module's output and nothing else; `make lint` compares
them, so a diagram cannot disagree with the code.
"""

from __future__ import annotations

from aqua_protocol.machine import EventT, StateMachine, StateT


def mermaid(machine: StateMachine[StateT, EventT]) -> str:
    """A Mermaid state diagram; events between the same two states share one arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in machine.transitions.items():
        arrows.setdefault((state.value, after.value), []).append(event.value)
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {machine.initial.value}"]
    lines += [
        f"    {state} --> {after} : {', '.join(events)}"
        for (state, after), events in arrows.items()
    ]
    lines += [f"    {state.value} --> [*]" for state in sorted(machine.terminal)]
    return "\n".join(lines)
