"""What to measure, and how exactly: everything that a caller decides beforehand."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aqua_profiler.load.lengths import LengthDistribution
from aqua_protocol.profile import PRODUCER_THRESHOLD_BYTES, Provenance


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


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """What to measure of an LLM endpoint.

    Attributes:
        threshold_bytes: From which spare memory makes a producer.
        hbm_bytes: Of each of the model's GPUs.
        kv_bytes: Size of the KV cache per GPU, where the operator knows it.
        bursts: Factors of the stable rate, the planned one first: a budget may end before others.
        long_prompt_tokens: A prompt that should be possible beside the load.
        predicted_per_s: Rate to begin the search at; nothing else comes of it.
    """

    url: str
    model: str
    lengths: LengthDistribution
    objective: LatencyObjective
    budget_s: float
    token: str | None = field(default=None, repr=False)
    seed: int = 0
    threshold_bytes: int = PRODUCER_THRESHOLD_BYTES
    tensor_parallel: int = 1
    hbm_bytes: int | None = None
    kv_bytes: int | None = None
    model_folder: Path | None = None
    bursts: tuple[float, ...] = (2.0, 1.5, 3.0)
    burst_s: float = 60.0
    long_prompt_tokens: int = 0
    prefix_tokens: int = 0
    stall_s: float = 30.0
    journal: Path | None = None
    predicted_per_s: float | None = None
    provenance: Provenance = field(default_factory=Provenance)

    def subject(self) -> dict[str, Any]:
        """What makes two profiles the same measurement."""
        return {
            "url": self.url,
            "model": self.model,
            "workload_sha256": self.lengths.digest,
            "objective": asdict(self.objective),
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """What to measure of a program that makes batches.

    Attributes:
        largest: Batch size not to exceed.
        threshold_bytes: From which spare memory makes a producer.
        hbm_bytes: Of the device, where the meter's total is not it.
    """

    model: str
    budget_s: float = 600.0
    largest: int = 1024
    threshold_bytes: int = PRODUCER_THRESHOLD_BYTES
    hbm_bytes: int | None = None
    provenance: Provenance = field(default_factory=Provenance)
