"""What was seen when: samples of both programs, phases and events, on one clock.

Owns the record that the live view, the report and the plot are made from, and the rates that follow
from it. Bounded: ten samples a second for an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from aqua_demo.messages import ConsumerSample, ProducerSample
from aqua_demo.phases import Phase

MAX_SAMPLES: Final = 36_000
MAX_EVENTS: Final = 1_000
RATE_WINDOW_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase, in seconds since the start; `until_s` is None while it lasts."""

    phase: Phase
    since_s: float
    until_s: float | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a line."""

    at_s: float
    source: str
    text: str


@dataclass(slots=True)
class Timeline:
    """The record of one run.

    Attributes:
        started_s: CLOCK_MONOTONIC at the beginning; all other times count from there.
    """

    started_s: float
    producer: deque[ProducerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    consumer: deque[ConsumerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    spans: list[PhaseSpan] = field(default_factory=list)

    def enter(self, phase: Phase, now_s: float) -> None:
        """The story has moved on."""
        at_s = now_s - self.started_s
        self.close(now_s)
        self.spans.append(PhaseSpan(phase, at_s, None))

    def close(self, now_s: float) -> None:
        """The present phase ends."""
        if self.spans and self.spans[-1].until_s is None:
            last = self.spans[-1]
            self.spans[-1] = PhaseSpan(last.phase, last.since_s, now_s - self.started_s)

    def note(self, source: str, text: str, now_s: float) -> Event:
        """Record an event."""
        event = Event(now_s - self.started_s, source, text)
        self.events.append(event)
        return event

    def tokens_per_s(self) -> float:
        """New tokens a second, over the last seconds."""
        return rate((s.at_s, s.tokens) for s in self.consumer)

    def images_per_s(self) -> float:
        """Images a second, over the last seconds."""
        return rate((s.at_s, s.images) for s in self.producer)

    def token_rates(self) -> list[tuple[float, float]]:
        """(seconds since the start, new tokens a second), averaged over a sliding window."""
        return self._rates([(s.at_s, s.tokens) for s in self.consumer])

    def image_rates(self) -> list[tuple[float, float]]:
        """(seconds since the start, images a second), averaged over a sliding window."""
        return self._rates([(s.at_s, s.images) for s in self.producer])

    def mean_tokens_per_s(self, phase: Phase) -> float | None:
        """New tokens a second over all of a phase; None when it did not last."""
        for span in self.spans:
            if span.phase is phase and span.until_s is not None:
                inside = [
                    sample
                    for sample in self.consumer
                    if span.since_s <= sample.at_s - self.started_s <= span.until_s
                ]
                if len(inside) > 1:
                    seconds = inside[-1].at_s - inside[0].at_s
                    return (inside[-1].tokens - inside[0].tokens) / seconds
        return None

    def _rates(self, counts: list[tuple[float, int]]) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        oldest = 0
        for at_s, count in counts:
            while counts[oldest][0] < at_s - RATE_WINDOW_S:
                oldest += 1
            since_s, before = counts[oldest]
            if at_s > since_s:
                found.append((at_s - self.started_s, (count - before) / (at_s - since_s)))
        return found


def rate(counts: Iterable[tuple[float, int]]) -> float:
    """Counts a second over the last `RATE_WINDOW_S`; 0 without two samples.

    Args:
        counts: (time in seconds, count so far), ascending.
    """
    recent = deque(counts, maxlen=64)
    if not recent:
        return 0.0
    until_s, after = recent[-1]
    since_s, before = next(entry for entry in recent if entry[0] >= until_s - RATE_WINDOW_S)
    return (after - before) / (until_s - since_s) if until_s > since_s else 0.0
