"""What a plan will do, before it is done: steps on paper with the estimated lengths.

A virtual engine in the feed's place of a real one: decoding requests take a token per step (as many
steps as output tokens, as in the paper's Mem(r)), the rest of the budget goes to prompts in order
of admission, and a step takes
`max(c, m) + interference min(c, m)`. It serves the plan report (predicted time against the bound,
compute and memory over steps as in the paper's Figure 8) and gives the order of admission, which is
what `aqua-batch order` writes. It does not model floors, preemption or wrong estimates: those are
the simulator's business.

Source: BlendServe sections 2.3, 5.2 and 5.3.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32

from aqua_batch.engine import StepEvents
from aqua_batch.feed import BlendFeed
from aqua_protocol.errors import CapacityError
from aqua_schedulers.admission import AdmissionPolicy
from aqua_schedulers.blendserve import PrefixCacheModel, PreparedPool

INTERFERENCE: Final = 0.4
"""Alpha, between 0 and 1. The paper gives none; 0.4 puts its depth-first baseline where its figures
do. Doubled, predicted steps hide only a fifth of the smaller resource."""

SERIES_ROWS: Final = 1000
"""Rows of the usage series, whatever the number of steps: a picture shows no more. Doubled, it is
drawn from twice as many points."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A plan's course.

    Attributes:
        admitted: Requests in order of admission.
        makespan_s: Predicted time.
        optimal_s: T_o with the same interference.
        computed_prompt_tokens: Prompt tokens that were not shared.
        compute_s, memory_s: Mean per step, by row of the series.
        steps_per_row: Steps that a row stands for.
    """

    admitted: Int32[np.ndarray, " requests"]
    makespan_s: float
    optimal_s: float
    step_count: int
    computed_prompt_tokens: int
    compute_s: Float64[np.ndarray, " rows"]
    memory_s: Float64[np.ndarray, " rows"]
    steps_per_row: int


class _VirtualEngine:
    """Counts instead of computing."""

    def __init__(self, prepared: PreparedPool, capacity_tokens: int) -> None:
        self._cache = PrefixCacheModel(prepared.tree, capacity_tokens)
        self._cost = prepared.cost
        self.output_tokens = np.maximum(1, np.rint(prepared.lengths.mean)).astype(np.int64)
        self._prompt = prepared.tree.prompt_tokens
        self._waiting: deque[list[int]] = deque()  # request, tokens left, tokens present
        self._due: dict[int, list[int]] = {}
        self._primed: list[int] = []  # prompts done, first token in the next step
        self._decoding = 0
        self._context = 0
        self._step = 0
        self.admitted: list[int] = []
        self.computed_prompt_tokens = 0
        self.compute_s = 0.0
        self.memory_s = 0.0

    def submit(self, request: int) -> None:
        """Queue a prompt."""
        missing = self._cache.hold(request)
        self.computed_prompt_tokens += missing
        self._waiting.append([request, missing, int(self._prompt[request]) - missing])
        self.admitted.append(request)

    def step(self, token_budget: int) -> StepEvents:
        """Decode, then fill up with prompts."""
        self._step += 1
        started, self._primed = self._primed, []
        for request in started:
            self._decoding += 1
            self._context += int(self._prompt[request])
            due = self._step + int(self.output_tokens[request]) - 1
            self._due.setdefault(due, []).append(request)
        tokens, squares = self._decoding, 0.0
        self._context += self._decoding
        read = self._context
        room = max(1, token_budget - self._decoding)
        while self._waiting and (room > 0 or self._waiting[0][1] == 0):
            head = self._waiting[0]
            chunk = min(room, head[1])
            squares += (2.0 * head[2] + chunk) * chunk
            head[1] -= chunk
            head[2] += chunk
            room -= chunk
            tokens += chunk
            if head[1] > 0:
                break
            self._waiting.popleft()
            self._primed.append(head[0])
        finished = self._due.pop(self._step, [])
        for request in finished:
            self._cache.release(request)
            self._decoding -= 1
            self._context -= int(self._prompt[request] + self.output_tokens[request])
        cost = self._cost
        self.compute_s = cost.linear_s_per_token * tokens
        self.compute_s += cost.prefill_s_per_square_token * squares
        self.memory_s = cost.decode_s_per_kv_token * read
        return StepEvents(started, finished, [int(self.output_tokens[each]) for each in finished])


def _step_s(compute_s: float, memory_s: float) -> float:
    return max(compute_s, memory_s) + INTERFERENCE * min(compute_s, memory_s)


def forecast(
    prepared: PreparedPool,
    policy: AdmissionPolicy,
    *,
    capacity_tokens: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Forecast:
    """Run a prepared pool through a virtual engine.

    Args:
        on_progress: Called with the number of finished requests.

    Raises:
        CapacityError: A request does not fit in memory even alone.
    """
    largest = int(prepared.reserved_tokens.max())
    if largest > capacity_tokens:
        raise CapacityError(
            f"a request needs {largest} KV tokens, memory holds {capacity_tokens}",
            remedy="Lower its max_tokens, or plan for a larger GPU.",
        )
    engine = _VirtualEngine(prepared, capacity_tokens)
    feed = BlendFeed(policy, prepared.tree, engine, capacity_tokens=capacity_tokens)
    compute_series, memory_series = array("d"), array("d")
    now_s = 0.0
    while feed.left_count > 0:
        feed.step(now_s)
        compute, memory = engine.compute_s, engine.memory_s
        now_s += _step_s(compute, memory)
        compute_series.append(compute)
        memory_series.append(memory)
        if len(compute_series) % 256 == 0:
            on_progress(prepared.pool.request_count - feed.left_count)
    steps = len(compute_series)
    steps_per_row = -(-steps // SERIES_ROWS)
    # The bound of the lengths that were run, which are whole tokens.
    cost, output = prepared.cost, engine.output_tokens
    rounding = float((output - prepared.lengths.mean).sum())
    compute_s = prepared.resources.compute_s + cost.linear_s_per_token * rounding
    memory_s = float(cost.memory_s(prepared.tree.prompt_tokens, output.astype(np.float64)).sum())
    return Forecast(
        np.array(engine.admitted, np.int32),
        now_s,
        _step_s(compute_s, memory_s),
        steps,
        engine.computed_prompt_tokens,
        _means(compute_series, steps_per_row),
        _means(memory_series, steps_per_row),
        steps_per_row,
    )


def _means(values: array[float], steps_per_row: int) -> Float64[np.ndarray, " rows"]:
    """Means over stretches of steps; the last stretch may be shorter."""
    starts = np.arange(0, len(values), steps_per_row)
    sums = np.add.reduceat(np.frombuffer(values), starts)
    means: Float64[np.ndarray, " rows"] = sums / np.diff(np.append(starts, len(values)))
    return means
