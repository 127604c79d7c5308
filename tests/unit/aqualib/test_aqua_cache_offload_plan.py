"""The plan of an AquaCache: what is resident, what is offloaded, and that it fits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqua_protocol import ConfigError
from aqualib.engines.transformers.offload_plan import (
    STREAM_BUFFERS,
    LayerShape,
    OffloadPlan,
    plan_offload,
)

SHAPES = st.builds(
    LayerShape,
    batch=st.integers(1, 8),
    heads=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64, 128]),
    element_bytes=st.sampled_from([2, 4]),
    block_tokens=st.sampled_from([8, 64]),
    max_blocks=st.integers(1, 50),
)
SHAPE = LayerShape(batch=1, heads=2, head_dim=16, element_bytes=4, block_tokens=8, max_blocks=10)


@given(SHAPES, st.integers(1, 80), st.integers(0, 1 << 32))
def test_a_plan_fits_its_budget_or_is_refused_with_the_bytes_that_would_fit(
    shape: LayerShape, layer_count: int, budget_bytes: int
) -> None:
    try:
        plan = plan_offload(layer_count, shape, budget_bytes=budget_bytes)
    except ConfigError as error:
        needed_bytes = error.details["needed_bytes"]
        assert needed_bytes > budget_bytes
        plan = plan_offload(layer_count, shape, budget_bytes=needed_bytes)
        budget_bytes = needed_bytes
    assert plan.resident_bytes <= budget_bytes
    assert sorted((*plan.resident, *plan.offloaded)) == list(range(layer_count))


@given(SHAPES, st.integers(1, 80), st.integers(0, 1 << 32))
def test_one_more_resident_layer_would_exceed_the_budget(
    shape: LayerShape, layer_count: int, budget_bytes: int
) -> None:
    try:
        plan = plan_offload(layer_count, shape, budget_bytes=budget_bytes)
    except ConfigError:
        return
    if plan.offloaded:
        one_more = plan.resident_bytes + shape.layer_bytes - shape.tail_bytes
        assert one_more > budget_bytes


@given(st.integers(3, 80), st.integers(2, 100))
def test_a_limit_in_layers_counts_the_streaming_buffers(layers: int, resident: int) -> None:
    plan = plan_offload(layers, SHAPE, resident_layers=resident)
    if resident >= layers:
        assert plan.offloaded == ()
    else:
        assert len(plan.resident) == resident - STREAM_BUFFERS


@given(st.integers(3, 80), st.integers(2, 80))
def test_resident_layers_are_spread_evenly_between_offloaded_ones(
    layers: int, resident: int
) -> None:
    offloaded = plan_offload(layers, SHAPE, resident_layers=resident).offloaded
    distances = {after - before for before, after in pairwise((*offloaded, layers))}
    assert not distances or max(distances) - min(distances) <= 1


def test_upcoming_layers_are_those_a_decoder_visits_next_and_around_again() -> None:
    plan = OffloadPlan(resident=(1, 4), offloaded=(0, 2, 3, 5), resident_bytes=0)
    assert list(plan.upcoming(2)) == [3, 5, 0, 2]
    assert list(plan.upcoming(4)) == [5, 0, 2, 3]


@pytest.mark.parametrize("limits", [{}, {"budget_bytes": 1 << 30, "resident_layers": 3}])
def test_a_plan_needs_exactly_one_limit(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="exactly one limit"):
        plan_offload(4, SHAPE, **limits)


def test_a_single_buffer_cannot_stream() -> None:
    with pytest.raises(ConfigError, match="needs 2 buffers"):
        plan_offload(4, SHAPE, resident_layers=1)
