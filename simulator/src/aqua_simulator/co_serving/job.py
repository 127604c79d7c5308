"""Requests of the co-serving engine, and what a run of it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_schedulers.cfs import RequestView
from aqua_schedulers.conserve import CoServedRequest, ServiceClass
from aqua_simulator.serving.request import Job, Served


@dataclass(slots=True, eq=False)
class CoServedJob(Job):
    """A request inside the engine.

    Attributes:
        counted_tokens: Tokens that count as work done; computing one again does not.
        last_emitted_s: When its latest token came.
        abort_count: Compute preemptions that its arrival caused.
        is_loading, loaded_blocks: Its checkpoint is on its way in, and how far.
    """

    service_class: ServiceClass = ServiceClass.ONLINE
    counted_tokens: int = 0
    last_emitted_s: float = field(default=float("nan"))
    abort_count: int = 0
    is_loading: bool = False
    loaded_blocks: int = 0

    @property
    def is_online(self) -> bool:
        """Whether somebody waits for it."""
        return self.service_class is ServiceClass.ONLINE

    def view(self, block_tokens: int) -> CoServedRequest:
        """The job as the co-serving policy sees it."""
        arrival = self.arrival
        return CoServedRequest(
            arrival.request_id,
            self.service_class,
            arrival.arrival_s,
            arrival.prompt_tokens + self.emitted_tokens,
            self.loaded_blocks * block_tokens if self.is_loading else self.computed_tokens,
            self.emitted_tokens,
            self.block_count,
            arrival.output_tokens - self.emitted_tokens,
            is_loading=self.is_loading,
        )

    def fair_view(self, block_tokens: int) -> RequestView:
        """An online job as the fair policy sees it, for which offline requests do not exist."""
        arrival = self.arrival
        return RequestView(
            arrival.request_id,
            arrival.arrival_s,
            arrival.prompt_tokens,
            output_tokens=self.emitted_tokens,
            computed_tokens=self.computed_tokens,
            held_blocks=self.block_count,
            missing_blocks=0 if self.block_count else -(-self.known_tokens // block_tokens),
        )


@dataclass(slots=True)
class StepRecord:
    """One step, for plots and rates: when it ended and the tokens that counted."""

    start_s: float
    end_s: float
    online_tokens: int
    offline_tokens: int


@dataclass(slots=True)
class CoServingRun:
    """What a run showed.

    Attributes:
        served: Online requests, by their end.
        token_gaps_s: Seconds between two tokens of one answer, all answers together.
        finished_offline: Offline requests, by their end.
        steps: In order; aborted ones count no tokens.
        busy_s: Time in steps; of it, `stalled_s` waiting for copies.
        abort_lags_s: Seconds from an arrival to the end of the step that it aborted.
        most_aborts: Largest number of compute preemptions that one online request caused.
        wrong_victims: Online requests that lost their memory while an offline one held blocks.
        recomputed_tokens: Offline tokens that were computed once more.
        copied_in_blocks: Checkpoints that came back.
    """

    served: list[Served] = field(default_factory=list)
    token_gaps_s: list[float] = field(default_factory=list)
    finished_offline: list[Served] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    busy_s: float = 0.0
    stalled_s: float = 0.0
    abort_lags_s: list[float] = field(default_factory=list)
    most_aborts: int = 0
    wrong_victims: int = 0
    offline_victims: int = 0
    recomputed_tokens: int = 0
    copied_in_blocks: int = 0

    @property
    def ttft_p99_s(self) -> float:
        """The 99th percentile of the time to the first token."""
        return float(np.quantile([row.ttft_s for row in self.served], TAIL))

    @property
    def tpot_p99_s(self) -> float:
        """The 99th percentile of the time between two tokens (the paper's TPOT, its footnote 2)."""
        return float(np.quantile(self.token_gaps_s, TAIL))

    def busy_share(self, start_s: float, end_s: float) -> float:
        """The share of an interval in which a step ran."""
        spans = ((max(start_s, step.start_s), min(end_s, step.end_s)) for step in self.steps)
        return sum(max(0.0, end - start) for start, end in spans) / (end_s - start_s)

    def tokens_per_s(
        self, start_s: float, end_s: float, service_class: ServiceClass | None = None
    ) -> float:
        """Tokens of prompts and answers of one class, or of both, per second of an interval.

        Source: ConServe section 6.1 counts "generated tokens", and so many of answers alone nothing
        could generate: 5868 a second with 1024 of prompt to 128 would be 47,000 of prompts, more
        than an A100 multiplies. So prompts count, once.
        """
        total = 0
        for step in self.steps:
            if start_s < step.end_s <= end_s:
                if service_class is not ServiceClass.OFFLINE:
                    total += step.online_tokens
                if service_class is not ServiceClass.ONLINE:
                    total += step.offline_tokens
        return total / (end_s - start_s)

    def series(
        self, window_s: float, service_class: ServiceClass
    ) -> tuple[Float64[np.ndarray, " windows"], Float64[np.ndarray, " windows"]]:
        """Window starts and tokens per second in each, for plots."""
        ends = np.array([step.end_s for step in self.steps])
        if service_class is ServiceClass.ONLINE:
            tokens = np.array([step.online_tokens for step in self.steps])
        else:
            tokens = np.array([step.offline_tokens for step in self.steps])
        windows: Int64[np.ndarray, " steps"] = (ends // window_s).astype(np.int64)
        sums = np.bincount(windows, weights=tokens)
        return np.arange(len(sums)) * window_s, sums / window_s


TAIL: Final = 0.99
"""Fixed by the paper, which reports 99th percentiles."""
