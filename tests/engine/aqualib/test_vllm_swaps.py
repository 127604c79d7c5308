"""Histories of page-outs beside the model, by seed, in which everything that can happen does.

As in `test_vllm_interleavings`, over `harness.vllm_simulation`: a store that is slow to take what
is preempted, and loses it; aborts, pauses, resets under other weights and the loss of all that is
stored fall upon steps that the seed says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from aqualib.engines.vllm.paging.async_page_out import AsyncPageOut
from harness.vllm_disturbances import lives, seeds, wrong
from harness.vllm_shapes import Shape

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

TURNS: Final = {"policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0}
SWAP: Final = Shape(TURNS, requests=12, turns=0.5, speed=0.2)
TIER: Final = {**SWAP.aqua, "prefix_tier": True}
SHAPES: Final = [
    SWAP,
    replace(SWAP, aqua={**SWAP.aqua, "policy": "first-token", "stint_tokens": 1}, loss=0.05),
    replace(SWAP, depth=2, is_second_runner=True, loss=0.05),
    replace(SWAP, depth=3, drafts=3, caches_prefixes=True),
    replace(SWAP, aqua=TIER, depth=2, caches_prefixes=True, loss=0.05),
    replace(SWAP, aqua=TIER, store_blocks=(1000, 30), speed=0.05),
    replace(SWAP, aqua={**TURNS, "granularity_tokens": 4}, depth=2, caches_prefixes=True),
    replace(SWAP, aqua={**SWAP.aqua, "mode": "checkpoint"}, depth=2, store_blocks=(40, 60, 50)),
    replace(SWAP, aqua={**TIER, "mode": "checkpoint"}, caches_prefixes=True, loss=0.05),
]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_whatever_happens_in_the_middle_every_output_is_right(model: str, shape: Shape) -> None:
    engines = lives(model, shape, seeds(len(SHAPES)), disturbance=0.08)
    assert wrong(engines) == 0
    assert sum(engine.runner.saved_blocks for engine in engines) > 200
    assert sum(engine.runner.loaded_blocks for engine in engines) > 100
    for engine in engines:
        engine.require_rest()
        assert not engine.scheduler.paging.is_saving


@pytest.mark.parametrize("shape", SHAPES[:3], ids=repr)
def test_what_is_preempted_at_a_slices_end_stalls_no_step(model: str, shape: Shape) -> None:
    engines = lives(model, shape, range(10))
    swapped = sum(engine.scheduler.paging.counts.saved_blocks for engine in engines)
    assert swapped > 100
    at_once = sum(engine.runner.paged_out_blocks for engine in engines)
    assert at_once < swapped / 10, "what vLLM itself preempts, because it needs the memory now"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_victim_that_is_cheaper_to_compute_again_is_not_paged_out(model: str, depth: int) -> None:
    # Room for a step that is long enough to be timed, and prompts for it.
    roomy = replace(SWAP, depth=depth, blocks=64, step_tokens=256, requests=24, turns=0.9)

    def swapped_blocks(link_bytes_per_s: float) -> float:
        shape = replace(roomy, link_bytes_per_s=link_bytes_per_s)
        engines = lives(model, shape, range(5))
        assert wrong(engines) == 0
        counts = [engine.scheduler.paging.counts for engine in engines]
        for engine in engines:
            assert engine.scheduler.prefill_rate.tokens_per_s > 0
        forced = sum(count.forced_preemptions for count in counts)
        assert forced > 50
        paged: float = sum(count.saved_blocks + count.clean_blocks for count in counts) / forced
        return paged

    paged = swapped_blocks(link_bytes_per_s=1e30)
    assert paged > 2
    # Until a step was timed, and where vLLM itself preempts, nobody asks what is cheaper.
    assert swapped_blocks(link_bytes_per_s=1e-30) < paged / 4


def test_blocks_given_back_before_they_are_read_change_outputs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = AsyncPageOut.swap

    def give_back(self: AsyncPageOut, *args: Any) -> tuple[list[int], set[int], int]:  # noqa: ANN401 - as it is called
        found = swapped(self, *args)
        self.let_go()
        return found

    monkeypatch.setattr(AsyncPageOut, "swap", give_back)
    assert wrong(lives(model, SHAPES[0], range(10))) > 2


def test_one_workers_acknowledgement_is_not_enough(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = AsyncPageOut.acknowledged

    def hear(self: AsyncPageOut, number: int, count: int, worker_count: int) -> None:
        if self.is_done((number,)):
            return
        heard(self, number, count, min(1, worker_count))

    shape = replace(SHAPES[0], store_blocks=(100, 100, 100))
    assert wrong(lives(model, shape, range(10))) == 0
    monkeypatch.setattr(AsyncPageOut, "acknowledged", hear)
    assert wrong(lives(model, shape, range(10))) > 2


def test_zeroed_loads_change_outputs(model: str) -> None:
    assert wrong(lives(model, SHAPES[0], range(10), zeroes_loads=True)) > 2
