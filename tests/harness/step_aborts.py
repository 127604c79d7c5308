"""Aborts of steps where a test wants them: at random, or when a step has been waited for.

Workers of a test stand in front of `AquaWorker`'s safepoints: they ask for an abort as an engine
would, by its page, and what follows is the engine's own doing.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aqualib.engines.vllm.co_serving.abort_page import AbortPage
from harness.bounds import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder

ASKING: Final = "HARNESS_ABORTED_LAYERS"
"""Says to workers which share of layers asks for an abort, and by which seed."""

ASKED: Final[Counter[int]] = Counter()
STOPPED: Final[Counter[int]] = Counter()
"""How often a worker of this process was asked for an abort in a layer, and stopped there."""

HELD: Final = "HARNESS_HELD_STEP"
"""Names a file that `HoldingSafepoints` writes once it holds a step."""


def allow_aborts_in_process() -> None:
    """Let engines of this process abort steps, though nothing takes requests in meanwhile."""
    from aqualib.engines.vllm.scheduling import abort_checks

    abort_checks.runs_in_callers_process = lambda: False


def keep_published(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's
    """Leave in the prefix cache what no step has computed: a negative control."""

    def keep(block_ids: set[int]) -> None:
        del block_ids

    scheduler.kv_cache_manager.block_pool.evict_blocks = keep


class AskedSafepoints:
    """Stands before a worker's safepoints, and asks for an abort at some."""

    def __init__(self, safepoints: Any, is_asked: Callable[[SafepointOrder, int], bool]) -> None:  # noqa: ANN401 - a worker's
        # Of a module with torch, which tests that run an engine elsewhere do not need.
        from aqualib.engines.vllm.co_serving.safepoints import StepAbortedError

        self._stop = StepAbortedError
        self._pass = safepoints.passed
        self._begin = safepoints.begin
        self._is_asked = is_asked
        self._order: SafepointOrder | None = None
        self._layer = 0
        safepoints.begin, safepoints.passed = self.begin, self.passed

    def begin(self, order: SafepointOrder | None) -> None:
        self._order, self._layer = order, 0
        self._begin(order)

    def passed(self) -> None:
        order, layer = self._order, self._layer
        self._layer += 1
        if order is not None and order.step and self._is_asked(order, layer):
            ASKED[layer] += 1
            with AbortPage.open(order.place) as page:
                page.ask(order.step)
        try:
            self._pass()
        except self._stop:
            STOPPED[layer] += 1
            raise


def abort_at_random(safepoints: Any, *, share: float, seed: int) -> None:  # noqa: ANN401 - a worker's
    """Have so many of a worker's layers ask for an abort of their step."""
    rng = random.Random(seed)
    AskedSafepoints(safepoints, lambda _order, _layer: rng.random() < share)


def hold_first_step(safepoints: Any) -> None:  # noqa: ANN401 - a worker's
    """Have the first step that may be aborted wait in its second layer until it is to be."""
    held: list[int] = []

    def wait(order: SafepointOrder, layer: int) -> bool:
        if layer != 1 or held:
            return False
        held.append(order.step)
        Path(os.environ[HELD]).write_text(str(order.step))
        with AbortPage.open(order.place) as page:
            # Another process writes to the page, and nothing tells of it.
            until(lambda: page.is_asked(order.step), "something asks for the step to be aborted")
        return False

    AskedSafepoints(safepoints, wait)


def look_elsewhere(safepoints: Any) -> None:  # noqa: ANN401 - a worker's
    """Have a worker look for the engine's page where none is."""
    begin = safepoints.begin
    safepoints.begin = lambda order: begin(order and order._replace(place="/proc/0/fd/0"))
