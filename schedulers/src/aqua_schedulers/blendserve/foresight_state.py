"""The books of `foresight`: every request, the engine's counters, and the forecast of memory.

Flat arrays and compiled functions, because they are read and written at every engine step. What
they promise: sums over pooled requests equal the sum of their parts at any time, a request counts
as pooled or as running and never as both, and the forecast holds exactly the long requests that
run. What they do not do: decide.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqua_schedulers.blendserve.dual_scanner import BACK, FRONT, POOLED, DualScanner, settle, take
from aqua_schedulers.blendserve.timeline import Timeline, add, remaining_tokens
from aqua_schedulers.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

LONGEST_ADMISSION: Final = 4096
"""Requests that one step may admit; a bound for the buffer, far above any step's need."""

LONG_TOKENS: Final = 1024
"""Requests expected to generate more are forecast one by one, shorter ones in sum."""

MOST_LONG: Final = 4096
"""Long requests that may run at once; a bound for the list of them."""

WINDOW: Final = 256
"""Left-end requests that are looked at to see how much memory the left end needs."""

# Slots of `ForesightState.number`: the run, then the engine's counters of this step.
STEP: Final = 0
LONG_COUNT: Final = 1
BUILT_AT: Final = 2
LONG_FROM: Final = 3
DIRTY: Final = 4
DECODING: Final = 5
PREFILLING: Final = 6
PENDING: Final = 7
LOGICAL: Final = 8
PHYSICAL: Final = 9
CAPACITY: Final = 10
MAX_STEP: Final = 11
BUDGET: Final = 12
ADMITTED: Final = 13
NUMBER_SLOTS: Final = 14

# Slots of `ForesightState.amount`: what is pooled, what runs, then the engine's rates.
COMPUTE_LEFT: Final = 0
MEMORY_LEFT: Final = 1
LEFT_NEED: Final = 2
LEFT_OUTPUT: Final = 3
RUNNING_COMPUTE: Final = 4
RUNNING_MEMORY: Final = 5
SHORT_TOKENS: Final = 6
SHORT_TOKEN_STEPS: Final = 7
STEPS_LEFT: Final = 8
TOKEN_S: Final = 9
KV_TOKEN_S: Final = 10
LEAST_TOKENS: Final = 11
LEFT_STEPS: Final = 12
AMOUNT_SLOTS: Final = 13


class ForesightState(NamedTuple):
    """What the policy knows of each request and of the run; arrays are changed in place.

    Attributes:
        prompt: Prompt tokens, shape (num_requests,).
        fresh: Prompt tokens that no earlier request of the order computes.
        mean: Expected output tokens.
        exact: Whether `mean` is exact.
        compute: Expected compute seconds, shared prefixes charged once.
        memory: Expected memory seconds.
        admitted_at: Step of the last admission.
        generated: Tokens generated before that, if it was retracted.
        running_long: Long requests that run, in any order; the first LONG_COUNT count.
        admitted: What this step admits; the first ADMITTED count.
        number, amount: The slots above.
    """

    prompt: Int64s
    fresh: Int64s
    mean: Floats
    exact: NDArray[np.bool_]
    compute: Floats
    memory: Floats
    admitted_at: Int64s
    generated: Int64s
    running_long: Int32s
    admitted: Int32s
    number: Int64s
    amount: Floats


@compiled
def settle_books(
    ends: DualScanner, desk: ForesightState, finished: Int32s, returned: Int32s
) -> None:
    """Book what ended and what was handed back."""
    number, amount = desk.number, desk.amount
    for request in finished:
        if desk.mean[request] <= LONG_TOKENS:
            amount[LEFT_OUTPUT] -= desk.mean[request]
        else:
            _forget_long(desk, request)
    for request in returned:
        ran = max(0, number[STEP] - desk.admitted_at[request])
        desk.generated[request] += ran
        amount[COMPUTE_LEFT] += desk.compute[request]
        amount[MEMORY_LEFT] += desk.memory[request]
        if desk.mean[request] <= LONG_TOKENS:
            amount[LEFT_OUTPUT] -= desk.mean[request]
            _weigh_one(desk, request, 1.0)
        else:
            _forget_long(desk, request)
    settle(ends, finished, returned)


@compiled
def _weigh_one(desk: ForesightState, request: int, sign: float) -> None:
    """Count a pooled short request in (or out): tokens it computes, and for how long it holds them.

    A request that finds its prefix cached holds its fresh tokens and its outputs only.
    """
    output, fresh = desk.mean[request], float(desk.fresh[request])
    desk.amount[SHORT_TOKENS] += sign * (fresh + output)
    desk.amount[SHORT_TOKEN_STEPS] += sign * (fresh * output + output * output / 2)


@compiled
def weigh_short(ends: DualScanner, desk: ForesightState) -> None:
    """Sum up the pooled short requests."""
    desk.amount[SHORT_TOKENS] = 0.0
    desk.amount[SHORT_TOKEN_STEPS] = 0.0
    for request in ends.order:
        if ends.where[request] == POOLED and desk.mean[request] <= LONG_TOKENS:
            _weigh_one(desk, request, 1.0)


@compiled
def _forget_long(desk: ForesightState, request: int) -> None:
    number = desk.number
    for index in range(number[LONG_COUNT]):
        if desk.running_long[index] == request:
            number[LONG_COUNT] -= 1
            desk.running_long[index] = desk.running_long[number[LONG_COUNT]]
            number[DIRTY] = 1
            return


@compiled
def admit(
    ends: DualScanner, desk: ForesightState, timeline: Timeline, request: int, end: int
) -> None:
    """Move a pooled request to the batch of this step."""
    take(ends, request, end)
    number, amount = desk.number, desk.amount
    desk.admitted_at[request] = number[STEP]
    amount[COMPUTE_LEFT] -= desk.compute[request]
    amount[MEMORY_LEFT] -= desk.memory[request]
    if desk.mean[request] <= LONG_TOKENS:
        amount[LEFT_OUTPUT] += desk.mean[request]
        _weigh_one(desk, request, -1.0)
    else:
        held, left = ramp(desk, request)
        add(timeline, held, left)
        desk.running_long[number[LONG_COUNT]] = request
        number[LONG_COUNT] += 1
        amount[RUNNING_COMPUTE] += desk.compute[request]
        amount[RUNNING_MEMORY] += desk.memory[request]
    desk.admitted[number[ADMITTED]] = request
    number[ADMITTED] += 1
    number[PENDING] += desk.fresh[request]
    number[PHYSICAL] += desk.fresh[request]


@compiled
def ramp(desk: ForesightState, request: int) -> tuple[float, float]:
    """Tokens that a long request holds at the present step, and tokens still to come."""
    ran = float(desk.generated[request])
    left = remaining_tokens(desk.mean[request], ran, desk.exact[request])
    return desk.prompt[request] + ran, left


@compiled
def rebuild(
    ends: DualScanner, desk: ForesightState, timeline: Timeline, full_step_tokens: float
) -> None:
    """Forecast anew: long requests one by one, and the memory that the left end needs.

    Args:
        full_step_tokens: Tokens per step that hide reading a full memory.
    """
    number, amount = desk.number, desk.amount
    timeline.level[:] = 0.0
    amount[RUNNING_COMPUTE] = 0.0
    amount[RUNNING_MEMORY] = 0.0
    amount[STEPS_LEFT] = 0.0
    for index in range(number[LONG_COUNT]):
        request = desk.running_long[index]
        ran = float(desk.generated[request] + number[STEP] - desk.admitted_at[request])
        left = remaining_tokens(desk.mean[request], ran, desk.exact[request])
        held = desk.prompt[request] + ran
        add(timeline, held, left)
        amount[STEPS_LEFT] = max(amount[STEPS_LEFT], left)
        share = left / (left + ran)
        amount[RUNNING_COMPUTE] += desk.compute[request] * share
        amount[RUNNING_MEMORY] += (held * left + left * left / 2) * amount[KV_TOKEN_S]
    amount[LEFT_NEED] = _left_need(ends, desk, full_step_tokens)
    number[BUILT_AT] = number[STEP]
    number[DIRTY] = 0


@compiled
def _left_need(ends: DualScanner, desk: ForesightState, full_step_tokens: float) -> float:
    """Memory that the left end needs to fill such steps.

    By what its requests hold, and for how long, per token that they compute.
    """
    amount = desk.amount
    tokens = 0.0
    outputs = 0.0
    token_steps = 0.0
    largest = 0.0
    seen = 0
    place = ends.cursor[FRONT]
    while place <= ends.cursor[BACK] and seen < WINDOW:
        request = ends.order[place]
        if ends.where[request] == POOLED:
            output = desk.mean[request]
            if output > LONG_TOKENS:
                break
            fresh = float(desk.fresh[request])
            tokens += fresh + output
            outputs += output
            token_steps += fresh * output + output * output / 2
            largest = max(largest, desk.prompt[request] + output)
            seen += 1
        place += 1
    # The rest of the left end will come while today's long requests still run, and may hold its
    # memory longer than the requests that are next: the dearer of the two counts.
    lasting = token_steps / max(1.0, tokens)
    if amount[SHORT_TOKENS] > 1.0:
        lasting = max(lasting, amount[SHORT_TOKEN_STEPS] / amount[SHORT_TOKENS])
    amount[LEFT_STEPS] = outputs / max(1, seen)
    return full_step_tokens * (1.0 + lasting) + largest if seen > 0 else 0.0
