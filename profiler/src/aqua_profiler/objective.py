"""What the search looks for: a latency objective, and how exactly its limit has to be known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """A rate is sustained if it meets all of this in the steady state.

    The defaults are section 4.1's: "100ms P99 Time Between Tokens (TBT) and under 1 second Time to
    First Token". The objective that it cites (Sarathi-Serve) takes the median of TTFT: the p99 is a
    matter of the longest prompts, not of the rate.

    Attributes:
        ttft_s: Limit of the time to the first token, from the scheduled send.
        tbt_s: Limit of the time between two tokens of a request.
        ttft_quantile: Share of requests that must keep `ttft_s`.
        tbt_quantile: Share of gaps that must keep `tbt_s`.
        precision: Relative standard error at which the search is content.
        step_per_s: Of the linear search; a twenty-fifth of the rate where that is smaller.
    """

    ttft_s: float = 1.0
    tbt_s: float = 0.1
    ttft_quantile: float = 0.5
    tbt_quantile: float = 0.99
    precision: float = 0.018
    step_per_s: float = 0.5
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
