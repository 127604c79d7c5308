"""A scheduler for `--scheduler-cls` that leaves in the prefix cache what no step has computed."""

from __future__ import annotations

from typing import Any

from aqualib.engines.vllm import AquaScheduler
from harness.step_aborts import keep_published


class KeepingScheduler(AquaScheduler):
    """A negative control."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        keep_published(self)
