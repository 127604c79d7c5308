"""What the foresight policy knows: every request, the sums over them, and the forecast of memory.

Flat arrays and compiled functions, because they are read and written at every engine step. What
they promise: sums over pooled requests equal the sum of their parts at any time, a request counts
as pooled or as running and never as both, and the forecast holds exactly the long requests that
run. What they do not do: decide.

The forecast is a `Timeline`. A decoding request's memory grows by one token per step until it ends:
a ramp. The sum of ramps is kept in a fixed number of buckets of steps, each holding the occupation
at the bucket's end, so adding a request and asking for the peak cost a few hundred additions,
whatever runs. A long request is admitted when its ramp fits under all others', where adding up
final lengths would leave half of the memory empty (ramps rarely peak together) and admitting by
present use would end in retractions. The peak is not below the true one when lengths are as
estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from aqua_schedulers.blendserve.dual_scanner import LEFT, POOLED, RIGHT, DualScanner, settle, take
from aqua_schedulers.compiled import compiled, compiled_part

LONG_TOKENS: Final = 1024
"""Requests expected to generate more tokens are forecast one by one, shorter ones in sum: by the
lengths of the paper's traces, chats end below it and videos begin above. Doubled, requests that
hold memory for a thousand steps are forecast as if they left at once."""

MAX_LONG: Final = 4096
"""Long requests that may run at once; a bound for the list of them, above any engine's
`max_num_seqs`. Doubled, the list takes 16 KiB more."""

WINDOW: Final = 256
"""Left-end requests that are looked at to see how much memory the left end needs: about a step's
worth of short prompts. Doubled, a forecast takes longer and notices a new kind of request later."""

BUCKET_COUNT: Final = 256
"""Buckets of a forecast: 256 additions cost a microsecond. Doubled, a forecast is twice as fine and
costs twice as much."""

OUTLIVED_SHARE: Final = 0.5
"""A request that outlived its estimate is expected to run for half of what it ran: lengths scatter
more than exponentially (video lengths, chat answers), so the longer one ran the more is to come.
Doubled, memory is kept free twice as long for requests that are about to end."""


@dataclass(slots=True)
class Totals:
    """Counters of the run, the engine's counters of this step, and sums over requests.

    Attributes:
        step: Index of the step that is planned.
        long_count: Long requests that run.
        forecast_step: Step of the last forecast.
        long_from: First place of the order behind which all requests are long.
        is_stale: 1 when a long request left since the last forecast.
        token_budget, admitted_count: The plan.
        pooled_compute_s, pooled_memory_s: Of all pooled requests.
        left_need_tokens: Memory that the left end needs to fill steps.
        left_output_tokens: Outputs expected of the short requests that run.
        left_steps: Steps that a request of the left end runs, on average.
        running_compute_s, running_memory_s: What the running long requests still take.
        short_tokens, short_token_steps: Tokens that pooled short requests compute, and for how
            many steps these are held.
        longest_steps: Steps that the longest running request has left.
        linear_s_per_token, decode_s_per_kv_token: The engine's coefficients.
        least_step_tokens: No step is planned with fewer.
    """

    max_step_tokens: int
    linear_s_per_token: float
    decode_s_per_kv_token: float
    least_step_tokens: float
    pooled_compute_s: float
    pooled_memory_s: float
    long_from: int
    is_stale: int = 1
    step: int = 0
    long_count: int = 0
    forecast_step: int = 0
    decoding_count: int = 0
    prefilling_count: int = 0
    pending_prefill_tokens: int = 0
    logical_kv_tokens: int = 0
    physical_kv_tokens: int = 0
    capacity_tokens: int = 0
    token_budget: int = 0
    admitted_count: int = 0
    left_need_tokens: float = 0.0
    left_output_tokens: float = 0.0
    left_steps: float = 0.0
    running_compute_s: float = 0.0
    running_memory_s: float = 0.0
    short_tokens: float = 0.0
    short_token_steps: float = 0.0
    longest_steps: float = 0.0


class ForesightState(NamedTuple):
    """Columns by request, and what goes with them; arrays are changed in place.

    Attributes:
        prompt: Prompt tokens.
        fresh: Prompt tokens that no earlier request of the order computes.
        mean: Expected output tokens.
        exact: Whether `mean` is exact.
        compute: Expected compute seconds, shared prefixes charged once.
        memory: Expected memory seconds.
        admitted_at: Step of the last admission.
        generated: Tokens generated before that, if it was retracted.
        running_long: Long requests that run, in any order; the first `long_count` count.
        admitted: What this step admits; the first `admitted_count` count.
        totals: One record.
    """

    prompt: Int64[np.ndarray, " requests"]
    fresh: Int64[np.ndarray, " requests"]
    mean: Float64[np.ndarray, " requests"]
    exact: Bool[np.ndarray, " requests"]
    compute: Float64[np.ndarray, " requests"]
    memory: Float64[np.ndarray, " requests"]
    admitted_at: Int64[np.ndarray, " requests"]
    generated: Int64[np.ndarray, " requests"]
    running_long: Int32[np.ndarray, " max_long"]
    admitted: Int32[np.ndarray, " max_admitted"]
    totals: Sequence[Totals]


class Timeline(NamedTuple):
    """The forecast of the memory in use.

    Attributes:
        level: Tokens held at the end of each bucket.
        span: Steps per bucket.
    """

    level: Float64[np.ndarray, " buckets"]
    span: int


def empty_timeline(longest_tokens: float) -> Timeline:
    """A timeline that reaches as far as a request of `longest_tokens`."""
    span = max(1, int(np.ceil(longest_tokens / BUCKET_COUNT)))
    return Timeline(np.zeros(BUCKET_COUNT), span)


@compiled
def add(timeline: Timeline, held: float, left: float) -> None:
    """Add a request that holds `held` tokens now and will generate `left` more."""
    level, span = timeline.level, timeline.span
    last = min(len(level), int(np.ceil(left / span)))
    for bucket in range(last):
        level[bucket] += held + min(left, float((bucket + 1) * span))


@compiled
def peak_with(timeline: Timeline, held: float, left: float) -> float:
    """Highest occupation during the life of a request that would be added now."""
    level, span = timeline.level, timeline.span
    last = min(len(level), int(np.ceil(left / span)))
    peak = 0.0
    for bucket in range(last):
        at_end = level[bucket] + held + min(left, float((bucket + 1) * span))
        peak = max(peak, at_end)
    return peak


@compiled_part
def remaining_tokens(estimate: float, generated: float, exact: bool) -> float:  # noqa: FBT001 - compiled code takes arguments by position
    """Tokens still to come, from the estimate and from what was generated already."""
    left = estimate - generated
    if not exact:
        left = max(left, OUTLIVED_SHARE * generated)
    return max(1.0, left)


@compiled
def settle_state(
    scanner: DualScanner,
    state: ForesightState,
    finished: Int32[np.ndarray, " finished"],
    returned: Int32[np.ndarray, " returned"],
) -> None:
    """Book what ended and what was handed back."""
    totals = state.totals[0]
    for request in finished:
        if state.mean[request] <= LONG_TOKENS:
            totals.left_output_tokens -= state.mean[request]
        else:
            _forget_long(state, request)
    for request in returned:
        ran = max(0, totals.step - state.admitted_at[request])
        state.generated[request] += ran
        totals.pooled_compute_s += state.compute[request]
        totals.pooled_memory_s += state.memory[request]
        if state.mean[request] <= LONG_TOKENS:
            totals.left_output_tokens -= state.mean[request]
            _count_short(state, int(request), 1.0)
        else:
            _forget_long(state, request)
    settle(scanner, finished, returned)


@compiled_part
def _count_short(state: ForesightState, request: int, sign: float) -> None:
    """Count a pooled short request in (or out): tokens it computes, and for how long it holds them.

    A request that finds its prefix cached holds its fresh tokens and its outputs only.
    """
    totals = state.totals[0]
    output, fresh = state.mean[request], float(state.fresh[request])
    totals.short_tokens += sign * (fresh + output)
    totals.short_token_steps += sign * (fresh * output + output * output / 2)


@compiled
def sum_short(scanner: DualScanner, state: ForesightState) -> None:
    """Sum up the pooled short requests."""
    totals = state.totals[0]
    totals.short_tokens = 0.0
    totals.short_token_steps = 0.0
    for request in scanner.order:
        if scanner.status[request] == POOLED and state.mean[request] <= LONG_TOKENS:
            _count_short(state, int(request), 1.0)


@compiled_part
def _forget_long(state: ForesightState, request: int) -> None:
    totals = state.totals[0]
    for index in range(totals.long_count):
        if state.running_long[index] == request:
            totals.long_count -= 1
            state.running_long[index] = state.running_long[totals.long_count]
            totals.is_stale = 1
            return


@compiled_part
def admit(
    scanner: DualScanner, state: ForesightState, timeline: Timeline, request: int, side: int
) -> None:
    """Move a pooled request to the batch of this step."""
    take(scanner, request, side)
    totals = state.totals[0]
    state.admitted_at[request] = totals.step
    totals.pooled_compute_s -= state.compute[request]
    totals.pooled_memory_s -= state.memory[request]
    if state.mean[request] <= LONG_TOKENS:
        totals.left_output_tokens += state.mean[request]
        _count_short(state, request, -1.0)
    else:
        held, left = ramp(state, request)
        add(timeline, held, left)
        state.running_long[totals.long_count] = request
        totals.long_count += 1
        totals.running_compute_s += state.compute[request]
        totals.running_memory_s += state.memory[request]
    state.admitted[totals.admitted_count] = request
    totals.admitted_count += 1
    totals.pending_prefill_tokens += state.fresh[request]
    totals.physical_kv_tokens += state.fresh[request]


@compiled_part
def ramp(state: ForesightState, request: int) -> tuple[float, float]:
    """Tokens that a long request holds at the present step, and tokens still to come."""
    ran = float(state.generated[request])
    left = remaining_tokens(state.mean[request], ran, state.exact[request])
    return state.prompt[request] + ran, left


@compiled_part
def forecast_again(
    scanner: DualScanner, state: ForesightState, timeline: Timeline, full_step_tokens: float
) -> None:
    """Forecast anew: long requests one by one, and the memory that the left end needs.

    Args:
        full_step_tokens: Tokens per step that hide reading a full memory.
    """
    totals = state.totals[0]
    timeline.level[:] = 0.0
    totals.running_compute_s = 0.0
    totals.running_memory_s = 0.0
    totals.longest_steps = 0.0
    for index in range(totals.long_count):
        request = state.running_long[index]
        ran = float(state.generated[request] + totals.step - state.admitted_at[request])
        left = remaining_tokens(state.mean[request], ran, state.exact[request])
        held = state.prompt[request] + ran
        add(timeline, held, left)
        totals.longest_steps = max(totals.longest_steps, left)
        share = left / (left + ran)
        totals.running_compute_s += state.compute[request] * share
        totals.running_memory_s += (held * left + left * left / 2) * totals.decode_s_per_kv_token
    totals.left_need_tokens = _left_need(scanner, state, full_step_tokens)
    totals.forecast_step = totals.step
    totals.is_stale = 0


@compiled_part
def _left_need(scanner: DualScanner, state: ForesightState, full_step_tokens: float) -> float:
    """Memory that the left end needs to fill such steps.

    By what its requests hold, and for how long, per token that they compute.
    """
    totals = state.totals[0]
    tokens = 0.0
    outputs = 0.0
    token_steps = 0.0
    largest = 0.0
    seen = 0
    place = scanner.ends[LEFT].place
    while place <= scanner.ends[RIGHT].place and seen < WINDOW:
        request = scanner.order[place]
        if scanner.status[request] == POOLED:
            output = state.mean[request]
            if output > LONG_TOKENS:
                break
            fresh = float(state.fresh[request])
            tokens += fresh + output
            outputs += output
            token_steps += fresh * output + output * output / 2
            largest = max(largest, state.prompt[request] + output)
            seen += 1
        place += 1
    # The rest of the left end will come while today's long requests still run, and may hold its
    # memory longer than the requests that are next: the dearer of the two counts.
    lasting = token_steps / max(1.0, tokens)
    if totals.short_tokens > 1.0:
        lasting = max(lasting, totals.short_token_steps / totals.short_tokens)
    totals.left_steps = outputs / max(1, seen)
    return full_step_tokens * (1.0 + lasting) + largest if seen > 0 else 0.0
