"""What was seen when: samples of both programs and the phases, on one clock.

Owns the record that the live view, the report and the plot are made from, and the rates that follow
from it. Bounded: ten samples a second for an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_demo.lending.phases import GENERATING, DemoPhase
from aqua_demo.messages import ConsumerSample, ProducerSample

MAX_SAMPLES: Final = 36_000
"""Of each program: an hour at ten a second. A longer run forgets its beginning; doubled, two
hours."""

RATE_WINDOW_S: Final = 2.0
"""Seconds over which rates are averaged: a burst of images lasts longer, and single steps do not
show. Doubled, the edges of the plot are flatter."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase, in seconds since the start; `until_s` is None while it lasts."""

    phase: DemoPhase
    since_s: float
    until_s: float | None


@dataclass(slots=True)
class RunRecord:
    """The record of one run, in seconds since `started_s`, which is by CLOCK_MONOTONIC."""

    started_s: float
    producer: deque[ProducerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    consumer: deque[ConsumerSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    spans: list[PhaseSpan] = field(default_factory=list)

    def enter(self, phase: DemoPhase, now_s: float) -> None:
        """The story has moved on."""
        self.close(now_s)
        self.spans.append(PhaseSpan(phase, now_s - self.started_s, None))

    def close(self, now_s: float) -> None:
        """The present phase ends."""
        if self.spans and self.spans[-1].until_s is None:
            self.spans[-1] = replace(self.spans[-1], until_s=now_s - self.started_s)

    def columns(
        self, samples: Iterable[ConsumerSample | ProducerSample], *names: str
    ) -> Float64[np.ndarray, "columns samples"]:
        """Seconds since the start, then the named fields of the samples, a column each."""
        rows = [(s.at_s - self.started_s, *(getattr(s, name) for name in names)) for s in samples]
        return np.array(rows, dtype=np.float64).T

    def token_rates(self) -> Float64[np.ndarray, "2 samples"]:
        """Seconds since the start, and new tokens a second over a sliding window."""
        return rates(self.columns(self.consumer, "tokens"))

    def image_rates(self) -> Float64[np.ndarray, "2 samples"]:
        """Seconds since the start, and images a second over a sliding window."""
        return rates(self.columns(self.producer, "images"))

    def mean_tokens_per_s(self, span: PhaseSpan) -> float | None:
        """New tokens a second over all of a phase; None when it made none or did not last."""
        if span.phase not in GENERATING:
            return None
        until_s = span.since_s if span.until_s is None else span.until_s
        inside = [s for s in self.consumer if span.since_s <= s.at_s - self.started_s <= until_s]
        if len(inside) < 2:  # noqa: PLR2004 - a rate is between two
            return None
        return (inside[-1].tokens - inside[0].tokens) / (inside[-1].at_s - inside[0].at_s)


def rates(counts: Float64[np.ndarray, "2 samples"]) -> Float64[np.ndarray, "2 samples"]:
    """Counts a second over the last `RATE_WINDOW_S`, at each ascending time; 0 at the first."""
    at_s, count = counts
    since_s = np.maximum(at_s - RATE_WINDOW_S, at_s[0])
    gained = count - np.interp(since_s, at_s, count)
    return np.array([at_s, np.divide(gained, at_s - since_s, where=at_s > since_s, out=0 * at_s)])
