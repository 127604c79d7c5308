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
  fits under all others' (`Timeline`), leaving what the left end needs to keep the pace. If the next
  long request does not fit, a shorter one behind it may: this fills the start.
- Where lengths are estimates, what is observed corrects them (`length_learner`), and the rest of
  the pool is sorted anew when a correction changes which end requests belong to.

Source: BlendServe section 2.4 for the bound; the rest is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve.dual_scanner import (
    LEFT,
    MAX_ADMITTED,
    NONE,
    POOLED,
    RIGHT,
    DualScanner,
    next_request,
    open_scanner,
)
from aqua_schedulers.blendserve.foresight_state import (
    LONG_TOKENS,
    MAX_LONG,
    ForesightState,
    Timeline,
    Totals,
    admit,
    empty_timeline,
    forecast_again,
    peak_with,
    ramp,
    settle_state,
    sum_short,
)
from aqua_schedulers.blendserve.length_learner import LengthLearner
from aqua_schedulers.blendserve.lengths import LengthEstimate
from aqua_schedulers.blendserve.order import blend_order, charged, weigh
from aqua_schedulers.compiled import compiled, compiled_part, record

if TYPE_CHECKING:
    from aqua_schedulers.blendserve.preparation import PreparedPool

FORECAST_STEPS: Final = 64
"""The forecast is made anew after so many steps, or when a long request came or went. Doubled, it
costs half as much and memory is filled a little later."""

LEAST_STEP_TOKENS: Final = 32
"""Smallest step where reading the weights costs nothing; it keeps prompts moving while contexts
are short. Where it does cost (`ResourceCost.linear_floor_s`), steps below its worth in tokens are
never planned. Doubled, the first steps of a run hide less compute."""

SPREAD_SHARE: Final = 0.8
"""Part of the spare compute to spread over the tail; the rest covers tails that last longer than
they were expected to. At 1 such tails run out of compute to hide behind their memory time; at half
the value the end's steps, each of which reads the weights, are twice as many."""

PACE_MARGIN: Final = 0.05
"""How far the pace goes from 1 towards what remains. Enough that steps which miss their pace by a
little still hide the smaller resource; and little, because an estimate that has the wrong sign
costs as much of the smaller resource as the pace is wrong by: doubled, twice as much."""

LEAST_HORIZON_STEPS: Final = 8
"""A left-end request lives at least so many steps; meanwhile every long request grows by as much.
Doubled, a few more tokens of memory stay free."""

MEMORY_MARGIN: Final = 0.02
"""Share of the memory left to what a forecast in buckets and means cannot see: about what runs with
exact lengths need to retract nothing. Doubled, that share of the memory more stays unused."""

NEIGHBOURS: Final = 8
"""Requests that are tried beside the one that bisection finds. Doubled, a full memory costs twice
the forecasts in every step that looks."""


class ForesightBlend:
    """The default policy over a pool; KV memory and each step hold so many tokens at most."""

    def __init__(
        self, prepared: PreparedPool, *, capacity_tokens: int, max_step_tokens: int
    ) -> None:
        order, lengths, cost = prepared.order, prepared.lengths, prepared.cost
        compute_s, memory_s = prepared.compute_s, prepared.resources.leaf_memory_s
        count = len(order.requests)
        floor_tokens = cost.linear_floor_s / cost.linear_s_per_token
        self._scanner = open_scanner(order, prepared.reserved_tokens)
        totals = Totals(
            max_step_tokens=max_step_tokens,
            linear_s_per_token=cost.linear_s_per_token,
            decode_s_per_kv_token=cost.decode_s_per_kv_token,
            least_step_tokens=max(float(LEAST_STEP_TOKENS), floor_tokens),
            pooled_compute_s=compute_s.sum(),
            pooled_memory_s=memory_s.sum(),
            long_from=_long_from(order.requests, lengths.mean),
        )
        self._state = ForesightState(
            prepared.tree.prompt_tokens,
            prepared.fresh_tokens,
            lengths.mean.copy(),
            lengths.exact,
            compute_s.copy(),
            memory_s.copy(),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(MAX_LONG, np.int32),
            np.zeros(MAX_ADMITTED, np.int32),
            record(totals),
        )
        sum_short(self._scanner, self._state)
        self._tree = prepared.tree
        self._cost = cost
        self._square = lengths.square.copy()
        self._group = lengths.group
        self._learner = LengthLearner(lengths)
        self._timeline = empty_timeline(float(min(capacity_tokens, lengths.mean.max() * 1.5)))

    @property
    def compiled_state(self) -> tuple[DualScanner, ForesightState, Timeline]:
        """What `plan_foresight` takes first; another one after `settle`."""
        return self._scanner, self._state, self._timeline

    @property
    def until_look(self) -> int:
        """Requests that may finish until estimates are looked at, with the one at which they are.

        So many less one may be settled by compiled code (`settle_state`) and noted later.
        """
        return self._learner.until_look

    def note(
        self, finished: Int32[np.ndarray, " finished"], tokens: Int64[np.ndarray, " finished"]
    ) -> None:
        """Learn from requests that finished with so many tokens, and were settled already."""
        assert not self._learner.observe(finished, tokens), "estimates were to be looked at"

    def settle(self, view: BatchView) -> None:
        """Book what happened since the last step was planned, and learn from it."""
        if view.has_events:
            returned = np.concatenate([view.retracted, view.refused])
            look = len(view.finished) > 0 and self._observe(view)
            settle_state(self._scanner, self._state, view.finished, returned)
            if look:
                self._correct(view.step_index)

    def plan(self, view: BatchView) -> StepPlan:
        """Fill memory from the right, fill the step from the left."""
        self.settle(view)
        admitted_count, token_budget = plan_foresight(
            self._scanner,
            self._state,
            self._timeline,
            view.step_index,
            view.decoding_count,
            view.prefilling_count,
            view.pending_prefill_tokens,
            view.logical_kv_tokens,
            view.physical_kv_tokens,
            view.capacity_tokens,
        )
        return StepPlan(self._state.admitted[:admitted_count].copy(), token_budget)

    def _observe(self, view: BatchView) -> bool:
        """Tell the learner what ended; True when it is time to look."""
        tokens = view.finished_tokens.astype(np.int64)
        if len(tokens) != len(view.finished):
            ran = view.step_index - self._state.admitted_at[view.finished]
            tokens = np.maximum(1, ran + self._state.generated[view.finished])
        return self._learner.observe(view.finished, tokens)

    def _correct(self, step: int) -> None:
        """Correct the estimates of pooled requests, and sort the rest of the pool anew.

        Running requests keep their estimate (their ramps extend themselves), so what was booked
        for them is booked off again unchanged.
        """
        state, scanner = self._state, self._scanner
        totals = state.totals[0]
        running = state.running_long[: totals.long_count]
        generated = state.generated[running] + np.maximum(0, step - state.admitted_at[running])
        corrected = self._learner.corrected(state.mean, self._square, running, generated)
        if corrected is None:
            return
        pooled = scanner.status == POOLED
        state.mean[pooled] = corrected[0][pooled]
        self._square[pooled] = corrected[1][pooled]
        lengths = LengthEstimate(state.mean, self._square, state.exact, self._group)
        resources = weigh(self._tree, lengths, self._cost)
        order = blend_order(self._tree, resources)
        compute = charged(self._tree, resources.fresh_compute_s, order.requests)
        state.compute[pooled] = compute[pooled]
        state.memory[pooled] = resources.leaf_memory_s[pooled]
        scanner.reserved[pooled] = self._tree.prompt_tokens[pooled] + np.ceil(state.mean[pooled])
        keep = pooled[order.requests]
        waiting = order.requests[keep]
        scanner.order[: len(waiting)] = waiting
        scanner.unit_of[: len(waiting)] = order.unit_of[keep]
        self._scanner = scanner._replace(unit_density=order.unit_density)
        left, right = scanner.ends
        left.place, right.place = 0, len(waiting) - 1
        # Handed-back requests are pooled and thus in the order again.
        left.retry_count = right.retry_count = 0
        scanner.is_stacked[:] = 0
        totals.long_from = _long_from(waiting, state.mean)
        totals.is_stale = 1
        totals.pooled_compute_s = state.compute[pooled].sum()
        totals.pooled_memory_s = state.memory[pooled].sum()
        sum_short(self._scanner, state)


def _long_from(
    requests: Int32[np.ndarray, " pooled"], mean: Float64[np.ndarray, " requests"]
) -> int:
    """First place of the order behind which all requests are long."""
    short = np.flatnonzero(mean[requests] <= LONG_TOKENS)
    return int(short[-1]) + 1 if len(short) else 0


@compiled_part
def _pace(state: ForesightState) -> float:
    """Compute per memory time that a step aims for."""
    totals = state.totals[0]
    compute = totals.pooled_compute_s + totals.running_compute_s
    memory = totals.pooled_memory_s + totals.running_memory_s
    if memory <= 0.0:
        return 1e9
    excess = float(max(0.0, compute) / memory) - 1.0
    return 1.0 + min(PACE_MARGIN, max(-PACE_MARGIN, excess))


@compiled_part
def _long_waits(scanner: DualScanner, state: ForesightState) -> bool:
    """Whether a long request is still pooled at the right end."""
    left, right = scanner.ends[LEFT], scanner.ends[RIGHT]
    return bool(right.place >= max(state.totals[0].long_from, left.place) or right.retry_count > 0)


@compiled_part
def _spread(scanner: DualScanner, state: ForesightState, pace: float) -> float:
    """Tokens per step beyond the pace that use up compute while the tail of long requests lasts.

    Once no long request waits, the steps to come are counted: as many as the longest one that runs
    has left. Compute that the tail will not need to hide its memory time is spent evenly over
    these steps: that hides as much as keeping it for the end, and saves the end's steps, each of
    which reads the weights.
    """
    totals = state.totals[0]
    if _long_waits(scanner, state) or totals.longest_steps <= 0.0:
        return 0.0
    elapsed = totals.step - totals.forecast_step
    spare = totals.pooled_compute_s - pace * (totals.pooled_memory_s + totals.running_memory_s)
    steps = max(1.0, totals.longest_steps - elapsed)
    return float(max(0.0, SPREAD_SHARE * spare) / totals.linear_s_per_token / steps)


@compiled_part
def _shorter_that_fits(
    scanner: DualScanner, state: ForesightState, timeline: Timeline, room: float
) -> int:
    """The rightmost pooled long request whose ramp fits, if the very next one does not.

    Long requests at the right end run from long to short when lengths are known, so bisection
    finds the place; a few neighbours are tried because holes and several units disturb the order.
    """
    lowest = max(state.totals[0].long_from, scanner.ends[LEFT].place)
    low, high = lowest, scanner.ends[RIGHT].place
    while low < high:
        middle = (low + high + 1) // 2
        held, left = ramp(state, int(scanner.order[middle]))
        if peak_with(timeline, held, left) <= room:
            low = middle
        else:
            high = middle - 1
    tried = 0
    place = low
    while place >= lowest and tried < NEIGHBOURS:
        request = int(scanner.order[place])
        if scanner.status[request] == POOLED:
            held, left = ramp(state, request)
            if peak_with(timeline, held, left) <= room:
                return request
            tried += 1
        place -= 1
    return NONE


@compiled_part
def _budget(scanner: DualScanner, state: ForesightState, pace: float) -> int:
    """Tokens of the step: what hides the smaller resource, and what can be spared beyond."""
    totals = state.totals[0]
    most = float(totals.max_step_tokens)
    hidden = pace * totals.decode_s_per_kv_token / totals.linear_s_per_token
    hidden *= totals.logical_kv_tokens + totals.decoding_count
    if pace > 1.0 and totals.long_count == 0 and not _long_waits(scanner, state):
        # Nothing holds the memory for long: contexts follow the pace, and any pace would do.
        hidden = most
    elif pace > 1.0:
        hidden += _spread(scanner, state, pace)
    budget = int(min(most, max(hidden, totals.least_step_tokens)))
    return int(max(budget, totals.decoding_count + 1))


@compiled_part
def _next_for_memory(
    scanner: DualScanner, state: ForesightState, timeline: Timeline, usable: float
) -> int:
    """The right end's next request that has room now and later, or NONE."""
    totals = state.totals[0]
    request = next_request(scanner, RIGHT)
    if request == NONE or totals.long_count >= MAX_LONG:
        return NONE
    if state.mean[request] <= LONG_TOKENS:
        grown = totals.physical_kv_tokens + state.fresh[request] + state.mean[request]
        grown += totals.left_output_tokens / 2 + totals.left_need_tokens
        keeps_up = totals.pending_prefill_tokens <= 2 * totals.token_budget
        return request if grown <= usable and keeps_up else NONE
    room = usable - min(totals.left_need_tokens, usable / 2)
    held, left = ramp(state, request)
    if peak_with(timeline, held, left) > room:
        request = _shorter_that_fits(scanner, state, timeline, room)
    if request == NONE or totals.physical_kv_tokens + state.fresh[request] > usable:
        return NONE
    return request


@compiled_part
def _next_for_step(
    scanner: DualScanner, state: ForesightState, timeline: Timeline, usable: float
) -> int:
    """The left end's next request that has room now and while it lives, or NONE."""
    totals = state.totals[0]
    request = next_request(scanner, LEFT)
    if request == NONE:
        return NONE
    if state.mean[request] > LONG_TOKENS:
        held, left = ramp(state, request)
        if totals.long_count >= MAX_LONG or peak_with(timeline, held, left) > usable:
            return NONE
    grown = totals.physical_kv_tokens + state.fresh[request] + state.mean[request]
    horizon = max(float(LEAST_HORIZON_STEPS), totals.left_steps)
    grown += totals.left_output_tokens / 2 + totals.long_count * horizon
    return request if grown <= usable else NONE


@compiled
def plan_foresight(  # noqa: PLR0913, PLR0917 - the counters of a `BatchView`
    scanner: DualScanner,
    state: ForesightState,
    timeline: Timeline,
    step: int,
    decoding_count: int,
    prefilling_count: int,
    pending_prefill_tokens: int,
    logical_kv_tokens: int,
    physical_kv_tokens: int,
    capacity_tokens: int,
) -> tuple[int, int]:
    """Decide the step; returns how many of `state.admitted` to admit, and the token budget."""
    totals = state.totals[0]
    totals.step = step
    totals.decoding_count = decoding_count
    totals.prefilling_count = prefilling_count
    totals.pending_prefill_tokens = pending_prefill_tokens
    totals.logical_kv_tokens = logical_kv_tokens
    totals.physical_kv_tokens = physical_kv_tokens
    totals.capacity_tokens = capacity_tokens
    totals.admitted_count = 0
    pace = _pace(state)
    due = totals.is_stale != 0 or totals.step - totals.forecast_step >= FORECAST_STEPS
    if due:
        full = max(1.0, pace) * totals.decode_s_per_kv_token / totals.linear_s_per_token
        full *= totals.capacity_tokens
        forecast_again(scanner, state, timeline, min(float(totals.max_step_tokens), full))
    totals.token_budget = _budget(scanner, state, pace)
    usable = totals.capacity_tokens * (1.0 - MEMORY_MARGIN)
    # The right end fills the memory. While a long request waits there, only a new forecast can
    # have changed the answer.
    right_open = due or scanner.ends[RIGHT].retry_count > 0 or not _long_waits(scanner, state)
    while right_open and totals.admitted_count < MAX_ADMITTED:
        request = _next_for_memory(scanner, state, timeline, usable)
        if request == NONE:
            break
        admit(scanner, state, timeline, request, RIGHT)
    # The left end fills the step.
    room = totals.token_budget - totals.decoding_count
    while totals.pending_prefill_tokens < room and totals.admitted_count < MAX_ADMITTED:
        request = _next_for_step(scanner, state, timeline, usable)
        if request == NONE:
            break
        admit(scanner, state, timeline, request, LEFT)
    if totals.admitted_count + totals.decoding_count + totals.prefilling_count == 0:
        side = RIGHT
        request = next_request(scanner, side)
        if request == NONE:
            side = LEFT
            request = next_request(scanner, side)
        if request != NONE:
            admit(scanner, state, timeline, request, side)
    return totals.admitted_count, totals.token_budget
