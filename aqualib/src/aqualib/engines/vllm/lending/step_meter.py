"""How long an engine's steps take while its memory is lent, and while it is not.

Whether lending slows the lender is asked of its steps, for a request's latency says more about its
length and its neighbours. An engine lends while its load is low, when steps are short anyway; so
steps are compared with steps of as many tokens, and each duration is counted by both:

    aqua_lender_step_duration_seconds{loans="none" | "held" | "reclaiming", tokens="1-16" | ...}

A duration begins with the call of the scheduler, whose lock is part of what lending costs, and ends
when the step's output has been taken in. Where steps overlap it holds a part of the step before,
with loans and without. Steps without tokens are not counted.

What is measured here also sets the pace of consumers' background copies (`producer.copy_limit`), by
classes that are finer: a histogram's are few for the sake of its time series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from prometheus_client import Histogram
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric


class LentState(StrEnum):
    """What an engine has lent when a step begins."""

    NONE = "none"
    HELD = "held"
    RECLAIMING = "reclaiming"


STEP_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds: from a step of a few tokens of a small model to one that reads a long prompt on a CPU.
Twice as many would double the time series, of which there are some 150."""

TOKEN_CLASSES: Final = ((16, "1-16"), (128, "17-128"), (1024, "129-1024"))
"""Largest number of tokens and name of each class of steps but the last: decodes of a few and of
many requests, and steps that a prompt dominates. Twice as many compare better and need twice as
long to see each of them in all states."""
LARGEST_CLASS: Final = "over 1024"
_BOUNDS: Final = [bound for bound, _ in TOKEN_CLASSES]
_NAMES: Final = [*(name for _, name in TOKEN_CLASSES), LARGEST_CLASS]


def step_kind(token_count: int) -> str:
    """Name the class of steps that take about as long without copies: tokens by powers of two."""
    return f"under {1 << token_count.bit_length()} tokens"


class StepMeter(Collector):
    """Durations of an engine's steps; times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[float, LentState]] = deque()
        name, text = "aqua_lender_step_duration_seconds", "From scheduling a step to its output."
        labels = ("loans", "tokens")
        self._durations = Histogram(name, text, labels, buckets=STEP_BUCKETS_S, registry=None)
        self._of = {
            (loans, tokens): self._durations.labels(loans, tokens)
            for loans in LentState
            for tokens in _NAMES
        }

    def begun(self, token_count: int, loans: LentState, began_s: float) -> None:
        """A step was scheduled, and had begun at `began_s`."""
        if token_count:
            self._under_way.append((began_s, loans))

    def ended(self, token_count: int, now_s: float) -> float | None:
        """The output of the oldest step under way was taken in.

        Returns:
            How long it took, in seconds; None of a step that is not counted.
        """
        if not token_count or not self._under_way:
            return None
        began_s, loans = self._under_way.popleft()
        tokens = _NAMES[bisect_left(_BOUNDS, token_count)]
        self._of[loans, tokens].observe(now_s - began_s)
        return now_s - began_s

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        yield from self._durations.collect()
