"""What a command says: documents and tables on standard output, words on standard error.

So a pipe receives results only, whatever a person is told meanwhile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


def print_json(content: BaseModel | dict[str, Any] | list[Any]) -> None:
    """Print one JSON document on one line; not-a-number is an error, JSON has none."""
    print(as_json(content))  # noqa: T201 - what `--json` is for


def as_json(content: BaseModel | dict[str, Any] | list[Any], *, indent: int | None = None) -> str:
    """A document as JSON; a model by its own rules.

    Raises:
        ValueError: It holds a number that JSON has not.
    """
    if isinstance(content, dict | list):
        return json.dumps(content, indent=indent, allow_nan=False)
    return content.model_dump_json(indent=indent)


def say(text: str) -> None:
    """Tell a person something, on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command line


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left and the others, numbers, to the right.

    However narrow the terminal is, no word is cut, as it may be a number or an id to copy: lines
    get longer than the terminal is wide.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    width = 1
    for index, column in enumerate(columns):
        words = [word for text in (column, *(row[index] for row in rows)) for word in text.split()]
        least = max(map(cell_len, words), default=0)
        table.add_column(column, justify="right" if index else "left", min_width=least)
        width += least + 3  # a line and two blanks
    for row in rows:
        table.add_row(*row)
    Console(width=max(width, Console().width)).print(table, crop=False)
