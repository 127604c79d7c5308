"""A worker for `--worker-cls` whose steps take longer while consumers may copy, if a test says so.

Of an engine's ranks the last is slowed, by as much on a busy machine as on a quiet one. Steps are
long, so that what is measured is mostly this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from aqualib.engines.vllm import LendingWorker
from aqualib.engines.vllm.lending.rank_messages import PACE
from harness.vllm_program import SLOWED

STEP_S: Final = 0.05
"""What each step takes beside what vLLM takes: several times as long."""

SLOWED_BY: Final = 2.5
"""Less than a pause between requests is long, and far more than luck."""


class SlowedWorker(LendingWorker):
    """Slowed while the file that is named by `SLOWED` is there."""

    may_copy = True

    def execute_model(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        if (pace := getattr(scheduler_output, PACE, None)) is not None:
            self.may_copy = pace.bytes_per_s > 0
        began_s = time.perf_counter()
        time.sleep(STEP_S)
        output = super().execute_model(scheduler_output)
        is_last = self.rank == self.parallel_config.world_size - 1
        if is_last and self.may_copy and Path(os.environ[SLOWED]).exists():
            time.sleep((SLOWED_BY - 1) * (time.perf_counter() - began_s))
        return output
