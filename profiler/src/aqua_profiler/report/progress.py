"""How a profile is coming along, on a terminal: stage, rate, what is known, time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqua_cli import ProgressDisplay
    from aqua_profiler.estimate.rate import Estimate


class ProgressListener:
    """Shows a profile that is being made.

    Args:
        shown: Where; counts seconds.
        budget_s: Of the profile.
    """

    def __init__(self, shown: ProgressDisplay, budget_s: float) -> None:
        self._shown = shown
        self._budget_s = budget_s

    def stage(self, name: str) -> None:
        """A new part has begun."""
        self._shown.update(title=name)

    def progress(self, rate_per_s: float, outstanding: int, left_s: float) -> None:
        """A trial goes on."""
        self._shown.update(
            done=self._budget_s - left_s,
            title=f"{rate_per_s:.2f} requests/s, {outstanding} outstanding",
        )

    def found(self, known: Estimate) -> None:
        """A trial has ended."""
        if known.rate_per_s is not None:
            self._shown.update(note=f"about {known.rate_per_s:.2f}/s, {known.confidence:.0%} sure")
