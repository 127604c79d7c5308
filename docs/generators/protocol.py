"""The pages of the protocol: two state machines, drawn from their tables, and error codes."""

from __future__ import annotations

from aqua_protocol.errors import ERRORS_BY_CODE
from aqua_protocol.machine import EventT, StateMachine, StateT


def machine_page(notice: str, machine: StateMachine[StateT, EventT], source: str) -> str:
    """One Markdown page for a state machine: picture, words, and every allowed pair."""
    states = sorted({state for state, _ in machine.transitions} | set(machine.terminal), key=str)
    ordered = [state for state in type(machine.initial) if state in states]
    events = [event for event in machine.meanings if not isinstance(event, type(machine.initial))]
    cells = {state: [_cell(machine, state, event) for event in events] for state in ordered}
    return "\n".join(
        [
            notice,
            f"# The {machine.noun}",
            "",
            f"Source of truth: [`{source}`](../../{source}). A pair that is not listed is refused",
            "with `invalid_transition`.",
            "",
            "```mermaid",
            machine.mermaid(),
            "```",
            "",
            "## States",
            "",
            *(f"- `{state}`: {machine.meanings[state]}" for state in ordered),
            "",
            "## Events",
            "",
            *(f"- `{event}`: {machine.meanings[event]}" for event in events),
            "",
            "## Every pair",
            "",
            "| state | " + " | ".join(f"`{event}`" for event in events) + " |",
            "|" + "---|" * (len(events) + 1),
            *("| " + " | ".join([f"`{state}`", *cells[state]]) + " |" for state in ordered),
            "",
        ]
    )


def error_page(notice: str) -> str:
    """The error codes that cross the wire."""
    rows = [
        f"| `{code}` | {kind.http_status} | `{kind.__name__}` | "
        f"{(kind.__doc__ or '').splitlines()[0]} |"
        for code, kind in sorted(ERRORS_BY_CODE.items())
        if kind.__module__ == "aqua_protocol.errors"
    ]
    return "\n".join(
        [
            notice,
            "# Errors",
            "",
            "Codes are stable; messages are for people. Bodies have the form",
            "`{code, message, remedy, details, retry_after_s}`.",
            "",
            "| code | HTTP | type | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _cell(machine: StateMachine[StateT, EventT], state: StateT, event: object) -> str:
    after = next(
        (to for (at, on), to in machine.transitions.items() if at == state and on == event), None
    )
    return f"`{after}`" if after else "–"
