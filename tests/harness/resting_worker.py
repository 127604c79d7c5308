"""A worker for `--worker-cls` that counts the steps in which vLLM finds a connector, or none."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from vllm.distributed.kv_transfer import has_kv_transfer_group

from aqualib.engines.vllm import AquaWorker

FOUND: Final[Counter[str]] = Counter()


class RestCountingWorker(AquaWorker):
    """An `AquaWorker` of this process."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().initialize_from_config(kv_cache_config)
        run = self.model_runner.execute_model

        def run_counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            FOUND["a connector" if has_kv_transfer_group() else "none"] += 1
            return run(*args, **kwargs)

        self.model_runner.execute_model = run_counted
