"""What is kept of a trial: for the search, the journal and the profile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

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
        seconds: How long it lasted.
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
        stop: Why it ended.
        sent: Requests sent.
        finished: Requests answered to the end.
        shed: Requests turned away.
        seconds: From the start to the last send.
        window: Requests of the steady part, from which all that follows is taken.
        ttft_s: The objective's quantile of TTFT.
        ttft_p99_s: For people.
        over_share: Share of requests beyond the limit of TTFT.
        tbt_s: The objective's quantile of TBT, None without two tokens anywhere.
        gaps: Gaps between tokens.
        residence_s: Mean time from first to last token.
        running: Requests between first and last token, on average.
        backlogs: Stretches in which requests queued.
        lateness_p99_s: Between scheduled and actual sends: the generator's own fault.
        tokens_peak: Most tokens of context that requests in the system would hold together.
        kv_usage: Highest share of the KV cache in use that the engine reported, if it did.
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
