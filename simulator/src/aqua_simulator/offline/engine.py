"""Runs an offline workload under an admission policy on a virtual clock.

Owns the loop between policy and kernel and the result's arithmetic. Promises: every request ends
exactly once, memory never exceeds the capacity, the same inputs give the same result bit by bit.
Does not measure the policy unless given a clock: virtual and real time never mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from jaxtyping import Float64, Shaped

from aqua_protocol.errors import CapacityError, ConfigError
from aqua_schedulers.admission import NO_REQUESTS, AdmissionPolicy, BatchView
from aqua_schedulers.compiled import snapshot
from aqua_simulator.offline.compiled_steps import steps_of
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.kernel import advance
from aqua_simulator.offline.state import Counters, fresh_state, handle
from aqua_simulator.offline.workload import OfflineWorkload


@dataclass(frozen=True, eq=False)
class OfflineResult:
    """What a run took and did.

    Attributes:
        end: Where the engine stood when the last request had ended, and its sums over the run.
        finish_s: When each request ended, shape (num_requests,).
        usage: Sums over some steps each, rows with the fields of `state.Usage`.
        policy_s: Real seconds of each call of the policy; empty unless it was measured.
    """

    end: Counters
    total_tokens: int
    finish_s: Float64[np.ndarray, " requests"]
    usage: Shaped[np.ndarray, " bins"]
    policy_s: Float64[np.ndarray, " steps"]

    @property
    def makespan_s(self) -> float:
        """Virtual time until the last request ended."""
        return self.end.now_s

    @property
    def tokens_per_s(self) -> float:
        """The paper's throughput: prompt and output tokens over the makespan."""
        return self.total_tokens / self.makespan_s

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again because their request was retracted."""
        return self.end.computed_tokens - (self.total_tokens - self.end.shared_tokens)

    @property
    def sharing(self) -> float:
        """Share of all tokens that prefix sharing saved; retracted requests do not count."""
        return self.end.shared_tokens / self.total_tokens


@dataclass(frozen=True, slots=True)
class Bound:
    """What no order can beat: perfect sharing, perfect overlap.

    Attributes:
        compute_s: (1 - s_o) T_comp.
        memory_s: T_mem.
        optimal_s: `overlapped(compute_s, memory_s)`: T_o with the engine's own interference.
    """

    compute_s: float
    memory_s: float
    optimal_s: float

    @property
    def density(self) -> float:
        """Compute density of the whole workload, rho(root)."""
        return self.compute_s / self.memory_s


def optimal(workload: OfflineWorkload, cost: StepCost) -> Bound:
    """T_o of the workload under a cost without floors.

    Source: BlendServe sections 2.4 and 5.2: the paper too puts the measured interference into T_o.
    """
    prompt, output, tree = workload.prompt_tokens, workload.output_tokens, workload.tree
    tokens = tree.distinct_tokens + int(output.sum())
    # Attention of a prompt tail after a shared head of h tokens: p^2 - h^2, node by node.
    end = tree.end_tokens.astype(float)
    squares = float((end**2 - (end - tree.edge_tokens) ** 2).sum())
    compute_s = cost.linear_s_per_token * tokens + cost.prefill_s_per_square_token * squares
    reads = float((prompt * output + output * (output + 1) / 2).sum())
    memory_s = cost.decode_s_per_kv_token * reads
    return Bound(compute_s, memory_s, cost.overlapped(compute_s, memory_s))


def run(
    workload: OfflineWorkload,
    policy: AdmissionPolicy,
    cost: StepCost,
    *,
    capacity_tokens: int,
    usage_stride: int = 100,
    clock: Callable[[], float] | None = None,
) -> OfflineResult:
    """Run every request of `workload` to its end.

    Args:
        capacity_tokens: KV tokens that fit in memory.
        usage_stride: Steps per row of `OfflineResult.usage`.
        clock: Real clock in seconds to measure the policy with.

    Raises:
        CapacityError: A request does not fit in memory even alone.
        ConfigError: The policy stalled: nothing runs and it admits nothing.
    """
    largest = int((workload.prompt_tokens + workload.output_tokens).max())
    if largest > capacity_tokens:
        raise CapacityError(
            f"a request needs {largest} KV tokens, memory holds {capacity_tokens}",
            remedy="Use a larger GPU, more tensor parallelism, or drop the request.",
        )
    state = fresh_state(workload, capacity_tokens)
    engine = handle(state)
    steps = None if clock else steps_of(policy, state, engine, cost, usage_stride)
    view = BatchView(capacity_tokens)
    policy_s: list[float] = []
    left = workload.request_count
    while left:
        if steps is not None:
            admit = steps(view)
        else:
            started = clock() if clock else 0.0
            plan = policy.plan(view)
            if clock:
                policy_s.append(clock() - started)
            admit = np.asarray(plan.admit, dtype=np.int32)
            advance(engine, admit, plan.token_budget, plan.until_event, cost, usage_stride)
        after = snapshot(Counters, state.counters)
        left = workload.request_count - after.done_count
        if after.is_stuck:
            raise ConfigError(
                f"the policy stalled with {after.done_count} of {workload.request_count} done",
                remedy="An idle engine must be given a request that fits.",
            )
        view.step_index = after.step
        view.now_s = after.now_s
        view.decoding_count = after.decoding_count
        view.prefilling_count = after.prefilling_count
        view.pending_prefill_tokens = after.pending_prefill_tokens
        view.logical_kv_tokens = after.logical_kv_tokens
        view.physical_kv_tokens = after.used_tokens
        # Slices only where there is something: most steps end nothing.
        view.finished = view.finished_tokens = view.retracted = view.refused = NO_REQUESTS
        if after.finished_count:
            view.finished = state.finished[: after.finished_count]
            view.finished_tokens = state.output[view.finished].astype(np.int32)
        if after.retracted_count:
            view.retracted = state.retracted[: after.retracted_count]
        if after.admitted_count < len(admit):
            view.refused = admit[after.admitted_count :]
    usage = cast("Shaped[np.ndarray, ' bins']", state.usage)
    return OfflineResult(
        end=after,
        total_tokens=workload.total_tokens,
        finish_s=state.finish_s,
        usage=usage[usage["step_count"] > 0],
        policy_s=np.asarray(policy_s),
    )
