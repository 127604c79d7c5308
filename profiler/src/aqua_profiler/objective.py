"""What the search looks for: a latency objective, and how exactly its limit has to be known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TTFT_S: Final = 1.0
TBT_S: Final = 0.1
"""Section 4.1: "100ms P99 Time Between Tokens (TBT) and under 1 second Time to First Token"."""

TTFT_QUANTILE: Final = 0.5
"""The objective that the paper cites (Sarathi-Serve) takes the median of TTFT and the p99 of TBT.
The p99 of TTFT is a matter of the longest prompts, not of the rate."""

TBT_QUANTILE: Final = 0.99

STEP_PER_S: Final = 0.5
"""Of the linear search, section 4.1."""


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """A rate is sustained if it meets all of this in the steady state.

    Attributes:
        ttft_s: Limit of the time to the first token, from the scheduled send.
        tbt_s: Limit of the time between two tokens of a request.
        ttft_quantile: Share of requests that must keep `ttft_s`.
        tbt_quantile: Share of gaps that must keep `tbt_s`.
        precision: Relative standard error at which the search is content.
        step_per_s: Of the linear search; a twentieth of the rate where that is smaller.
        min_rate_per_s: The search does not go below.
        max_rate_per_s: The search does not go above.
    """

    ttft_s: float = TTFT_S
    tbt_s: float = TBT_S
    ttft_quantile: float = TTFT_QUANTILE
    tbt_quantile: float = TBT_QUANTILE
    precision: float = 0.018
    step_per_s: float = STEP_PER_S
    min_rate_per_s: float = 0.02
    max_rate_per_s: float = 1000.0

    def __post_init__(self) -> None:
        assert self.ttft_s > 0, self
        assert self.tbt_s > 0, self
        assert 0 < self.ttft_quantile < 1, self
        assert 0 < self.tbt_quantile < 1, self
        assert 0 < self.min_rate_per_s <= self.max_rate_per_s, self


@dataclass(frozen=True, slots=True)
class UnloadedLatency:
    """What the endpoint takes for one request at a time; measured before the search.

    Attributes:
        ttft_s: Median time to the first token.
        residence_s: Mean time from send to the last token.
        tbt_s: Median time between tokens.
    """

    ttft_s: float
    residence_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One stretch of open-loop load.

    Attributes:
        rate_per_s: Mean rate of Poisson arrivals; of a ramp, where it starts.
        seed: Of arrivals and lengths.
        doubling_s: A ramp: the rate doubles in that time, until the endpoint falls behind.
        max_rate_per_s: Where a ramp ends.
        enough_requests: Stop after so many, if the load has become steady.
        enough_backlog: Stop after so many first tokens while requests queued; 0 for no such end.
        patience: Stop when the oldest request has waited that many times the limit.
        least_s: No verdict of "enough" before.
        most_s: The end in any case.
        to_the_end: Nothing else ends it: a burst goes on however long the queue.
    """

    rate_per_s: float
    seed: int
    doubling_s: float | None = None
    max_rate_per_s: float = 1e9
    enough_requests: int = 200
    enough_backlog: int = 0
    patience: float = 4.0
    least_s: float = 5.0
    most_s: float = 120.0
    to_the_end: bool = False
