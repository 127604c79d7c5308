"""What is kept of a trial: for the search, the journal and the profile.

Beside quantiles, that is the capacity of a server, from stretches in which requests queued. While
there is a backlog the server admits requests as fast as it can, whatever the arrivals are: first
tokens per second of backlog are its capacity. That says in one trial what repeated trials of rates
say slowly, for close to the capacity queues have a memory as long as a trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64

from aqua_profiler.measure.gap_histogram import GapHistogram
from aqua_profiler.spec import LatencyObjective

Limit = Literal["ttft", "tbt"]
"""Which limit of the objective."""


class StopReason(StrEnum):
    """Why a trial ended."""

    ENOUGH = "enough"
    BACKLOG = "backlog"
    OVERLOAD = "overload"
    SLOW_TOKENS = "slow_tokens"
    SHED = "shed"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Backlog:
    """A stretch in which requests queued.

    Attributes:
        starts: First tokens after its beginning.
        dispersion: Variance over mean of the counts of first tokens in short windows, about as long
            as a queue lasts; None if it was short.
        spread: The same in the long run: what the mean's own error follows from. Smaller where
            stratified lengths even out what neighbours differ in.
    """

    starts: int
    seconds: float
    dispersion: float | None
    spread: float | None


@dataclass(frozen=True, slots=True)
class TrialSummary:
    """What is kept of a trial.

    Attributes:
        rate_per_s: Asked for; of a ramp, reached in the end.
        ramp: It was a ramp: its quantiles say nothing about a steady state.
        finished: Requests answered to the end.
        seconds: From the start to the last send.
        window: Requests of the steady part, from which all that follows is taken.
        ttft_s: The objective's quantile of TTFT.
        ttft_p99_s: For people.
        over_share: Share of requests beyond the limit of TTFT.
        tbt_s: The objective's quantile of TBT, None without two tokens anywhere.
        residence_s: Mean time from first to last token.
        running: Requests between first and last token, on average.
        lateness_p99_s: Between scheduled and actual sends: the generator's own fault.
        tokens_peak: Most tokens of context that requests in the system would hold together.
        kv_usage: Highest share of the KV cache in use that the engine reported, if it did.
        queue: Requests that waited on average over the steady time, and the share of it in which
            any did, as the engine counted; None if it did not.
        gaps_per_request: Of those answered to the end, on average.
        paces: How fast tokens came, by requests in the system; one part after the other.
    """

    rate_per_s: float
    ramp: bool
    stop: StopReason
    sent: int
    finished: int
    shed: int
    seconds: float
    window: int
    ttft_s: float
    ttft_p99_s: float
    over_share: float
    tbt_s: float | None
    gaps: int
    residence_s: float
    running: float
    backlogs: tuple[Backlog, ...]
    lateness_p99_s: float
    tokens_peak: int = 0
    kv_usage: float | None = None
    queue: tuple[float, float] | None = None
    gaps_per_request: float = 0.0
    paces: tuple[GapHistogram, ...] = ()

    @property
    def is_measured(self) -> bool:
        """It lasted long enough in a steady state for its quantiles to count."""
        lasted = self.stop in {StopReason.ENOUGH, StopReason.TIME}
        return lasted and not self.ramp and self.window > 0

    def violated(self, objective: LatencyObjective) -> Limit | None:
        """The limit that it exceeded, if any."""
        if self.stop in {StopReason.OVERLOAD, StopReason.SHED, StopReason.BACKLOG}:
            return "ttft"
        if self.stop is StopReason.SLOW_TOKENS:
            return "tbt"
        if self.tbt_s is not None and self.tbt_s > objective.tbt_s:
            return "tbt"
        return "ttft" if self.ttft_s > objective.ttft_s else None

    def meets(self, objective: LatencyObjective) -> bool:
        """Whether it met the objective, for as long as it lasted."""
        return self.violated(objective) is None


SAME_BATCH_S: Final = 0.004
"""Seconds: first tokens closer than that to the beginning of a backlog belong to its first batch.
Engines' steps last 5 ms and more, so doubled, it would miss a step of the fastest."""

STARTS_PER_WINDOW: Final = 12
"""First tokens of a window of counts, on average: about as long as a queue lasts. Twice as many
leave a backlog of a hundred too few windows."""

COUNT_WINDOWS: Final = 12
"""Windows of the long run, chosen by hand. Half as many have no variance worth naming; twice as
many are short ones again."""

LEAST_WINDOWS: Final = 4
"""Windows of counts below which a backlog says nothing of its variance, chosen by hand. Doubled,
backlogs of less than a hundred say nothing."""

LEAST_LONG_RUN: Final = 0.25
"""Of the variance between windows, what is left of it in the long run at the least: an estimate
from a dozen windows must not be nothing. Doubled, even lengths earn a backlog half as much."""


@dataclass(slots=True)
class BacklogClock:
    """One backlog under way: when it began, and when requests got their first token in it."""

    begin_s: float
    starts_s: list[float]

    def start(self, at_s: float) -> bool:
        """Note a first token; whether it counts."""
        counts = at_s > self.begin_s + SAME_BATCH_S
        if counts:
            self.starts_s.append(at_s)
        return counts

    def summary(self, residence_s: float) -> Backlog | None:
        """Sum it up; the first residence is left out where more is left.

        Requests that filled an empty server leave it in the rhythm in which they came, so for one
        residence the starts repeat the arrivals.
        """
        times, begin_s = np.array(self.starts_s), self.begin_s
        if times.size and times[-1] - begin_s > 2 * residence_s:
            times = times[times > begin_s + residence_s]
            begin_s = float(times[0])
            times = times[times > begin_s + SAME_BATCH_S]
        if not times.size:
            return None
        windows = times.size // STARTS_PER_WINDOW
        short = _counts(times, begin_s, windows)
        long = _counts(times, begin_s, min(COUNT_WINDOWS, windows))
        return Backlog(
            int(times.size),
            float(times[-1] - begin_s),
            None if short is None else float(short.var(ddof=1) / short.mean()),
            None if long is None else _long_run_dispersion(long),
        )


def _counts(
    times: Float64[np.ndarray, " starts"], begin_s: float, windows: int
) -> Float64[np.ndarray, " windows"] | None:
    if windows < LEAST_WINDOWS:
        return None
    return np.histogram(times, bins=windows, range=(begin_s, float(times[-1])))[0].astype(float)


def _long_run_dispersion(counts: Float64[np.ndarray, " windows"]) -> float:
    """Variance over mean that a longer window would show.

    Neighbours that make up for each other, as halves of a block of lengths do, take it down.
    """
    apart = counts - counts.mean()
    variance = float(apart @ apart) / (counts.size - 1)
    neighbours = float(apart[1:] @ apart[:-1]) / (counts.size - 1)
    return max(LEAST_LONG_RUN * variance, variance + 2 * neighbours) / float(counts.mean())
