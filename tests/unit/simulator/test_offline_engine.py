"""The offline engine: arithmetic of a step, sharing, retraction, determinism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import CapacityError, ConfigError
from aqua_protocol.hardware import GPUS
from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import OfflineResult, optimal, run
from aqua_simulator.offline.workload import OfflineWorkload

COST = StepCost.from_paper(DECODERS["Llama-3-8B"], GPUS["A100-80GB"], interference=0.4)


def workload(prompts: Sequence[int], outputs: Sequence[int], *, shared: int = 0) -> OfflineWorkload:
    """Requests with prompts of their own after `shared` common tokens."""
    count = len(prompts)
    return OfflineWorkload(
        PrefixTree.from_segments(
            np.array([-1] + [0] * count), np.array([shared, *prompts]), np.arange(1, count + 1)
        ),
        output_tokens=np.array(outputs),
        known_output=np.zeros(count, dtype=bool),
    )


class InOrder:
    """Offers requests in order, all that are left, whatever the memory."""

    def __init__(self, count: int, *, budget: int, at_once: int = 64) -> None:
        self.left = list(range(count))
        self.budget = budget
        self.at_once = at_once
        self.finished: list[int] = []
        self.physical: list[int] = []

    def plan(self, view: BatchView) -> StepPlan:
        self.finished += view.finished.tolist()
        self.physical.append(view.physical_kv_tokens)
        self.left[:0] = [*view.refused.tolist(), *view.retracted.tolist()]
        running = view.decoding_count + view.prefilling_count
        if running and (len(view.refused) or len(view.retracted)):
            return StepPlan([], self.budget)
        admit, self.left = self.left[: self.at_once], self.left[self.at_once :]
        return StepPlan(admit, self.budget)


def serve(
    load: OfflineWorkload, *, capacity: int = 10_000, budget: int = 512, cost: StepCost = COST
) -> tuple[OfflineResult, InOrder]:
    policy = InOrder(load.request_count, budget=budget)
    return run(load, policy, cost, capacity_tokens=capacity), policy


def test_a_single_request_takes_what_the_formulas_say() -> None:
    load = workload([100], [10])
    result, _ = serve(load)
    bound = optimal(load, COST)
    assert result.end.compute_s == pytest.approx(bound.compute_s)
    assert result.end.memory_s == pytest.approx(bound.memory_s)
    # Prefill has nothing to hide behind, and each decode step overlaps its own two times.
    prefill = COST.linear_s_per_token * 100 + COST.prefill_s_per_square_token * 100**2
    decode = sum(
        COST.overlapped(COST.linear_s_per_token, COST.decode_s_per_kv_token * (100 + step))
        for step in range(1, 11)
    )
    assert result.makespan_s == pytest.approx(prefill + decode)
    assert result.end.step == 11


def test_chunked_prefill_costs_the_same_attention_as_one_piece() -> None:
    load = workload([1000], [1])
    whole, _ = serve(load, budget=2000)
    chunked, _ = serve(load, budget=100)
    assert chunked.end.compute_s == pytest.approx(whole.end.compute_s)
    assert chunked.end.step == whole.end.step + 9


def test_a_shared_prefix_is_computed_once_within_a_batch() -> None:
    load = workload([10] * 8, [2] * 8, shared=500)
    result, _ = serve(load)
    assert result.end.computed_tokens == 500 + 8 * (10 + 2)
    assert result.sharing == pytest.approx(load.optimal_sharing)
    assert load.optimal_sharing == pytest.approx(7 * 500 / load.total_tokens)


def test_a_prefix_evicted_between_its_users_is_computed_again() -> None:
    parent = np.array([-1, 0, 0, -1])
    tokens = np.array([500, 10, 10, 900])
    load = OfflineWorkload(
        PrefixTree.from_segments(parent, tokens, np.array([1, 3, 2])),
        output_tokens=np.array([2, 2, 2]),
        known_output=np.zeros(3, dtype=bool),
    )
    policy = InOrder(3, budget=2000, at_once=1)

    class OneByOne:
        def plan(self, view: BatchView) -> StepPlan:
            busy = view.decoding_count + view.prefilling_count
            return StepPlan([], 2000) if busy else policy.plan(view)

    tight = run(load, OneByOne(), COST, capacity_tokens=1000)
    assert tight.end.shared_tokens == 0
    policy.left = [0, 1, 2]
    roomy = run(load, OneByOne(), COST, capacity_tokens=5000)
    assert roomy.end.shared_tokens == 500


def test_retracted_requests_keep_their_tokens_and_all_requests_end_once() -> None:
    load = workload([50] * 20, [200] * 20)
    result, policy = serve(load, capacity=1500)
    assert result.end.retraction_count > 0
    assert result.recomputed_tokens > 0
    # The last step ends requests that the policy is not asked about any more.
    assert len(set(policy.finished)) == len(policy.finished)
    assert np.all(result.finish_s > 0.0)
    assert result.end.peak_resident_tokens <= 1500


def test_memory_in_use_never_exceeds_the_capacity_and_returns_to_nothing() -> None:
    load = workload([70] * 40, list(range(1, 41)), shared=100)
    result, policy = serve(load, capacity=900)
    assert max(policy.physical) <= 900
    assert result.end.peak_resident_tokens <= 900


def test_the_same_inputs_give_the_same_result_bit_by_bit() -> None:
    load = workload([30, 60, 90] * 20, [5, 50, 15] * 20, shared=40)
    first, _ = serve(load, capacity=1200)
    second, _ = serve(load, capacity=1200)
    assert first.makespan_s == second.makespan_s
    assert np.array_equal(first.finish_s, second.finish_s)
    assert np.array_equal(first.usage, second.usage)


def test_repeating_a_plan_until_an_event_changes_nothing() -> None:
    load = workload([30] * 5, [40] * 5)

    class Patient(InOrder):
        def plan(self, view: BatchView) -> StepPlan:
            return replace(super().plan(view), until_event=True)

    asked, patient = InOrder(5, budget=256), Patient(5, budget=256)
    one = run(load, asked, COST, capacity_tokens=10_000)
    other = run(load, patient, COST, capacity_tokens=10_000)
    assert one.makespan_s == pytest.approx(other.makespan_s)
    assert len(patient.physical) < len(asked.physical)


def test_a_request_larger_than_memory_is_refused_before_the_run() -> None:
    with pytest.raises(CapacityError, match="needs 150 KV tokens"):
        serve(workload([100], [50]), capacity=149)


def test_a_policy_that_admits_nothing_is_named_as_the_culprit() -> None:
    class Idle:
        def plan(self, view: BatchView) -> StepPlan:
            assert view.decoding_count == 0
            return StepPlan([], 128)

    with pytest.raises(ConfigError, match="stalled with 0 of 1"):
        run(workload([10], [10]), Idle(), COST, capacity_tokens=1000)


def test_usage_adds_up_to_the_run() -> None:
    result, _ = serve(workload([100] * 30, [30] * 30))
    assert result.usage["step_count"].sum() == result.end.step
    assert result.usage["compute_s"].sum() == pytest.approx(result.end.compute_s)
    assert result.usage["memory_s"].sum() == pytest.approx(result.end.memory_s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": np.array([0])}, "at least 1"),
        ({"known_output": np.array([0, 0])}, "known_output has 2 rows"),
    ],
)
def test_a_workload_whose_lengths_do_not_fit_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(workload([10], [10]), **change)
