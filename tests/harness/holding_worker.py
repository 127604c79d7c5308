"""A worker for `--worker-cls` whose first abortable step ends by an abort alone."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from aqualib.engines.vllm import AquaWorker
from harness.step_aborts import hold_first_step


class HoldingWorker(AquaWorker):  # type: ignore[misc] # its base needs vLLM, which mypy does not have
    """Holds that step in its second layer until somebody asks for the abort."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().initialize_from_config(kv_cache_config)
        hold_first_step(get_kv_transfer_group().safepoints)
