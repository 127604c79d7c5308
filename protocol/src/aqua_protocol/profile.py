"""The profile of a deployment: what a model can lend or needs, measured.

`aqua-profile` writes it; `aqua-place` reads it as it is, as does a program with an informer.
Version 1 fixes the fields below. A profiler may add others; readers keep what they do not know.

What was not measured is None, not 0, and a profile whose label could not be found says `unknown`:
nothing downstream takes a guess for a measurement.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aqua_protocol.wire import ByteCount, Flag

# Fixed: the form of the file; it grows when a reader of the old form would misread a new one.
PROFILE_VERSION: Final = 1

PRODUCER_THRESHOLD_BYTES: Final = 10 * 10**9
"""A model with less to spare is no producer (Aqua section 4: "above a threshold (e.g., 10 GB)").
Doubled, models that could lend 10 to 20 GB are labelled neutral."""

MAX_MEASURED: Final = 1e9
"""Fixed, as part of the form: no rate in requests a second, and no queue, is larger, and those who
compute with them stay far from what a float cannot hold."""

Positive = Annotated[float, Field(gt=0, le=MAX_MEASURED, strict=True)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_MEASURED, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]


class ProfileLabel(StrEnum):
    """The role that a profile suggests."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    NEUTRAL = "neutral"
    UNKNOWN = "unknown"


class ProfileKind(StrEnum):
    """How a deployment was measured."""

    LLM = "llm"
    BATCH = "batch"


class Burst(BaseModel):
    """What a burst of requests was seen to hold.

    Attributes:
        factor: In terms of the stable rate.
        seconds: How long it lasted.
        requests: Sent in it.
        context_bytes: Most bytes of context that its requests would have held all at once.
        needed_bytes: What of that the engine's own cache cannot hold.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    factor: Positive
    seconds: Positive
    requests: Count
    context_bytes: ByteCount
    needed_bytes: ByteCount


class StableQueue(BaseModel):
    """Requests that wait at the stable rate, as the engine counts them.

    Attributes:
        mean_length: On average over time.
        waiting_share: Share of the time in which any wait.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    mean_length: NotNegative
    waiting_share: Share


class Provenance(BaseModel):
    """Where the numbers come from; a number without it is a rumour."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    measured_at: str = Field(default="", description="Start, ISO 8601 in UTC.")
    command: str = ""
    hardware: str = ""
    engine: str = ""
    workload_sha256: str = ""
    profiler: str = Field(default="", description="Name and version.")


class ModelProfile(BaseModel):
    """One model under its own workload, per GPU (per tensor-parallel shard)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    version: Literal[1] = PROFILE_VERSION
    model: Annotated[str, Field(min_length=1, max_length=256)]
    kind: ProfileKind | None = None
    label: ProfileLabel
    spare_bytes: ByteCount | None = Field(
        default=0, description="HBM it can lend at its stable rate; None: not measured."
    )
    needed_bytes: ByteCount | None = Field(
        default=0, description="Swap it needs to absorb its bursts; None: not measured."
    )
    threshold_bytes: ByteCount = PRODUCER_THRESHOLD_BYTES
    tensor_parallel: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    hbm_bytes: ByteCount | None = Field(default=None, description="HBM of the GPU profiled on.")
    stable_rate_per_s: NotNegative | None = Field(
        default=None, description="Highest rate that meets the objective; batch: items at peak."
    )
    queue: StableQueue | None = Field(
        default=None, description="Requests that wait at that rate; None: not measured."
    )
    confidence: Share | None = Field(
        default=None, description="Probability that the true rate is within 5% of it."
    )
    requests_sent: Count | None = None
    bursts: list[Burst] = Field(default_factory=list)
    partial: Flag = Field(default=False, description="The profiling run did not finish.")
    notes: list[str] = Field(default_factory=list, description="What a reader should know.")
    provenance: Provenance = Field(default_factory=Provenance)

    @model_validator(mode="after")
    def _label_and_sizes_agree(self) -> Self:
        if self.label is ProfileLabel.PRODUCER and not self.spare_bytes:
            raise ValueError("a producer's profile needs spare_bytes above 0")
        if self.label is ProfileLabel.CONSUMER and not self.needed_bytes:
            raise ValueError("a consumer's profile needs needed_bytes above 0")
        return self

    @property
    def signed_bytes(self) -> int:
        """Spare (> 0) or need (< 0) per shard; 0 when neutral or unknown."""
        if self.label is ProfileLabel.PRODUCER:
            return self.spare_bytes or 0
        return -(self.needed_bytes or 0) if self.label is ProfileLabel.CONSUMER else 0

    def added(self, name: str) -> Any:  # noqa: ANN401 - whatever the profiler added
        """A field that this version does not fix; None if it is not there."""
        return (self.model_extra or {}).get(name)


class Profiles(BaseModel):
    """Profiles, by model, as the coordinator lists them."""

    model_config = ConfigDict(frozen=True)

    profiles: list[ModelProfile]
    next_cursor: str | None = None


def label_of(
    spare_bytes: int | None, needed_bytes: int | None, threshold_bytes: int
) -> ProfileLabel:
    """The label that sizes suggest.

    Source: Aqua section 4.1: a producer if enough is spare; else a consumer if it needs swap; else
    "a producer with 0 memory to offer", which we call neutral.
    """
    if spare_bytes is not None and spare_bytes >= max(threshold_bytes, 1):
        return ProfileLabel.PRODUCER
    if needed_bytes:
        return ProfileLabel.CONSUMER
    if spare_bytes is None or needed_bytes is None:
        return ProfileLabel.UNKNOWN
    return ProfileLabel.NEUTRAL
