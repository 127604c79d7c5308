"""Asynchronous scheduling on a CPU build of vLLM, which switches it off as of no use there.

Whoever schedules a step before the last one's output is there has to guess what the output will be
and to keep blocks that are still read. All of that is vLLM's scheduler and engine core, which do
the same on every device; only the runner's copies to the host want streams and events of a GPU. A
CPU has done its work when a call returns, so nothing stands in for those.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class _Nothing:
    """A stream or an event that is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's
        del args, kwargs

    def record(self, *args: Any) -> None:  # noqa: ANN401 - torch's
        """It is done."""

    synchronize = wait_stream = wait_event = record


def allow_overlapping_steps() -> None:
    """Let engines that this process makes schedule asynchronously; for ever."""
    import torch
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.check_and_update_config

    def update_but_for_scheduling(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's
        wanted = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    answers: list[tuple[Any, str, Any]] = [
        (platform, "check_and_update_config", staticmethod(update_but_for_scheduling)),
        (torch, "Event", _Nothing),
        (torch.cuda, "Event", _Nothing),
        (torch.cuda, "Stream", _Nothing),
        (torch.cuda, "current_stream", _Nothing),
        (torch.cuda, "stream", nullcontext),
    ]
    for thing, name, answer in answers:
        setattr(thing, name, answer)
