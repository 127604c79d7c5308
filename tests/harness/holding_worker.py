"""Workers for `--worker-cls` that ask for aborts as a test wants them, or wait for one."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from aqualib.engines.vllm import AquaWorker
from harness.step_aborts import ASKING, abort_at_random, hold_first_step, look_elsewhere


class HoldingWorker(AquaWorker):
    """Holds the first abortable step in its second layer until somebody asks for the abort."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().initialize_from_config(kv_cache_config)
        hold_first_step(get_kv_transfer_group().safepoints)


class AskingWorker(AquaWorker):
    """Asks for an abort at some layers at random; of several ranks, the last does."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().initialize_from_config(kv_cache_config)
        share, seed = os.environ[ASKING].split()
        if self.rank == self.parallel_config.world_size - 1:
            safepoints = get_kv_transfer_group().safepoints
            abort_at_random(safepoints, share=float(share), seed=int(seed))


class BlindWorker(AskingWorker):
    """An `AskingWorker`; of several ranks, the last finds no page."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().initialize_from_config(kv_cache_config)
        if self.rank == self.parallel_config.world_size - 1:
            look_elsewhere(get_kv_transfer_group().safepoints)
