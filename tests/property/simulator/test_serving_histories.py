"""Any trace on a small engine: every request is served, and memory is whole again at the end."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from aqua_schedulers.cfs import FairSettings, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.iteration import IterationTime

BLOCKS = 24


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    """Up to 25 requests that each fit alone, some with shared leading chunks."""
    arrivals = []
    for index in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, 200))
        chunks = draw(st.integers(0, prompt // 32))
        family = draw(st.integers(0, 2))
        arrivals.append(
            Arrival(
                str(index),
                draw(st.floats(0.0, 30.0)),
                prompt,
                draw(st.integers(1, 16 * BLOCKS - 200)),
                tuple(100 * family + chunk for chunk in range(chunks)),
                32 if chunks else 0,
            )
        )
    return arrivals


@settings(max_examples=150, deadline=None)
@given(
    arrivals=traces(),
    budget=st.integers(8, 300),
    in_flight=st.integers(1, 2),
    policy=st.sampled_from(list(PolicyName)),
    paged=st.booleans(),
)
def test_every_request_is_served_once_in_causal_order(
    arrivals: list[Arrival], budget: int, in_flight: int, policy: PolicyName, *, paged: bool
) -> None:
    engine = Engine(
        "e",
        EngineSettings(budget, max_num_seqs=6, steps_in_flight=in_flight, kv_bytes_per_token=1),
        IterationTime("t", lambda n: 0.01 + n * 1e-4, lambda _b: 0.0, lambda _c: 0.0),
        PagedMemory(BLOCKS, 16),
        PageStore("peer", 200, 1e4) if paged else None,
        policy_named(policy, FairSettings(slice_iterations=3)),
    )
    served = engine.run(arrivals)
    assert sorted(row.request_id for row in served) == sorted(one.request_id for one in arrivals)
    for row in served:
        assert row.arrival_s <= row.scheduled_s < row.first_token_s <= row.last_token_s
        assert (row.output_tokens == 1) == math.isnan(row.tpot_s)
    assert engine.memory.free_count == BLOCKS
    assert engine.store is None or engine.store.used_tokens == 0
    assert engine.busy_s <= max(row.last_token_s for row in served)
