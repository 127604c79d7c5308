"""Memory that running requests will need, over the steps to come.

A decoding request's memory grows by one token per step until it ends: a ramp. The sum of ramps is
kept in a fixed number of buckets of steps, each holding the occupation at the bucket's end, so
adding a request and asking for the peak cost a few hundred additions, whatever runs. With it a
long request is admitted when its ramp fits under all others', where adding up final lengths would
leave half of the memory empty (ramps rarely peak together) and admitting by present use would end
in retractions.

Promises: the peak it reports is not below the true one when lengths are as estimated. Where
lengths are estimates, an outlived estimate is extended, see `remaining_tokens`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float64

from aqua_schedulers.compiled import compiled

BUCKET_COUNT: Final = 256
"""Buckets of a forecast: 256 additions cost a microsecond. Doubled, a forecast is twice as fine and
costs twice as much."""

OUTLIVED_SHARE: Final = 0.5
"""A request that outlived its estimate is expected to run for half of what it ran: lengths scatter
more than exponentially (video lengths, chat answers), so the longer one ran the more is to come.
Doubled, memory is kept free twice as long for requests that are about to end."""


class Timeline(NamedTuple):
    """The forecast of the memory in use.

    Attributes:
        level: Tokens held at the end of each bucket.
        span: Steps per bucket.
    """

    level: Float64[np.ndarray, " buckets"]
    span: int


def empty_timeline(longest_tokens: float) -> Timeline:
    """A timeline that reaches as far as a request of `longest_tokens`."""
    span = max(1, int(np.ceil(longest_tokens / BUCKET_COUNT)))
    return Timeline(np.zeros(BUCKET_COUNT), span)


@compiled
def add(timeline: Timeline, held: float, left: float) -> None:
    """Add a request that holds `held` tokens now and will generate `left` more."""
    level, span = timeline.level, timeline.span
    last = min(len(level), int(np.ceil(left / span)))
    for bucket in range(last):
        level[bucket] += held + min(left, float((bucket + 1) * span))


@compiled
def peak_with(timeline: Timeline, held: float, left: float) -> float:
    """Highest occupation during the life of a request that would be added now."""
    level, span = timeline.level, timeline.span
    last = min(len(level), int(np.ceil(left / span)))
    peak = 0.0
    for bucket in range(last):
        at_end = level[bucket] + held + min(left, float((bucket + 1) * span))
        peak = max(peak, at_end)
    return peak


@compiled
def remaining_tokens(estimate: float, generated: float, exact: bool) -> float:  # noqa: FBT001 - compiled code takes arguments by position
    """Tokens still to come, from the estimate and from what was generated already."""
    left = estimate - generated
    if not exact:
        left = max(left, OUTLIVED_SHARE * generated)
    return max(1.0, left)
