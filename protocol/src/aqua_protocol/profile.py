"""The profile of a deployment: what a model can lend or needs, measured.

`aqua-profile` writes it, `aqua-place` reads it as it is. Version 1 fixes what placement relies on;
a profiler may add fields, and readers keep what they do not know.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aqua_protocol.wire import ByteCount

PROFILE_VERSION: Final = 1


class ProfileLabel(StrEnum):
    """The role that a profile suggests."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    NEUTRAL = "neutral"


class ModelProfile(BaseModel):
    """One model under its own workload, per GPU (per tensor-parallel shard)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    version: Literal[1] = PROFILE_VERSION
    model: Annotated[str, Field(min_length=1, max_length=256)]
    label: ProfileLabel
    spare_bytes: ByteCount = Field(default=0, description="HBM it can lend at its stable rate.")
    needed_bytes: ByteCount = Field(default=0, description="Swap it needs to absorb its bursts.")
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    hbm_bytes: ByteCount | None = Field(default=None, description="HBM of the GPU profiled on.")
    stable_rate_per_s: Annotated[float, Field(ge=0)] | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    partial: bool = Field(default=False, description="The profiling run did not finish.")
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _label_and_sizes_agree(self) -> Self:
        if self.label is ProfileLabel.PRODUCER and not self.spare_bytes:
            message = "a producer's profile needs spare_bytes above 0"
            raise ValueError(message)
        if self.label is ProfileLabel.CONSUMER and not self.needed_bytes:
            message = "a consumer's profile needs needed_bytes above 0"
            raise ValueError(message)
        return self

    @property
    def signed_bytes(self) -> int:
        """Spare (> 0) or need (< 0) per shard; 0 when neutral."""
        if self.label is ProfileLabel.PRODUCER:
            return self.spare_bytes
        return -self.needed_bytes if self.label is ProfileLabel.CONSUMER else 0
