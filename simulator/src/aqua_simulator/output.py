"""What `aqua-sim` shows: tables for people, one JSON document for programs, and what is running.

Tables and JSON go to standard output, progress to standard error, so that a pipe gets results only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from aqua_simulator.papers.report import Reproduction


def show_reproduction(made: Reproduction) -> None:
    """A figure: rows, sensitivity, and what to know about it."""
    from aqua_simulator.papers.report import number

    show_table(
        made.title,
        ("", "published", "ours", "difference", "unit"),
        [
            (
                row.name,
                row.published_text,
                number(row.ours),
                "" if row.difference is None else f"{row.difference:+.3g}",
                row.unit,
            )
            for row in made.rows
        ],
    )
    if made.sensitivity:
        show_table(
            "Sensitivity",
            ("", "ours", "unit"),
            [(row.name, number(row.ours), row.unit) for row in made.sensitivity],
        )
    for text in (*made.surrogates, *made.remarks):
        typer.echo(f"- {text}")


def show_summary(result: dict[str, Any], title: str, *, as_json: bool) -> None:
    """A serving run: its numbers, then its engines."""
    if as_json:
        show_json(result)
        return
    rows = [
        (key, f"{value:.4g}" if isinstance(value, float) else str(value))
        for key, value in result.items()
        if key != "engines"
    ]
    show_table(title, ("", "value"), rows)
    show_table(
        "Engines",
        ("engine", "steps", "busy, s", "preemptions", "prefix hits"),
        [
            (
                one["name"],
                str(one["steps"]),
                f"{one['busy_s']:.1f}",
                str(one["preemptions"]),
                f"{one['prefix_hit_share']:.1%}",
            )
            for one in result["engines"]
        ],
    )


def show_json(document: dict[str, Any]) -> None:
    """One document; not-a-number is an error, JSON has none."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, the first column to the left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextmanager
def status(message: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is running on standard error; yields the function that changes the words."""
    if quiet:
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as shown:
        yield shown.update
