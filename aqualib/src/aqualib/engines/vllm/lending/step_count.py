"""Which step a worker has begun and which it has ended, on its own thread and device.

The scheduler hears of a step's output from one rank, and the others may be behind it: a rank knows
by itself what it has not finished. It numbers steps as the scheduler does, by a number that rides
in the scheduler's output.

A step has ended here when nothing of it will be launched any more: sampled, drafts and all, or not
to be sampled. The device may still compute; who takes memory away waits for it.
"""

from __future__ import annotations

import threading
from typing import Any, Final

STEP: Final = "aqua_step"
"""The attribute of a scheduler's output that holds its step's number."""


class StepCount:
    """Counts one worker's steps; `begun` and `ended` are called by its thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._ended = 0

    def __repr__(self) -> str:
        return f"StepCount({self._ended} of {self._begun} ended)"

    def begun(self, scheduler_output: Any) -> None:
        """A step is about to run; everything of those before it has been launched."""
        with self._changed:
            self._ended = max(self._ended, self._begun)
            self._begun = int(getattr(scheduler_output, STEP, self._begun + 1))
            self._changed.notify_all()

    def ended(self) -> None:
        """Nothing of the latest step is left to be launched."""
        with self._changed:
            self._ended = self._begun
            self._changed.notify_all()

    def wait_until_ended(self, step: int, timeout_s: float) -> bool:
        """Wait until a step, and all before it, have ended here; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= step, timeout_s)
