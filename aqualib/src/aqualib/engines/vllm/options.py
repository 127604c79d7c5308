"""Options of the vLLM adapter: what `kv_connector_extra_config` may say.

Every field has a default that works; a wrong or unknown one refuses the engine's start with the
field's name, because a misspelt option that is ignored looks like a slow system. Settings that are
not about vLLM (coordinator, token, transport, checksums) are those of aqualib, `AQUA_*`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from aqua_protocol import ConfigError, parse_bytes
from aqua_schedulers.cfs import FairSettings, PolicyName

POLICY_DEFAULTS: Final = FairSettings()

ADDITIONAL_CONFIG_KEY = "aqua"
"""Where the scheduler finds its options when no connector is configured (`--additional-config`)."""


class PagingMode(StrEnum):
    """What happens to the KV of a preempted request."""

    SWAP = "swap"
    """It is paged out when the request is preempted."""
    CHECKPOINT = "checkpoint"
    """Full blocks are paged out as they fill up; a preemption pages the last, partial one."""
    RECOMPUTE = "recompute"
    """It is dropped: no store is opened."""


class LoadMode(StrEnum):
    """How a resumed request gets its KV back."""

    SYNC = "sync"
    """Within the step that resumes it."""
    ASYNC = "async"
    """Beside the steps of others; it holds its blocks meanwhile."""


def _bytes_from(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from error


class AquaOptions(BaseModel):
    """The adapter's options; immutable. Read them with `read_options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def is_paging(self) -> bool:
        """Whether anything is paged at all."""
        return self.mode is not PagingMode.RECOMPUTE

    policy: PolicyName = Field(
        default=PolicyName.FIRST_TOKEN, description="Who computes when memory is short."
    )
    slice_iterations: int = Field(
        default=POLICY_DEFAULTS.slice_iterations,
        ge=1,
        le=10_000,
        description="Length of a time slice in engine steps.",
    )
    stint_tokens: int = Field(
        default=POLICY_DEFAULTS.stint_tokens,
        ge=1,
        le=1 << 20,
        description="For first-token: output before a request may first be put out.",
    )
    patience_turns: int = Field(
        default=POLICY_DEFAULTS.patience_turns,
        ge=1,
        le=1 << 20,
        description="Slices outside after which a request goes before all others.",
    )
    fcfs_on_host: bool = Field(
        default=POLICY_DEFAULTS.fcfs_on_host,
        description="Stop slicing while paged KV can only go to host memory.",
    )
    mode: PagingMode = Field(
        default=PagingMode.SWAP, description="When KV of preempted requests is paged out."
    )
    load: LoadMode = Field(default=LoadMode.SYNC, description="How it comes back.")
    max_loading_blocks: int = Field(
        default=1024,
        ge=1,
        description="Blocks of the KV cache that asynchronous loads may hold at once.",
    )
    store_bytes: Annotated[int, BeforeValidator(_bytes_from)] | None = Field(
        default=None,
        ge=1,
        description="Room for paged blocks, per worker; as much as the KV cache itself if unset.",
    )
    prefix_tier: bool | None = Field(
        default=None,
        description="Keep blocks of finished requests for others with the same prefix; as "
        "enable_prefix_caching says if unset.",
    )
    is_offline: bool = Field(
        default=False, description="Ask no coordinator: everything paged lives in host memory."
    )


def read_options(given: dict[str, Any]) -> AquaOptions:
    """Check the options of the engine's command line.

    Raises:
        ConfigError: Names every option that is wrong and what is wrong with it.
    """
    try:
        return AquaOptions.model_validate(given)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(
            "; ".join(faults),
            remedy=f"kv_connector_extra_config takes: {', '.join(AquaOptions.model_fields)}.",
        ) from error
