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

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

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
from aqua_schedulers.compiled import compiled, compiled_part, record

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


@dataclass(slots=True)
class StepPace:
    """What a step's budget follows from.

    Attributes:
        target: rho(root).
        tokens_per_kv_token: Tokens whose compute is `target` times the reading of one.
        least_read_tokens: What an engine with a least batch reads at least, as far as pacing goes.
        rounding: Tokens that rounding owes the next steps; what it took is negative.
    """

    target: float
    tokens_per_kv_token: float
    least_read_tokens: int
    max_step_tokens: int
    rounding: float = 0.0


class PaperState(NamedTuple):
    """All that the policy knows, as compiled code takes it; arrays are changed in place.

    Attributes:
        fresh: Prompt tokens that no earlier request of the order computes.
        admitted: What the last planned step admits, as many as `plan_paper` said.
        pace: One record.
    """

    scanner: DualScanner
    fresh: Int64[np.ndarray, " requests"]
    admitted: Int32[np.ndarray, " max_admitted"]
    pace: Sequence[StepPace]


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
        hidden = target * cost.decode_s_per_kv_token
        pace = StepPace(
            target=target,
            tokens_per_kv_token=hidden / cost.linear_s_per_token,
            # An engine with a least batch reads, as far as pacing goes, what this batch would hide.
            least_read_tokens=int(least_step_tokens * cost.linear_s_per_token / hidden),
            max_step_tokens=max_step_tokens,
        )
        self.state = PaperState(
            open_scanner(prepared.order, prepared.reserved_tokens),
            prepared.fresh_tokens,
            np.empty(MAX_ADMITTED, np.int32),
            record(pace),
        )

    @property
    def reserved_tokens(self) -> int:
        """KV tokens of the running requests at their expected peaks."""
        return int(sum(end.reserved_tokens for end in self.state.scanner.ends))

    def settle(self, view: BatchView) -> None:
        """Book what happened since the last step was planned."""
        if view.has_events:
            returned = np.concatenate([view.retracted, view.refused])
            settle(self.state.scanner, view.finished, returned)

    def plan(self, view: BatchView) -> StepPlan:
        """Admit from both ends within their memory, and pace the step."""
        self.settle(view)
        count, budget = plan_paper(
            self.state,
            view.decoding_count,
            view.pending_prefill_tokens,
            view.logical_kv_tokens,
            view.capacity_tokens,
        )
        return StepPlan(self.state.admitted[:count].copy(), budget)


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
def plan_paper(
    state: PaperState,
    decoding_count: int,
    pending_tokens: int,
    logical_kv_tokens: int,
    capacity: int,
) -> tuple[int, int]:
    """Decide the step; returns how many of `state.admitted` to admit, and the token budget."""
    pace = state.pace[0]
    read = max(logical_kv_tokens, pace.least_read_tokens)
    budget = _budget(pace, read + decoding_count)
    count = _scan(state, capacity, pending_tokens, max(0, budget - decoding_count))
    return count, budget


@compiled_part
def _budget(pace: StepPace, read_tokens: int) -> int:
    """Tokens whose compute is rho(root) times the time to read the context."""
    wanted = pace.tokens_per_kv_token * read_tokens + pace.rounding
    multiples = max(1, round(wanted / BATCH_MULTIPLE))
    # What rounding gave or took is settled in the next steps, at most one multiple of it.
    rounding = min(float(BATCH_MULTIPLE), wanted - multiples * BATCH_MULTIPLE)
    pace.rounding = max(-float(BATCH_MULTIPLE), rounding)
    return int(min(pace.max_step_tokens, multiples * BATCH_MULTIPLE))


@compiled_part
def _scan(state: PaperState, capacity: int, pending: int, prefill_budget: int) -> int:
    """Fill both partitions; returns the number of requests written to `state.admitted`.

    The left end also stops when the prompts waiting fill the step: what is admitted later shares
    the prefixes of what is admitted now, and holds no memory meanwhile.
    """
    scanner, out, target = state.scanner, state.admitted, state.pace[0].target
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
        pending += state.fresh[request]
    return count
