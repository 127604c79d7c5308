"""Any small pool under every policy: nothing lost, nothing twice, memory kept, sharing bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqua_protocol.decoders import DECODERS
from aqua_protocol.hardware import GPUS
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import OfflineResult, optimal, run
from aqua_simulator.offline.policies import OfflinePolicy, PlanSettings, policy_for
from aqua_simulator.offline.workload import OfflineWorkload

COST = StepCost.from_paper(DECODERS["Llama-3-8B"], GPUS["A100-80GB"], interference=0.4)


@st.composite
def workloads(draw: st.DrawFn) -> OfflineWorkload:
    """Pools of up to 40 requests over a random tree, some outputs known and long."""
    node_count = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(node_count)]
    tokens = draw(st.lists(st.integers(0, 60), min_size=node_count, max_size=node_count))
    request_count = draw(st.integers(1, 40))
    ends = [draw(st.integers(0, node_count - 1)) for _ in range(request_count)]
    own = draw(st.lists(st.integers(1, 80), min_size=request_count, max_size=request_count))
    outputs = [
        draw(st.one_of(st.integers(1, 20), st.integers(200, 1500))) for _ in range(request_count)
    ]
    return OfflineWorkload(
        PrefixTree.from_segments(
            np.array(parents + ends),
            np.array(tokens + own),
            np.arange(node_count, node_count + request_count),
        ),
        output_tokens=np.array(outputs),
        known_output=np.array([output >= 200 for output in outputs]),
    )


def serve(
    load: OfflineWorkload, name: OfflinePolicy, *, room: float, cost: StepCost = COST
) -> tuple[OfflineResult, int]:
    largest = int((load.prompt_tokens + load.output_tokens).max())
    capacity = int(largest * room) + 64
    plan = PlanSettings(capacity, sample_probability=0.2)
    return run(load, policy_for(name, load, cost, plan), cost, capacity_tokens=capacity), capacity


@pytest.mark.parametrize("name", list(OfflinePolicy))
@settings(max_examples=25, deadline=None)
@given(load=workloads(), room=st.floats(1.0, 8.0))
def test_every_request_ends_once_within_memory(
    name: OfflinePolicy, load: OfflineWorkload, room: float
) -> None:
    result, capacity = serve(load, name, room=room)
    assert np.all(result.finish_s > 0.0)
    assert result.finish_s.max() == result.makespan_s
    assert result.end.peak_resident_tokens <= capacity
    # Every token is computed, found in memory, or computed again; none is skipped.
    assert result.recomputed_tokens >= 0
    if result.end.retraction_count == 0:
        assert result.recomputed_tokens == 0


@pytest.mark.parametrize("name", list(OfflinePolicy))
@settings(max_examples=25, deadline=None)
@given(load=workloads(), room=st.floats(1.0, 8.0))
def test_no_policy_beats_the_bound_or_the_optimal_sharing(
    name: OfflinePolicy, load: OfflineWorkload, room: float
) -> None:
    result, _ = serve(load, name, room=room)
    bound = optimal(load, COST)
    assert result.makespan_s >= bound.optimal_s * (1 - 1e-9)
    assert result.end.shared_tokens <= load.prompt_tokens.sum() - load.tree.distinct_tokens


@settings(max_examples=25, deadline=None)
@given(load=workloads())
def test_depth_first_order_shares_all_there_is_when_memory_is_ample(load: OfflineWorkload) -> None:
    result, _ = serve(load, OfflinePolicy.DFS, room=200.0)
    assert result.sharing == pytest.approx(load.optimal_sharing)


@settings(max_examples=20, deadline=None)
@given(load=workloads(), room=st.floats(1.0, 4.0))
def test_a_run_repeats_itself_bit_by_bit(load: OfflineWorkload, room: float) -> None:
    first, _ = serve(load, OfflinePolicy.FORESIGHT, room=room)
    second, _ = serve(load, OfflinePolicy.FORESIGHT, room=room)
    assert first.makespan_s == second.makespan_s
    assert np.array_equal(first.finish_s, second.finish_s)
