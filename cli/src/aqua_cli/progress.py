"""What takes longer than a second shows where it is, on standard error.

    with progress("Searching", total=count, quiet=as_json) as shown:
        for index, item in enumerate(items):
            shown.update(done=index, note=item.name)

A terminal sees a bar (or a spinner where the total is unknown) that goes away at the end. A log
sees nothing, or a line now and then if the caller asks for it; a program that asked for JSON sees
nothing either.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aqua_cli.output import say

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressDisplay:
    """Where a task is; made by `progress`, drawn by `bar` or told to the log."""

    def __init__(
        self, bar: Progress | None, title: str, total: float | None, log_every_s: float | None
    ) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task(title, total=total, note="")
        self._title = title
        self._log_every_s = log_every_s
        self._logged_s = time.monotonic()

    def update(
        self, *, done: float | None = None, title: str | None = None, note: str | None = None
    ) -> None:
        """Show how much is done, what is being done, or a word on it; what is None stays."""
        self._title = title or self._title
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=self._title)
            if note is not None:
                self._bar.update(self._task, note=note)
        elif self._log_every_s is not None:
            now_s = time.monotonic()
            if now_s - self._logged_s >= self._log_every_s:
                self._logged_s = now_s
                say(f"{self._title}: {note}" if note else self._title)


@contextmanager
def progress(
    title: str, total: float | None = None, *, quiet: bool = False, log_every_s: float | None = None
) -> Iterator[ProgressDisplay]:
    """Show progress on standard error while the block runs.

    Args:
        title: What is being done.
        total: How much there is to do, in any unit; None if unknown.
        quiet: Show nothing: the command was asked for JSON.
        log_every_s: Off a terminal, write the note every so many seconds; None for never.
    """
    if quiet or not sys.stderr.isatty():
        yield ProgressDisplay(None, title, total, None if quiet else log_every_s)
        return
    from rich import progress as rich
    from rich.console import Console

    shown: tuple[rich.ProgressColumn, ...] = rich.SpinnerColumn(), rich.TimeElapsedColumn()
    if total is not None:
        shown = rich.BarColumn(), rich.TaskProgressColumn(), rich.TimeRemainingColumn()
    title_column = rich.TextColumn("{task.description}", markup=False)
    note_column = rich.TextColumn("{task.fields[note]}", markup=False)
    columns = (title_column, *shown, note_column)
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressDisplay(bar, title, total, None)
