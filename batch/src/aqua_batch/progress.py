"""Progress bars of `aqua-batch`, on standard error.

A terminal sees bars; a log sees a line every ten seconds of a run, and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqua_batch.batch_run import BatchProgress


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, on terminals only."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextmanager
def run_bar(total: int) -> Iterator[Callable[[BatchProgress], None]]:
    """Requests done, nodes and time left; off a terminal a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    started = time.monotonic()
    spoken = started
    terminal = sys.stderr.isatty()
    columns = (
        TextColumn("running"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Bar(*columns, console=Console(stderr=True), disable=not terminal) as shown:
        task = shown.add_task("running", total=total, left="")

        def show(state: BatchProgress) -> None:
            nonlocal spoken
            now = time.monotonic()
            left = _time_left(now - started, state.work_done)
            if state.nodes > 1:
                left = f"{state.nodes} nodes, {left}"
            shown.update(task, completed=state.done, left=left)
            if not terminal and now - spoken >= 10.0:  # noqa: PLR2004 - see the docstring
                spoken = now
                sys.stderr.write(f"{state.done} of {state.total} requests, {left}\n")

        yield show


def _time_left(elapsed_s: float, work_done: float) -> str:
    """By work, not by requests: they differ by orders of magnitude."""
    if work_done < 0.01:  # noqa: PLR2004 - too early to say
        return "time left unknown"
    minutes, seconds = divmod(round(elapsed_s / work_done - elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"
