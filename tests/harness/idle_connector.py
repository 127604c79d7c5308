"""A connector of vLLM's that moves nothing: what ours works beside in a `MultiConnector`.

In benchmarks it says what vLLM pays for having a connector at all: none can cost less.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class IdleMetadata(KVConnectorMetadata):
    """Of a step in which nothing is moved."""


class IdleConnector(KVConnectorBase_V1):
    """Has nothing, and keeps nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:  # noqa: ANN401 - vLLM's
        """None."""
        del args
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> IdleMetadata:  # noqa: ANN401 - vLLM's
        """Nothing to do."""
        del scheduler_output
        return IdleMetadata()

    def has_connector_metadata(self) -> bool:
        """False: no layer has anything to ask."""
        return False

    def update_state_after_alloc(self, *args: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    wait_for_layer_load = update_state_after_alloc
    save_kv_layer = start_load_kv
    wait_for_save = update_state_after_alloc
