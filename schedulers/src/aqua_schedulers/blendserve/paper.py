"""BlendServe as published: dual scanner, memory partition, and a step budget at rho(root).

The left end admits compute-bound requests into its part of the memory, the right end memory-bound
ones into the other; each counts the predicted peak of what it runs. The parts follow from the two
equations of `partition`, anew whenever an end reaches another unit. The step's token budget keeps
the step's compute at rho(root) times its memory time.

The last sentence is our reading: the paper states the target density for memory alone, but with
the partition alone the simulated gain is 4% where the paper reports 21%; pacing the budget makes
the difference. Batch sizes are multiples of 128 as in NanoFlow, rounded up and down by turns so
that the mean is kept (sections 4 and 5.3).

What it does not do: look ahead. Memory-bound requests start in phase and end in a tail, which is
where `foresight` gains.

Source: BlendServe sections 3.4, 4 and 5.3.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve import dual_scanner as ends_module
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.dual_scanner import (
    LEFT,
    LEFT_COUNT,
    LEFT_RESERVED,
    NONE,
    RIGHT,
    RIGHT_COUNT,
    RIGHT_RESERVED,
    DualScanner,
    left_density,
    next_left,
    next_right,
    open_scanner,
    right_density,
    settle,
    take,
)
from aqua_schedulers.blendserve.order import BlendOrder
from aqua_schedulers.blendserve.partition import left_share
from aqua_schedulers.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

BATCH_MULTIPLE: Final = 128
"""NanoFlow's batch sizes (section 4)."""

LONGEST_ADMISSION: Final = 4096
"""Requests that one step may admit; a bound for the buffer, far above any step's need."""


class PaperBlend:
    """The paper's policy over a pool of requests.

    Args:
        order: The pool in blended order.
        reserved_tokens: KV tokens of each request at its expected peak, shape (num_requests,).
        fresh_tokens: Prompt tokens of each request that no earlier one computes, shape
            (num_requests,).
        cost: Compute and memory coefficients of the engine.
        max_step_tokens: Most tokens a step may compute.
    """

    def __init__(
        self,
        order: BlendOrder,
        reserved_tokens: Int64s,
        fresh_tokens: Int64s,
        cost: ResourceCost,
        *,
        max_step_tokens: int,
    ) -> None:
        self._ends = open_scanner(order, reserved_tokens)
        self._fresh = fresh_tokens.astype(np.int64)
        self._target = order.root_density
        self._tokens_per_kv_token = (
            order.root_density * cost.decode_s_per_kv_token / cost.linear_s_per_token
        )
        self._max_step_tokens = max_step_tokens
        self._rounding = 0.0
        self._out = np.empty(LONGEST_ADMISSION, np.int32)

    @property
    def finished_count(self) -> int:
        """Requests that ended."""
        return int(self._ends.cursor[ends_module.DONE_COUNT])

    def plan(self, view: BatchView) -> StepPlan:
        """Admit from both ends within their memory, and pace the step."""
        settle(self._ends, view.finished, np.concatenate([view.retracted, view.refused]))
        budget = self._budget(view.logical_kv_tokens + view.decoding_count)
        count = _scan(
            self._ends,
            self._fresh,
            self._target,
            view.capacity_tokens,
            view.pending_prefill_tokens,
            max(0, budget - view.decoding_count),
            self._out,
        )
        return StepPlan(self._out[:count].copy(), budget)

    def _budget(self, read_tokens: int) -> int:
        """Tokens whose compute is rho(root) times the time to read the context."""
        wanted = self._tokens_per_kv_token * read_tokens + self._rounding
        multiples = max(1, round(wanted / BATCH_MULTIPLE))
        # What rounding gave or took is settled in the next steps, at most one multiple of it.
        self._rounding = min(float(BATCH_MULTIPLE), wanted - multiples * BATCH_MULTIPLE)
        self._rounding = max(-float(BATCH_MULTIPLE), self._rounding)
        return min(self._max_step_tokens, multiples * BATCH_MULTIPLE)


@compiled
def _scan(
    ends: DualScanner,
    fresh: Int64s,
    target: float,
    capacity: int,
    pending: int,
    prefill_budget: int,
    out: Int32s,
) -> int:
    """Fill both partitions; returns the number of requests written to `out`.

    The left end also stops when the prompts waiting fill the step: what is admitted later shares
    the prefixes of what is admitted now, and holds no memory meanwhile.
    """
    cursor = ends.cursor
    count = 0
    left_open = True
    right_open = True
    while (left_open or right_open) and count < len(out):
        share = left_share(left_density(ends), right_density(ends), target)
        left_memory = share * capacity
        # The parts move as the ends do, so what was admitted into yesterday's part counts too.
        free = capacity - cursor[LEFT_RESERVED] - cursor[RIGHT_RESERVED]
        if right_open:
            request = next_right(ends)
            need = ends.reserved[request] if request != NONE else 0
            fits = need <= min(free, capacity - left_memory - cursor[RIGHT_RESERVED])
            if request != NONE and (fits or cursor[RIGHT_COUNT] + cursor[LEFT_COUNT] + count == 0):
                take(ends, request, RIGHT)
                out[count] = request
                count += 1
                pending += fresh[request]
                continue
            right_open = False
        if left_open:
            request = next_left(ends)
            need = ends.reserved[request] if request != NONE else 0
            fits = need <= min(free, left_memory - cursor[LEFT_RESERVED])
            if request != NONE and pending < prefill_budget and fits:
                take(ends, request, LEFT)
                out[count] = request
                count += 1
                pending += fresh[request]
                continue
            left_open = False
    return count
