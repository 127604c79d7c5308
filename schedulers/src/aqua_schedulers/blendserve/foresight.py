"""Blending with foresight: the default mode, beyond the paper.

Why the paper's target is not the best one. With compute c and memory m a step takes
`max(c, m) + alpha min(c, m)`, so a run takes `C + M - (1 - alpha) sum min(c, m)`, and no order can
hide more than min(C, M). The bound is reached not only when every step has the ratio C / M, as the
paper aims for, but whenever *the smaller resource is hidden in every step*: with C > M each step
needs c >= m, with C < M each needs c <= m. In between the ratio is free, and the freedom is worth
having: it absorbs the start, when all long requests have short contexts, the tail, when few are
left, and wrong estimates. So the step is paced between 1 and what remains to be done, and what
remains is reckoned anew as the run goes.

What else differs from the paper's mode:

- Memory is not halved into fixed parts. Long requests are admitted when the ramp of their memory
  fits under all others' (`timeline`), leaving what the left end needs to keep the pace. If the next
  long request does not fit, a shorter one behind it may: this fills the start.
- Where lengths are estimates, what is observed corrects them (`learning`), and the rest of the
  pool is sorted anew when a correction changes which end requests belong to.

Source: BlendServe section 2.4 for the bound; the rest is ours.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.dual_scanner import (
    BACK,
    DONE_COUNT,
    FRONT,
    LEFT,
    LEFT_RETRIES,
    NONE,
    POOLED,
    RIGHT,
    RIGHT_RETRIES,
    DualScanner,
    next_left,
    next_right,
    open_scanner,
)
from aqua_schedulers.blendserve.foresight_state import (
    ADMITTED,
    AMOUNT_SLOTS,
    BUDGET,
    BUILT_AT,
    CAPACITY,
    COMPUTE_LEFT,
    DECODING,
    DIRTY,
    KV_TOKEN_S,
    LEAST_TOKENS,
    LEFT_NEED,
    LEFT_OUTPUT,
    LEFT_STEPS,
    LOGICAL,
    LONG_COUNT,
    LONG_FROM,
    LONG_TOKENS,
    LONGEST_ADMISSION,
    MAX_STEP,
    MEMORY_LEFT,
    MOST_LONG,
    NUMBER_SLOTS,
    PENDING,
    PHYSICAL,
    PREFILLING,
    RUNNING_COMPUTE,
    RUNNING_MEMORY,
    STEP,
    STEPS_LEFT,
    TOKEN_S,
    ForesightState,
    admit,
    ramp,
    rebuild,
    settle_books,
    weigh_short,
)
from aqua_schedulers.blendserve.length_learner import LengthLearner
from aqua_schedulers.blendserve.lengths import LengthEstimate
from aqua_schedulers.blendserve.order import BlendOrder, blend_order, charged, weigh
from aqua_schedulers.blendserve.timeline import Timeline, empty_timeline, peak_with
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_schedulers.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

REBUILD_STEPS: Final = 64
"""The forecast is made anew after so many steps, or when a long request came or went."""

LEAST_STEP_TOKENS: Final = 32
"""Smallest step where reading the weights costs nothing; it keeps prompts moving while contexts
are short. Where it does cost (`ResourceCost.linear_floor_s`), steps below its worth in tokens are
never planned."""

SPREAD_SHARE: Final = 0.8
"""Part of the spare compute to spread over the tail; the rest covers tails that last longer than
they were expected to."""

PACE_MARGIN: Final = 0.05
"""How far the pace goes from 1 towards what remains. Enough that steps which miss their pace by a
little still hide the smaller resource; and little, because an estimate that has the wrong sign
costs as much of the smaller resource as the pace is wrong by."""

LEAST_HORIZON_STEPS: Final = 8
"""A left-end request lives at least so long; meanwhile every long request grows by as much."""

MEMORY_MARGIN: Final = 0.02
"""Share of the memory left to what a forecast in buckets and means cannot see."""

NEIGHBOURS: Final = 8
"""Requests that are tried beside the one that bisection finds."""


class ForesightBlend:
    """The default policy over a pool of requests.

    Args:
        order: The pool in blended order.
        lengths: Output lengths as estimated.
        tree: The prompts.
        fresh_tokens: Prompt tokens that no earlier request of the order computes.
        compute_s: Compute seconds by place in the order, shared prefixes charged once.
        memory_s: Memory seconds of each request.
        cost: Compute and memory coefficients of the engine.
        capacity_tokens: KV tokens that fit in memory.
        max_step_tokens: Most tokens a step may compute.
    """

    def __init__(  # noqa: PLR0913 - the columns of one table
        self,
        order: BlendOrder,
        lengths: LengthEstimate,
        *,
        tree: PrefixTree,
        fresh_tokens: Int64s,
        compute_s: Floats,
        memory_s: Floats,
        cost: ResourceCost,
        capacity_tokens: int,
        max_step_tokens: int,
    ) -> None:
        count = len(order.requests)
        prompt_tokens = tree.prompt_tokens
        reserved = prompt_tokens + np.ceil(lengths.mean).astype(np.int64)
        self._ends = open_scanner(order, reserved)
        self._desk = ForesightState(
            prompt_tokens.astype(np.int64),
            fresh_tokens.astype(np.int64),
            lengths.mean.copy(),
            lengths.exact,
            compute_s.copy(),
            memory_s.copy(),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(MOST_LONG, np.int32),
            np.zeros(LONGEST_ADMISSION, np.int32),
            np.zeros(NUMBER_SLOTS, np.int64),
            np.zeros(AMOUNT_SLOTS),
        )
        self._desk.amount[COMPUTE_LEFT] = compute_s.sum()
        self._desk.amount[MEMORY_LEFT] = memory_s.sum()
        floor_tokens = cost.linear_floor_s / cost.linear_s_per_token
        self._desk.amount[TOKEN_S] = cost.linear_s_per_token
        self._desk.amount[KV_TOKEN_S] = cost.decode_s_per_kv_token
        self._desk.amount[LEAST_TOKENS] = max(float(LEAST_STEP_TOKENS), floor_tokens)
        self._desk.number[MAX_STEP] = max_step_tokens
        self._desk.number[DIRTY] = 1
        weigh_short(self._ends, self._desk)
        self._desk.number[LONG_FROM] = _long_from(order.requests, lengths.mean)
        self._tree = tree
        self._cost = cost
        self._square = lengths.square.copy()
        self._group = lengths.group
        self._learner = LengthLearner(lengths)
        self._timeline = empty_timeline(float(min(capacity_tokens, lengths.mean.max() * 1.5)))

    @property
    def finished_count(self) -> int:
        """Requests that ended."""
        return int(self._ends.cursor[DONE_COUNT])

    def plan(self, view: BatchView) -> StepPlan:
        """Fill memory from the right, fill the step from the left."""
        if len(view.finished) or len(view.retracted) or len(view.refused):
            returned = np.concatenate([view.retracted, view.refused])
            look = len(view.finished) > 0 and self._observe(view)
            settle_books(self._ends, self._desk, view.finished, returned)
            if look:
                self._correct(view.step_index)
        number = self._desk.number
        number[STEP] = view.step_index
        number[DECODING] = view.decoding_count
        number[PREFILLING] = view.prefilling_count
        number[PENDING] = view.pending_prefill_tokens
        number[LOGICAL] = view.logical_kv_tokens
        number[PHYSICAL] = view.physical_kv_tokens
        number[CAPACITY] = view.capacity_tokens
        _plan(self._ends, self._desk, self._timeline)
        return StepPlan(self._desk.admitted[: number[ADMITTED]].copy(), int(number[BUDGET]))

    def _observe(self, view: BatchView) -> bool:
        """Tell the learner what ended; True when it is time to look."""
        tokens = view.finished_tokens.astype(np.int64)
        if len(tokens) != len(view.finished):
            ran = view.step_index - self._desk.admitted_at[view.finished]
            tokens = np.maximum(1, ran + self._desk.generated[view.finished])
        return self._learner.observe(view.finished, tokens)

    def _correct(self, step: int) -> None:
        """Correct the estimates of pooled requests, and sort the rest of the pool anew.

        Running requests keep their estimate (their ramps extend themselves), so what was booked
        for them is booked off again unchanged.
        """
        desk, ends = self._desk, self._ends
        running = desk.running_long[: desk.number[LONG_COUNT]]
        generated = desk.generated[running] + np.maximum(0, step - desk.admitted_at[running])
        corrected = self._learner.corrected(desk.mean, self._square, running, generated)
        if corrected is None:
            return
        pooled = ends.where == POOLED
        desk.mean[pooled] = corrected[0][pooled]
        self._square[pooled] = corrected[1][pooled]
        lengths = LengthEstimate(desk.mean, self._square, desk.exact, self._group)
        resources = weigh(self._tree, lengths, self._cost)
        order = blend_order(self._tree, resources)
        compute = np.empty(len(pooled))
        compute[order.requests] = charged(self._tree, resources.fresh_compute_s, order.requests)
        desk.compute[pooled] = compute[pooled]
        desk.memory[pooled] = resources.leaf_memory_s[pooled]
        ends.reserved[pooled] = self._tree.prompt_tokens[pooled] + np.ceil(desk.mean[pooled])
        keep = pooled[order.requests]
        waiting = order.requests[keep]
        ends.order[: len(waiting)] = waiting
        ends.unit_of[: len(waiting)] = order.unit_of[keep]
        self._ends = ends._replace(unit_density=order.unit_density)
        ends.cursor[FRONT], ends.cursor[BACK] = 0, len(waiting) - 1
        # Handed-back requests are pooled and thus in the order again.
        ends.cursor[LEFT_RETRIES] = ends.cursor[RIGHT_RETRIES] = 0
        ends.stacked[:] = 0
        desk.number[LONG_FROM] = _long_from(waiting, desk.mean)
        desk.number[DIRTY] = 1
        desk.amount[COMPUTE_LEFT] = desk.compute[pooled].sum()
        desk.amount[MEMORY_LEFT] = desk.memory[pooled].sum()
        weigh_short(self._ends, desk)


def _long_from(requests: Int32s, mean: Floats) -> int:
    """First place of the order behind which all requests are long."""
    short = np.flatnonzero(mean[requests] <= LONG_TOKENS)
    return int(short[-1]) + 1 if len(short) else 0


@compiled
def _pace(desk: ForesightState) -> float:
    """Compute per memory time that a step aims for."""
    compute = desk.amount[COMPUTE_LEFT] + desk.amount[RUNNING_COMPUTE]
    memory = desk.amount[MEMORY_LEFT] + desk.amount[RUNNING_MEMORY]
    if memory <= 0.0:
        return 1e9
    excess = float(max(0.0, compute) / memory) - 1.0
    return 1.0 + min(PACE_MARGIN, max(-PACE_MARGIN, excess))


@compiled
def _long_waits(ends: DualScanner, desk: ForesightState) -> bool:
    """Whether a long request is still pooled at the right end."""
    cursor = ends.cursor
    return bool(
        cursor[BACK] >= max(desk.number[LONG_FROM], cursor[FRONT]) or cursor[RIGHT_RETRIES] > 0
    )


@compiled
def _spread(ends: DualScanner, desk: ForesightState, pace: float) -> float:
    """Tokens per step beyond the pace that use up compute while the tail of long requests lasts.

    Once no long request waits, the steps to come are counted: as many as the longest one that runs
    has left. Compute that the tail will not need to hide its memory time is spent evenly over
    these steps: that hides as much as keeping it for the end, and saves the end's steps, each of
    which reads the weights.
    """
    number, amount = desk.number, desk.amount
    if _long_waits(ends, desk) or amount[STEPS_LEFT] <= 0.0:
        return 0.0
    elapsed = number[STEP] - number[BUILT_AT]
    spare = amount[COMPUTE_LEFT] - pace * (amount[MEMORY_LEFT] + amount[RUNNING_MEMORY])
    steps = max(1.0, amount[STEPS_LEFT] - elapsed)
    return float(max(0.0, SPREAD_SHARE * spare) / amount[TOKEN_S] / steps)


@compiled
def _shorter_that_fits(
    ends: DualScanner, desk: ForesightState, timeline: Timeline, room: float
) -> int:
    """The rightmost pooled long request whose ramp fits, if the very next one does not.

    Long requests at the right end run from long to short when lengths are known, so bisection
    finds the place; a few neighbours are tried because holes and several units disturb the order.
    """
    low, high = max(desk.number[LONG_FROM], ends.cursor[FRONT]), ends.cursor[BACK]
    while low < high:
        middle = (low + high + 1) // 2
        held, left = ramp(desk, ends.order[middle])
        if peak_with(timeline, held, left) <= room:
            low = middle
        else:
            high = middle - 1
    tried = 0
    place = low
    while place >= max(desk.number[LONG_FROM], ends.cursor[FRONT]) and tried < NEIGHBOURS:
        request = ends.order[place]
        if ends.where[request] == POOLED:
            held, left = ramp(desk, request)
            if peak_with(timeline, held, left) <= room:
                return int(request)
            tried += 1
        place -= 1
    return NONE


@compiled
def _budget(ends: DualScanner, desk: ForesightState, pace: float) -> int:
    """Tokens of the step: what hides the smaller resource, and what can be spared beyond."""
    number, amount = desk.number, desk.amount
    most = float(number[MAX_STEP])
    hidden = pace * amount[KV_TOKEN_S] / amount[TOKEN_S] * (number[LOGICAL] + number[DECODING])
    if pace > 1.0 and number[LONG_COUNT] == 0 and not _long_waits(ends, desk):
        # Nothing holds the memory for long: contexts follow the pace, and any pace would do.
        hidden = most
    elif pace > 1.0:
        hidden += _spread(ends, desk, pace)
    budget = int(min(most, max(hidden, amount[LEAST_TOKENS])))
    return int(max(budget, number[DECODING] + 1))


@compiled
def _next_for_memory(
    ends: DualScanner, desk: ForesightState, timeline: Timeline, usable: float
) -> int:
    """The right end's next request that has room now and later, or NONE."""
    number, amount = desk.number, desk.amount
    request = next_right(ends)
    if request == NONE or number[LONG_COUNT] >= MOST_LONG:
        return NONE
    if desk.mean[request] <= LONG_TOKENS:
        grown = number[PHYSICAL] + desk.fresh[request] + desk.mean[request]
        grown += amount[LEFT_OUTPUT] / 2 + amount[LEFT_NEED]
        return request if grown <= usable and number[PENDING] <= 2 * number[BUDGET] else NONE
    room = usable - min(amount[LEFT_NEED], usable / 2)
    held, left = ramp(desk, request)
    if peak_with(timeline, held, left) > room:
        request = _shorter_that_fits(ends, desk, timeline, room)
    if request == NONE or number[PHYSICAL] + desk.fresh[request] > usable:
        return NONE
    return request


@compiled
def _next_for_step(
    ends: DualScanner, desk: ForesightState, timeline: Timeline, usable: float
) -> int:
    """The left end's next request that has room now and while it lives, or NONE."""
    number = desk.number
    request = next_left(ends)
    if request == NONE:
        return NONE
    if desk.mean[request] > LONG_TOKENS:
        held, left = ramp(desk, request)
        if number[LONG_COUNT] >= MOST_LONG or peak_with(timeline, held, left) > usable:
            return NONE
    grown = number[PHYSICAL] + desk.fresh[request] + desk.mean[request]
    horizon = max(float(LEAST_HORIZON_STEPS), desk.amount[LEFT_STEPS])
    grown += desk.amount[LEFT_OUTPUT] / 2 + number[LONG_COUNT] * horizon
    return request if grown <= usable else NONE


@compiled
def _plan(ends: DualScanner, desk: ForesightState, timeline: Timeline) -> None:
    """Decide the step: BUDGET and the admitted requests."""
    number, amount = desk.number, desk.amount
    number[ADMITTED] = 0
    pace = _pace(desk)
    due = number[DIRTY] != 0 or number[STEP] - number[BUILT_AT] >= REBUILD_STEPS
    if due:
        full = max(1.0, pace) * amount[KV_TOKEN_S] / amount[TOKEN_S] * number[CAPACITY]
        rebuild(ends, desk, timeline, min(float(number[MAX_STEP]), full))
    number[BUDGET] = _budget(ends, desk, pace)
    usable = number[CAPACITY] * (1.0 - MEMORY_MARGIN)
    # The right end fills the memory. While a long request waits there, only a new forecast can
    # have changed the answer.
    right_open = due or ends.cursor[RIGHT_RETRIES] > 0 or not _long_waits(ends, desk)
    while right_open and number[ADMITTED] < LONGEST_ADMISSION:
        request = _next_for_memory(ends, desk, timeline, usable)
        if request == NONE:
            break
        admit(ends, desk, timeline, request, RIGHT)
    # The left end fills the step.
    room = number[BUDGET] - number[DECODING]
    while number[PENDING] < room and number[ADMITTED] < LONGEST_ADMISSION:
        request = _next_for_step(ends, desk, timeline, usable)
        if request == NONE:
            break
        admit(ends, desk, timeline, request, LEFT)
    if number[ADMITTED] + number[DECODING] + number[PREFILLING] == 0:
        request = next_right(ends)
        if request != NONE:
            admit(ends, desk, timeline, request, RIGHT)
        else:
            request = next_left(ends)
            if request != NONE:
                admit(ends, desk, timeline, request, LEFT)
