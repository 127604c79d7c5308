"""How fast engines answer, by model: what is leased ahead of them depends on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

LEAST_WINDOW_S: Final = 0.1
"""Seconds for which the answers of a window count at least. Doubled, engines that begin to answer
fast wait for the database a tenth of a second longer; halved, a few answers that come together look
like many a second."""


class AnswerRate:
    """Answers a second, in the last window or in the one under way, whichever has more.

    Args:
        clock_s: Seconds, monotonic.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._answers: Counter[str] = Counter()
        self._last: dict[str, float] = {}

    def count(self, model: str) -> None:
        """Note that an engine has answered a request of this model."""
        self._answers[model] += 1

    def begin_window(self) -> None:
        """End the window under way, and begin another."""
        self._last = {model: self._now(model) for model in self._answers}
        self._answers.clear()
        self._began_s = self._clock_s()

    def per_s(self, model: str | None) -> float:
        """The rate of one model, or of all together for None."""
        models = {*self._last, *self._answers} if model is None else {model}
        return sum(max(self._last.get(each, 0.0), self._now(each)) for each in models)

    def _now(self, model: str) -> float:
        return self._answers[model] / max(LEAST_WINDOW_S, self._clock_s() - self._began_s)
