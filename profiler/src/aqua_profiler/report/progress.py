"""How a profile is coming along, on a terminal: stage, rate, what is known, time left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from aqua_profiler.estimate.rate import Estimate
    from aqua_profiler.measure.open_loop import TrialProgress


class SilentListener:
    """Watches and says nothing."""

    def stage(self, name: str) -> None:
        """A new part has begun."""

    def progress(self, progress: TrialProgress, left_s: float) -> None:
        """A trial goes on."""

    def found(self, known: Estimate) -> None:
        """A trial has ended."""


class ProgressBar:
    """A bar over the budget; the search usually ends before it does.

    Args:
        budget_s: Of the profile.
    """

    def __init__(self, budget_s: float) -> None:
        from rich.console import Console

        self._budget_s = budget_s
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("at most"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[known]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("starting", total=budget_s, known="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """A new part has begun."""
        self._bar.update(self._task, description=name)

    def progress(self, progress: TrialProgress, left_s: float) -> None:
        """A trial goes on."""
        self._bar.update(
            self._task,
            completed=self._budget_s - left_s,
            description=f"{progress.rate_per_s:.2f} requests/s, {progress.outstanding} outstanding",
        )

    def found(self, known: Estimate) -> None:
        """A trial has ended."""
        if known.rate_per_s is not None:
            text = f"about {known.rate_per_s:.2f}/s, {known.confidence:.0%} sure"
            self._bar.update(self._task, known=text)
