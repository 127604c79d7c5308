"""Switches turned at random over vLLM's real scheduler: no output changes, and nothing is kept.

As in `test_vllm_interleavings`, 200 histories by seed; the model is simulated.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from aqualib.engines.vllm.operations.switches import Feature
from harness.vllm_disturbances import seeds
from harness.vllm_shapes import Shape, make_config
from harness.vllm_simulation import SimulatedEngine

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

TURNS: Final = {"policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0}
SHAPES: Final = [
    Shape(TURNS),
    Shape({**TURNS, "mode": "checkpoint"}, depth=2),
    Shape({**TURNS, "prefix_tier": True}, depth=2, caches_prefixes=True, requests=16, turns=0.8),
    Shape(TURNS, depth=2, caches_prefixes=True, is_second_runner=True, loss=0.05),
    Shape({**TURNS, "tenants": {"weights": {"a": 3.0}, "lead_tokens": 0}}, depth=2),
]


def turn(engine: SimulatedEngine, **change: bool) -> dict[str, Any]:
    """What the admin API sends."""
    answer: dict[str, dict[str, Any]] = engine.scheduler("change-switches", change)
    return answer["result"]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_switches_turned_at_any_step_change_no_output(model: str, shape: Shape) -> None:
    config = make_config(model, shape)
    forced = restored = without = 0
    for seed in seeds(len(SHAPES)):
        engine = SimulatedEngine(shape, seed, config)
        for _ in range(6000):
            if engine.is_done:
                break
            if engine.rng.random() < 0.1:
                feature = engine.rng.choice([Feature.SLICING, Feature.PAGING])
                turn(engine, **{feature.value: engine.rng.random() < 0.6})
            switches = engine.scheduler.switches
            before = engine.scheduler.forced_preemptions
            engine.step()
            if not switches.is_on(Feature.SLICING):
                assert engine.scheduler.forced_preemptions == before
            without += not switches.is_on(Feature.PAGING)
        assert engine.is_done
        assert engine.outputs == engine.expected, seed
        turn(engine, paging=False)
        engine.settle()
        table = engine.scheduler.paging.table
        table.audit()
        assert not len(table), "what no request needs is dropped"
        forced += engine.scheduler.forced_preemptions
        restored += engine.runner.loaded_blocks
    assert forced > 20
    assert restored > 100
    assert without > 100


def test_what_was_saved_before_paging_is_off_comes_back_by_loads(model: str) -> None:
    shape = Shape(TURNS)
    config = make_config(model, shape)
    restored = 0
    for seed in range(20):
        engine = SimulatedEngine(shape, seed, config)
        while not engine.is_done and not engine.scheduler.paging.table.held_count:
            engine.step()
        saved = engine.scheduler.paging.counts.saved_blocks
        turn(engine, paging=False)
        before = engine.runner.loaded_blocks
        while not engine.is_done:
            engine.step()
        assert engine.outputs == engine.expected
        assert engine.scheduler.paging.counts.saved_blocks == saved, "nothing more is paged out"
        assert not len(engine.scheduler.paging.table)
        restored += engine.runner.loaded_blocks - before
    assert restored > 20


def test_without_turns_requests_are_admitted_as_by_vllm_itself(model: str) -> None:
    shape = Shape(TURNS)
    config = make_config(model, shape)
    stock = make_config(model, Shape({**TURNS, "policy": "fcfs"}))
    for seed in range(20):
        engine, other = (SimulatedEngine(shape, seed, each) for each in (config, stock))
        turn(engine, slicing=False)
        while not engine.is_done:
            engine.step()
            other.step()
            assert engine.outputs == other.outputs, "token by token, step by step"
        assert other.is_done
