"""Has a scheduler hear of requests as they come in, while its own thread waits for a step.

vLLM takes requests in on a thread of their own, which makes them ready for the scheduler
(`EngineCore.preprocess_add_request`) and puts them in a queue that is emptied between two steps.
There is no hook there, so this method is wrapped, once in a process and only in one whose scheduler
wants to know: nothing else of vLLM is replaced. What a request says is not changed, and an error of
vLLM's is passed on.
"""

from __future__ import annotations

import functools
from typing import Any, Final

WRAPPED: Final = "aqua_hears_arrivals"
"""The mark of a method that is wrapped already."""


def hear_arrivals() -> None:
    """Have schedulers of this process that want to hear of requests from now on.

    Such a one has `arrival_heard(request)`, called on the thread that takes requests in, and
    `arrival_failed(request_id)`, of a request that will not come after all.
    """
    from vllm.v1.engine.core import EngineCore

    preprocess = EngineCore.preprocess_add_request
    if hasattr(preprocess, WRAPPED):
        return

    @functools.wraps(preprocess)
    def preprocess_and_tell(self: Any, request: Any) -> Any:
        scheduler = self.scheduler
        if not hasattr(scheduler, "arrival_heard"):
            return preprocess(self, request)
        scheduler.arrival_heard(request)
        try:
            return preprocess(self, request)
        except BaseException:
            scheduler.arrival_failed(request.request_id)
            raise

    setattr(preprocess_and_tell, WRAPPED, True)
    EngineCore.preprocess_add_request = preprocess_and_tell
