"""Steps of offline work are aborted between layers, and nobody's answer shows it.

By seed over `harness.vllm_simulation`, where a step that may be aborted is at random, beside all
that happens there otherwise; on a real vLLM whose layers ask for aborts at random; and on a real
server, where an online request arrives in the midst of a step that would never end by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from harness.step_aborts import keep_published
from harness.tiny_llama import write_tiny_llama
from harness.vllm_disturbances import lives, wrong
from harness.vllm_program import Scenario, run
from harness.vllm_shapes import Shape

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

SEEDS: Final = 8
SERVING: Final = {"ttft_s": 1000.0, "tpot_s": 60.0}
SWAP: Final = Shape(
    {"co_serving": SERVING, "policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0},
    requests=14,
    turns=0.5,
    speed=0.3,
    offline=0.8,
    aborts=0.4,
    caches_prefixes=True,
)
CHECKPOINT: Final = {**SWAP.aqua, "mode": "checkpoint"}
RECOMPUTE: Final = {**SWAP.aqua, "mode": "recompute"}
SHAPES: Final = [
    SWAP,
    replace(SWAP, caches_prefixes=False),
    replace(SWAP, depth=2),
    replace(SWAP, aqua=CHECKPOINT, loss=0.05),
    replace(SWAP, aqua=CHECKPOINT, depth=2, store_blocks=(40, 60, 50)),
    replace(SWAP, aqua=RECOMPUTE, depth=2, offline=1.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_whatever_is_aborted_every_output_is_right(model: str, shape: Shape) -> None:
    engines = lives(model, shape, range(SEEDS), disturbance=0.05)
    assert wrong(engines) == 0
    aborted = sum(engine.runner.aborted_steps for engine in engines)
    assert aborted > 20
    counted = sum(int(each.scheduler.co_serving.totals()["step_aborts"]) for each in engines)
    assert counted == aborted
    for engine in engines:
        paging = engine.scheduler.paging
        paging.table.audit()
        engine.settle()
        assert paging.table.held_count == 0
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "the null block alone is used"


@pytest.mark.parametrize("depth", [1, 2])
def test_published_blocks_of_aborted_steps_change_outputs(model: str, depth: int) -> None:
    shape = replace(SWAP, depth=depth)
    engines = lives(model, shape, range(4), begin=lambda each: keep_published(each.scheduler))
    assert wrong(engines) > 1


# --- A real vLLM -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, each of which may be the one in which a step stops."""
    return write_tiny_llama(tmp_path_factory.mktemp("deep-llama"), layers=4)


@pytest.fixture(scope="module")
def stock(deep: Path) -> dict[str, list[int]]:
    """What vLLM answers by itself, by the number of the request."""
    answer = run(Scenario(str(deep), output_tokens=60))
    return {name.partition("-")[2]: tokens for name, tokens in answer["tokens"].items()}


def aborted(deep: Path, mode: str = "checkpoint", **facts: Any) -> Scenario:  # noqa: ANN401 - fields
    aqua = {"co_serving": SERVING, "mode": mode, "is_offline": True, "store_bytes": "16MiB"}
    given: dict[str, Any] = {"aborted_layers": 0.15, "online_every": 3, **facts}
    return Scenario(
        str(deep),
        aqua=aqua,
        engine={"enable_prefix_caching": True},
        output_tokens=60,
        wave_at_step=30,
        **given,
    )


def same(answer: dict[str, Any], stock: dict[str, list[int]]) -> int:
    assert len(answer["tokens"]) == 2 * len(stock)
    return sum(stock[name.partition("-")[2]] == each for name, each in answer["tokens"].items())


@pytest.mark.parametrize(
    ("mode", "overlaps_steps"),
    [("checkpoint", False), ("checkpoint", True), ("swap", False), ("recompute", True)],
)
def test_a_real_engine_answers_as_if_nothing_was_aborted(
    deep: Path, stock: dict[str, list[int]], mode: str, *, overlaps_steps: bool
) -> None:
    answer = run(aborted(deep, mode, overlaps_steps=overlaps_steps))
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer
    assert answer["metrics"].get("aqua:co_serving_without_aborts", 0.0) == 0.0
    assert answer["held_places"] == 0, answer


def test_a_real_engine_answers_otherwise_if_it_keeps_what_was_published(
    deep: Path, stock: dict[str, list[int]]
) -> None:
    # Prompts that are all the same at their start find each other's blocks.
    scenario = aborted(deep, "recompute", keeps_published=True, online_every=6)
    assert same(run(scenario), stock) < 2 * len(stock)
