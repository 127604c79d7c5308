"""Options of the vLLM adapter: what `kv_connector_extra_config` may say.

Every field has a default that works; a wrong or unknown one refuses the engine's start with the
field's name, because a misspelt option that is ignored looks like a slow system. Settings that are
not about vLLM (coordinator, token, transport, checksums) are those of aqualib, `AQUA_*`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from aqua_protocol import ConfigError, parse_bytes
from aqua_schedulers.cfs import FairSettings, PolicyName
from aqualib.engines.vllm.lending.options import LendingOptions
from aqualib.engines.vllm.plugin import CONNECTOR

ADDITIONAL_CONFIG_KEY: Final = "aqua"
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


class AquaOptions(FairSettings):
    """The adapter's options; immutable. Read them with `read_options`."""

    @property
    def is_paging(self) -> bool:
        """Whether anything is paged at all."""
        return self.mode is not PagingMode.RECOMPUTE

    policy: PolicyName = Field(
        default=PolicyName.FIRST_TOKEN, description="Who computes when memory is short."
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
    lend: LendingOptions | None = Field(
        default=None, description="Lend what the KV cache does not need; see `LendingOptions`."
    )


def options_of(vllm_config: Any) -> AquaOptions:
    """The connector's options, or, without our connector, those of `--additional-config`.

    Raises:
        ConfigError: One is wrong, or they contradict each other.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        options = read_options(transfer.kv_connector_extra_config)
        if options.lend is not None and options.is_paging and not options.is_offline:
            raise ConfigError(
                "an engine that lends memory does not borrow any at the same time",
                remedy='Add "is_offline": true (page to host memory) or "mode": "recompute", or '
                'drop "lend".',
            )
        return options
    additional = vllm_config.additional_config
    given = additional.get(ADDITIONAL_CONFIG_KEY, {}) if isinstance(additional, dict) else {}
    options = read_options(given)
    if options.lend is not None and transfer is not None:
        raise ConfigError(
            f"{transfer.kv_connector} reads the KV cache whenever it likes, so none of it is lent",
            remedy=f'Use {CONNECTOR}, or no connector, or drop "lend".',
        )
    return options


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


def model_name(vllm_config: Any) -> str | None:
    """The model's folder or id, as the books take names."""
    last = str(vllm_config.model_config.model).rstrip("/").rpartition("/")[2]
    letters = re.sub(r"[^A-Za-z0-9._:-]+", "-", last)
    return letters.strip("-._:") or None
