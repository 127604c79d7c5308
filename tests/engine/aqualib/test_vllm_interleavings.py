"""200 histories of each mechanism, by seed: vLLM's real scheduler and ours, a simulated model.

See `harness.vllm_simulation`: whatever is in a slot that does not belong there changes an output.
The negative controls take away what each mechanism rests on, and outputs must change.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import pytest
from vllm.v1.core.sched.interface import PauseState

from aqua_protocol import ConfigError
from aqualib.engines.vllm import connector as connector_module
from aqualib.engines.vllm.options import LoadMode
from aqualib.engines.vllm.paging.kv_groups import KvGroup
from harness.vllm_disturbances import seeds, wrong
from harness.vllm_shapes import BLOCK_TOKENS, Shape, make_config, make_scheduler
from harness.vllm_simulation import SimulatedEngine

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

TURNS: Final = {"policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0}
GPU_DEFAULTS: Final = Shape(aqua=TURNS, depth=2, caches_prefixes=True, is_second_runner=True)
MOST_STEPS: Final = 6000


def finish(engine: SimulatedEngine) -> SimulatedEngine:
    for _ in range(MOST_STEPS):
        if engine.is_done:
            return engine
        engine.step()
    raise AssertionError("no end")


def lives(model: str, shape: Shape, drawn: range) -> list[SimulatedEngine]:
    config = make_config(model, shape)
    return [finish(SimulatedEngine(shape, seed, config)) for seed in drawn]


def total(engines: list[SimulatedEngine], name: str) -> int:
    return sum(getattr(engine.runner, name) for engine in engines)


SPOILED: Final = [
    Shape(TURNS, depth=depth, caches_prefixes=caches, is_second_runner=second, loss=0.05)
    for depth, caches, second in product((1, 2, 3), (False, True), (False, True))
]


@pytest.mark.parametrize("shape", SPOILED, ids=repr)
def test_a_lost_block_is_computed_again(model: str, shape: Shape) -> None:
    engines = lives(model, shape, seeds(len(SPOILED)))
    assert wrong(engines) == 0
    assert total(engines, "lost_blocks") > 20


@pytest.mark.parametrize(
    "shape", [shape for shape in SPOILED if shape.depth > 1 or shape.is_second_runner], ids=repr
)
def test_a_lost_block_of_a_load_within_the_step_is_not(
    model: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "load_mode", lambda *_: LoadMode.SYNC)
    assert wrong(lives(model, shape, range(10))) > 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["swap", "checkpoint"])
@pytest.mark.parametrize("caches", [False, True])
def test_rejected_drafts_are_not_kept(model: str, depth: int, mode: str, *, caches: bool) -> None:
    shape = Shape({**TURNS, "mode": mode}, depth=depth, drafts=3, caches_prefixes=caches)
    engines = lives(model, shape, seeds(4))
    assert wrong(engines) == 0
    assert total(engines, "loaded_blocks") > 500


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_pause_that_waits_ends_what_has_begun_and_begins_nothing(
    model: str, depth: int, load: str
) -> None:
    shape = Shape({**TURNS, "load": load}, depth=depth) if depth == 1 else Shape(TURNS, depth)
    config = make_config(model, shape)
    left_over = 0
    for seed in seeds(4):
        engine = SimulatedEngine(shape, seed, config)
        for _ in range(engine.rng.randrange(3, 40)):
            if not engine.is_done:
                engine.step()
        engine.drain()
        begun = {name for name, tokens in engine.outputs.items() if tokens}
        forced = engine.scheduler.forced_preemptions
        waiting = begun & {request.request_id for request in engine.scheduler.waiting}
        left_over += len(waiting)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for _ in range(MOST_STEPS):
            if not engine.scheduler.has_unfinished_requests():
                break
            engine.step()
        engine.drain()
        assert not engine.scheduler.has_unfinished_requests()
        assert engine.scheduler.forced_preemptions == forced, "turns were taken during the pause"
        ended = {name for name in begun if engine.outputs[name] == engine.expected[name]}
        assert ended == begun, "what has begun would go on under other weights"
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert wrong([finish(engine)]) == 0
    assert left_over > 20, "of what was preempted nothing was left for the pause"


def test_a_pause_that_keeps_all_moves_nothing(model: str) -> None:
    shape = Shape(TURNS, depth=2)
    config = make_config(model, shape)
    for seed in seeds(1):
        engine = SimulatedEngine(shape, seed, config)
        for _ in range(engine.rng.randrange(3, 40)):
            if not engine.is_done:
                engine.step()
        engine.drain()
        forced, tokens = engine.scheduler.forced_preemptions, dict(engine.outputs)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(10):
            assert not engine.scheduler.has_unfinished_requests()
            assert not engine.scheduler.schedule().num_scheduled_tokens
        assert (engine.scheduler.forced_preemptions, engine.outputs) == (forced, tokens)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert wrong([finish(engine)]) == 0


@pytest.mark.parametrize(
    "others", [("AquaConnector", "ExampleConnector"), ("ExampleConnector", "AquaConnector")]
)
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_among_several_connectors_it_pages_as_alone(
    model: str, others: tuple[str, ...], loss: float, tmp_path: Path
) -> None:
    shape = Shape(TURNS, depth=2, connectors=others, loss=loss, storage=str(tmp_path))
    engines = lives(model, shape, seeds(4))
    assert wrong(engines) == 0
    assert total(engines, "loaded_blocks") > 500
    forced = sum(engine.scheduler.forced_preemptions for engine in engines)
    assert forced > 100


def test_workers_with_stores_of_different_sizes(model: str) -> None:
    shape = Shape(TURNS, depth=2, caches_prefixes=True, store_blocks=(1000, 9, 40))
    engines = lives(model, shape, seeds(1))
    assert wrong(engines) == 0
    assert total(engines, "loaded_blocks") > 500
    assert {engine.scheduler.paging.table.capacity_blocks for engine in engines} == {9}


TIER: Final = Shape({"policy": "fcfs", "prefix_tier": True}, requests=24, turns=0.9, speed=0.1)
SAVING: Final = [
    replace(TIER, depth=2),
    replace(TIER, depth=2, is_second_runner=True, loss=0.05),
    replace(TIER, depth=2, store_blocks=(1000, 40)),
    replace(TIER, aqua={**TURNS, "prefix_tier": True}, depth=2, caches_prefixes=True),
    replace(TIER, aqua={**TURNS, "mode": "checkpoint"}, store_blocks=(40,), loss=0.05),
    replace(TIER, aqua={**TURNS, "mode": "checkpoint"}, depth=3, drafts=3, caches_prefixes=True),
]


@pytest.mark.parametrize("shape", SAVING, ids=repr)
def test_page_outs_beside_the_model_keep_what_was_computed(model: str, shape: Shape) -> None:
    engines = lives(model, shape, seeds(len(SAVING)))
    assert wrong(engines) == 0
    assert total(engines, "saved_blocks") > 200
    for engine in engines:
        engine.require_rest()


@pytest.mark.parametrize("depth", [1, 2])
def test_only_requests_of_one_cache_salt_share_blocks_of_the_tier(model: str, depth: int) -> None:
    # An eighth of the blocks may be on the way to the store: enough for a whole request.
    shape = replace(TIER, depth=depth, requests=0, blocks=80)
    engine = SimulatedEngine(shape, 0, make_config(model, shape))
    prompt = list(range(6 * BLOCK_TOKENS))
    hits = []
    for salt in ("one", "other", "one", None, None):
        engine.ask(prompt, 8, cache_salt=salt)
        finish(engine).require_rest()
        hits.append(engine.scheduler.paging.counts.prefix_hit_tokens)
    assert engine.outputs == engine.expected
    assert hits == [5 * BLOCK_TOKENS * earlier for earlier in (0, 0, 1, 1, 2)]


def test_page_outs_of_blocks_that_nobody_holds_do_not(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aqualib.engines.vllm.paging.async_page_out import AsyncPageOut

    class NoPool:
        blocks = range(1000)

        def touch(self, blocks: list[int]) -> None:
            """Hold nothing."""

        free_blocks = touch

    made = AsyncPageOut.__init__
    monkeypatch.setattr(
        AsyncPageOut, "__init__", lambda self, table, _, most: made(self, table, NoPool(), most)
    )
    assert wrong(lives(model, SAVING[0], range(10))) > 2


@pytest.mark.parametrize("shape", [GPU_DEFAULTS, SAVING[2]], ids=repr)
def test_a_reset_in_the_middle_brings_nothing_back(model: str, shape: Shape) -> None:
    config = make_config(model, shape)
    for seed in seeds(2):
        engine = SimulatedEngine(shape, seed, config)
        for _ in range(4):
            for _ in range(engine.rng.randrange(12)):
                if not engine.is_done:
                    engine.step()
            engine.drain()
            if not engine.scheduler.paging.loading_ids():
                # vLLM itself gives up over loads under way.
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                engine.change_weights()
        assert wrong([finish(engine)]) == 0


WINDOWS: Final = [
    Shape(TURNS, groups=("full", "window"), blocks=48),
    Shape(TURNS, depth=2, groups=("window", "full", "window"), blocks=60, loss=0.03),
    Shape(TURNS, depth=2, groups=("window",), blocks=12, loss=0.03),
    Shape(TURNS, depth=2, groups=("full", "wide"), blocks=40, caches_prefixes=True),
    Shape(TURNS, groups=("chunk", "full"), blocks=48, loss=0.03),
    Shape(TURNS, depth=2, drafts=3, groups=("full", "window"), blocks=48),
    Shape({**TURNS, "mode": "checkpoint"}, depth=2, groups=("full", "window"), blocks=48),
]
STATES: Final = [
    Shape(TURNS, groups=("full", "state"), blocks=32),
    Shape(TURNS, depth=2, groups=("state", "full", "state"), blocks=40, loss=0.03),
    Shape(TURNS, depth=2, groups=("states", "full"), blocks=36, caches_prefixes=True),
    Shape({**TURNS, "mode": "checkpoint"}, depth=2, groups=("full", "state", "window"), blocks=48),
]
TIERS: Final = [
    replace(TIER, depth=2, groups=("full", "window"), blocks=48),
    replace(TIER, depth=2, groups=("window",), blocks=18, loss=0.03),
    replace(TIER, depth=2, groups=("wide", "full"), blocks=40, caches_prefixes=True),
]


@pytest.mark.parametrize("shape", [*WINDOWS, *STATES, *TIERS], ids=repr)
def test_groups_of_blocks_come_back_as_they_were(model: str, shape: Shape) -> None:
    engines = lives(model, shape, seeds(len(TIERS)))
    assert wrong(engines) == 0
    assert total(engines, "loaded_blocks") > 100
    for engine in engines:
        engine.require_rest()


def test_what_lies_behind_a_window_is_not_what_comes_back(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A window that is one block short of what the next token reads.
    short = replace(WINDOWS[0], loss=0.0)
    longer = KvGroup.first
    monkeypatch.setattr(
        KvGroup, "first", lambda self, tokens: longer(self, tokens) + (self.skipped is not None)
    )
    assert wrong(lives(model, short, range(10))) > 2


def test_loads_within_the_step_are_refused_where_they_are_not_exact(model: str) -> None:
    insisting = {**TURNS, "load": "sync"}
    for shape in (
        Shape(insisting, depth=2),
        Shape(insisting, is_second_runner=True),
        Shape(insisting, caches_prefixes=True),
    ):
        with pytest.raises(ConfigError, match="gives wrong tokens"):
            make_scheduler(make_config(model, shape), shape)
