"""What was seen when: samples of both programs, phases and log entries, on one clock.

Owns the record that the live view, the report and the plot are made from, and the rates that follow
from it. Bounded: ten samples a second for an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from aqua_demo.messages import ConsumerSample, ProducerSample
from aqua_demo.phases import DemoPhase

MAX_SAMPLES: Final = 36_000
"""Of each program: an hour at ten a second. A longer run forgets its beginning; doubled, two
hours."""

MAX_ENTRIES: Final = 7
"""Lines of the log that are kept for the view. Doubled, its picture is seven lines taller."""

RATE_WINDOW_S: Final = 2.0
"""Seconds over which rates are averaged: a burst of images lasts longer, and single steps do not
show. Doubled, the edges of the plot are flatter."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase, in seconds since the start; `until_s` is None while it lasts."""

    phase: DemoPhase
    since_s: float
    until_s: float | None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something worth a line."""

    at_s: float
    source: str
    text: str


@dataclass(slots=True)
class RunRecord:
    """The record of one run.

    Attributes:
        started_s: CLOCK_MONOTONIC at the beginning; all other times count from there.
    """

    started_s: float
    producer: deque[ProducerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    consumer: deque[ConsumerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=MAX_ENTRIES))
    spans: list[PhaseSpan] = field(default_factory=list)

    def enter(self, phase: DemoPhase, now_s: float) -> None:
        """The story has moved on."""
        self.close(now_s)
        self.spans.append(PhaseSpan(phase, now_s - self.started_s, None))

    def close(self, now_s: float) -> None:
        """The present phase ends."""
        if self.spans and self.spans[-1].until_s is None:
            self.spans[-1] = replace(self.spans[-1], until_s=now_s - self.started_s)

    def note(self, source: str, text: str, now_s: float) -> LogEntry:
        """Record something worth a line."""
        entry = LogEntry(now_s - self.started_s, source, text)
        self.log.append(entry)
        return entry

    def token_rates(self) -> list[tuple[float, float]]:
        """(seconds since the start, new tokens a second), averaged over a sliding window."""
        return rates([(s.at_s - self.started_s, s.tokens) for s in self.consumer])

    def image_rates(self) -> list[tuple[float, float]]:
        """(seconds since the start, images a second), averaged over a sliding window."""
        return rates([(s.at_s - self.started_s, s.images) for s in self.producer])

    def tokens_per_s(self) -> float:
        """New tokens a second, over the last seconds."""
        return self.token_rates()[-1][1] if len(self.consumer) > 1 else 0.0

    def images_per_s(self) -> float:
        """Images a second, over the last seconds."""
        return self.image_rates()[-1][1] if len(self.producer) > 1 else 0.0

    def mean_tokens_per_s(self, span: PhaseSpan) -> float | None:
        """New tokens a second over all of a phase; None when it did not last."""
        until_s = span.since_s if span.until_s is None else span.until_s
        inside = [s for s in self.consumer if span.since_s <= s.at_s - self.started_s <= until_s]
        if len(inside) < 2:  # noqa: PLR2004 - a rate is between two
            return None
        return (inside[-1].tokens - inside[0].tokens) / (inside[-1].at_s - inside[0].at_s)


def rates(counts: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Counts a second over the last `RATE_WINDOW_S`, at each count but the first.

    Args:
        counts: (time in seconds, count so far), ascending in time.
    """
    found: list[tuple[float, float]] = []
    oldest = 0
    for at_s, count in counts[1:]:
        while counts[oldest][0] < at_s - RATE_WINDOW_S:
            oldest += 1
        since_s, before = counts[oldest]
        found.append((at_s, (count - before) / (at_s - since_s) if at_s > since_s else 0.0))
    return found
