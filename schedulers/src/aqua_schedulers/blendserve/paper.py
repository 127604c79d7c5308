"""BlendServe as published: dual scanner, memory partition, and a step budget at rho(root).

The left end admits compute-bound requests into its part of the memory, the right end memory-bound
ones into the other; each counts the predicted peak of what it runs. The parts follow from the two
equations of `left_share`, anew whenever an end reaches another unit. The step's token budget keeps
the step's compute at rho(root) times its memory time.

The last sentence is our reading: the paper states the target density for memory alone, but with
the partition alone the simulated gain is 4% where the paper reports 21%; pacing the budget makes
the difference. Batch sizes are multiples of 128 as in NanoFlow, rounded up and down by turns so
that the mean is kept (sections 4 and 5.3), and none is paced below a dense batch (`DENSE_TOKENS`),
which NanoFlow forms for the tensor cores: this is the policy of Figure 6.

What it does not do: look ahead. Memory-bound requests start in phase and end in a tail, which is
where `foresight` gains.

Source: BlendServe sections 3.4, 4 and 5.3.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Int32, Int64

from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve.dual_scanner import (
    LEFT,
    MAX_ADMITTED,
    NONE,
    RIGHT,
    DualScanner,
    density_at,
    next_request,
    open_scanner,
    settle,
    take,
)
from aqua_schedulers.compiled import compiled

if TYPE_CHECKING:
    from aqua_schedulers.blendserve.preparation import PreparedPool

BATCH_MULTIPLE: Final = 128
"""Tokens: NanoFlow's batch sizes are multiples of it (section 4). Doubled, a step is up to 128
tokens further from its pace."""


DENSE_EFFICIENCY: Final = 0.8
"""Share of their full rate at which linear layers count as dense; shares from 0.76 to 0.83 give the
same `DENSE_TOKENS`, and it cannot be doubled."""


def dense_tokens(
    *, floor_s: float, s_per_token: float, exponent: float, efficiency: float = DENSE_EFFICIENCY
) -> int:
    """Fewest tokens, in whole tiles, at which linear layers reach a share of their full rate.

    Args:
        floor_s, s_per_token, exponent: `t = (floor^n + (b T)^n)^(1/n)`, as measured.
    """
    # b T / t = efficiency, solved for T.
    ratio: float = (efficiency**-exponent - 1.0) ** (-1.0 / exponent)
    return BATCH_MULTIPLE * ceil(ratio * floor_s / (s_per_token * BATCH_MULTIPLE))


DENSE_TOKENS: Final = dense_tokens(floor_s=9.09e-3, s_per_token=67.7e-6, exponent=1.28)
"""Fewest tokens to which a step is paced, 384. The floor, slope and exponent are Vidur's profile of
Llama-3-8B on an A100. The paper gives no number; any efficiency from 76 to 83 percent gives this
one, and Figure 6's sensitivity shows what others do: about 2.5 points of gain for every 64
tokens."""


class PaperBlend:
    """The paper's policy over a pool of requests; no step is paced below `least_step_tokens`.

    `max_step_tokens` bounds every step, those too.
    """

    def __init__(
        self,
        prepared: PreparedPool,
        *,
        max_step_tokens: int,
        least_step_tokens: int = DENSE_TOKENS,
    ) -> None:
        cost, target = prepared.cost, prepared.order.root_density
        self._scanner = open_scanner(prepared.order, prepared.reserved_tokens)
        self._fresh = prepared.fresh_tokens
        self._target = target
        self._tokens_per_kv_token = target * cost.decode_s_per_kv_token / cost.linear_s_per_token
        # An engine with a least batch reads, as far as pacing goes, what this batch would hide.
        hidden = target * cost.decode_s_per_kv_token
        self._least_read_tokens = int(least_step_tokens * cost.linear_s_per_token / hidden)
        self._max_step_tokens = max_step_tokens
        self._rounding = 0.0
        self._out = np.empty(MAX_ADMITTED, np.int32)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens of the running requests at their expected peaks."""
        return int(sum(end.reserved_tokens for end in self._scanner.ends))

    def plan(self, view: BatchView) -> StepPlan:
        """Admit from both ends within their memory, and pace the step."""
        settle(self._scanner, view.finished, np.concatenate([view.retracted, view.refused]))
        read = max(view.logical_kv_tokens, self._least_read_tokens)
        budget = self._budget(read + view.decoding_count)
        count = _scan(
            self._scanner,
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
def left_share(left_density: float, right_density: float, target_density: float) -> float:
    """Share of the memory for the left, compute-bound end: M_L / M, in 0..1.

    Two equations: the parts fill the memory, and their densities, weighted by memory, give the
    target. A target that lies outside both densities has no solution with two positive parts; then
    the nearer end gets everything.

    Source: BlendServe section 3.4, Figure 5 (19.3 and 40.7 GB of 60 GB for densities 3.73, 0.096
    and target 1.27; the exact solution of its numbers is 19.4 and 40.6).
    """
    if left_density <= right_density:
        return 0.5
    share = (target_density - right_density) / (left_density - right_density)
    return min(1.0, max(0.0, share))


@compiled
def _scan(
    scanner: DualScanner,
    fresh: Int64[np.ndarray, " requests"],
    target: float,
    capacity: int,
    pending: int,
    prefill_budget: int,
    out: Int32[np.ndarray, " max_admitted"],
) -> int:
    """Fill both partitions; returns the number of requests written to `out`.

    The left end also stops when the prompts waiting fill the step: what is admitted later shares
    the prefixes of what is admitted now, and holds no memory meanwhile.
    """
    left, right = scanner.ends[LEFT], scanner.ends[RIGHT]
    count = 0
    side = RIGHT
    while count < len(out):
        share = left_share(density_at(scanner, LEFT), density_at(scanner, RIGHT), target)
        left_memory = share * capacity
        # The parts move as the ends do, so what was admitted into yesterday's part counts too.
        free = capacity - left.reserved_tokens - right.reserved_tokens
        request = next_request(scanner, side)
        if side == RIGHT:
            room = min(free, capacity - left_memory - right.reserved_tokens)
            is_idle = left.running_count + right.running_count + count == 0
            if request == NONE or not (scanner.reserved[request] <= room or is_idle):
                side = LEFT
                request = next_request(scanner, side)
        if side == LEFT:
            room = min(free, left_memory - left.reserved_tokens)
            if request == NONE or pending >= prefill_budget or scanner.reserved[request] > room:
                break
        take(scanner, request, side)
        out[count] = request
        count += 1
        pending += fresh[request]
    return count
