"""Safepoints: places between layers where a worker may stop a step of offline work.

vLLM asks the connector before each attention layer to wait for that layer's KV. That is the one
place inside a step where code of ours runs, compiled or not, and it is all that safepoints need:
every few layers, in a step that the scheduler has marked, the worker looks at the engine's page
(`abort_page`) and, if the step is to be aborted, raises `StepAbortedError` through the model.
`AquaWorker` catches it.

On a GPU layers are launched long before they run, so a look at launch time would come too early to
save anything: the whole step is queued within milliseconds. There a worker records an event at each
safepoint and waits for that of the one before. So it is never more than two groups of layers ahead
of the device, and the device always has a group to go on with.

While a step that was aborted unwinds, the connector has to keep what it would report with the
step's output, for that output is lost (`is_unwinding`).

A rank without the page would go on where others stop, and wait for them in its next collective for
ever. So before the first such step of an engine all ranks are told to open the page, and report
whether they have it; unless all have, no step is ever marked (`step_aborts`).

Not promised: that a step stops. One without a safepoint left, such as one whose layers run inside
a full CUDA graph, ends by itself.

Source: ConServe section 4.3, whose safepoints are a barrier each; waiting for the group before is
ours.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple

import torch

from aqua_protocol import TransportError
from aqualib.engines.vllm.co_serving.abort_page import AbortPage

logger: Final = logging.getLogger("aqualib")


class SafepointOrder(NamedTuple):
    """What a step's plan tells workers of its safepoints.

    Attributes:
        step: The number of a step that may be aborted; 1 or more, ascending. With 0 this one may
            not: the page is opened for later ones.
        place: Where the engine's page is.
        every_layers: A safepoint before the first layer, and before each of so many.
    """

    step: int
    place: str
    every_layers: int


class StepAbortedError(Exception):
    """A step stops here; not an error of anything, and caught by the worker.

    Attributes:
        step: Its number.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} was aborted at a safepoint")
        self.step: Final = step


class Safepoints:
    """One worker's safepoints, on the thread that runs its model.

    Args:
        rank: Of this worker.
        rank_count: Those that abort together.
        device: Where the layers run.

    Attributes:
        is_unwinding: A step was aborted, and its output has not been made up for yet.
    """

    def __init__(self, rank: int, rank_count: int, device: torch.device) -> None:
        self.is_unwinding = False
        self._aborted_step = 0
        self._rank = rank
        self._rank_count = rank_count
        self._page: AbortPage | None = None
        self._is_blind = False
        self._has_page: bool | None = None
        self._order: SafepointOrder | None = None
        self._layer = 0
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.Event(device), torch.Event(device)]
        self._recorded = 0

    def begin(self, order: SafepointOrder | None) -> None:
        """A step begins, which has safepoints or not.

        Raises:
            TransportError: One of several ranks cannot open the page, and the step has safepoints.
                It would go on where the others stop, and wait for them in its next collective for
                ever.
        """
        is_marked = order is not None and order.step > 0
        self._order = order if is_marked else None
        self._layer = self._recorded = 0
        if order is None:
            return
        if self._page is None and not self._is_blind:
            try:
                self._page = AbortPage.open(order.place)
            except TransportError as error:
                if is_marked and self._rank_count > 1:
                    raise
                # Said once: the engine serves on, and an arrival waits for the step.
                self._is_blind = True
                logger.warning("co-serving: steps cannot be aborted here: %s", error.message)
        if not is_marked:
            self._has_page = not self._is_blind

    def take_page(self) -> bool | None:
        """Whether the page could be opened; None if that was not asked since the last call."""
        has_page, self._has_page = self._has_page, None
        return has_page

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is to be told of steps before, nor of the page."""
        return not (self.is_unwinding or self._aborted_step) and self._has_page is None

    @property
    def has_order(self) -> bool:
        """Whether the step may be aborted."""
        return self._order is not None

    def passed(self) -> None:
        """A layer is about to be launched.

        Raises:
            StepAbortedError: The step stops here.
        """
        order, page = self._order, self._page
        if order is None or page is None:
            return
        safepoint, offset = divmod(self._layer, order.every_layers)
        self._layer += 1
        if offset:
            return
        self._keep_up()
        if self._rank_count == 1:
            is_abort = page.is_asked(order.step)
        elif self._rank == 0:
            is_abort = page.decide(order.step, safepoint)
        else:
            is_abort = page.follow(order.step, safepoint)
        if is_abort:
            self._order = None
            self.is_unwinding = True
            self._aborted_step = order.step
            raise StepAbortedError(order.step)

    def take_aborted(self) -> int:
        """The step that was aborted since the last call; 0 if none was, or it still unwinds."""
        if self.is_unwinding:
            return 0
        step, self._aborted_step = self._aborted_step, 0
        return step

    def close(self) -> None:
        """Let go of the page."""
        self._order = None
        if self._page is not None:
            self._page.close()
            self._page = None

    def _keep_up(self) -> None:
        """Wait until the device has done what was launched before the last safepoint."""
        if not self._events:
            return
        at, before = self._recorded % 2, (self._recorded + 1) % 2
        self._events[at].record()
        if self._recorded:
            self._events[before].synchronize()
        self._recorded += 1
