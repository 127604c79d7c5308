"""KV events of the prefix tier beside vLLM's own, over vLLM's real scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from harness.vllm_shapes import Shape, make_config
from harness.vllm_simulation import SimulatedEngine

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]


def test_what_vllm_publishes_names_the_blocks_of_the_tier(model: str) -> None:
    shape = Shape(
        {"policy": "cfs", "slice_iterations": 3, "prefix_tier": True},
        depth=2,
        caches_prefixes=True,
        requests=16,
        turns=0.8,
        store_blocks=(40,),
    )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = make_config(model, shape, kv_events_config=events)
    for seed in range(3):
        engine = SimulatedEngine(shape, seed, config)
        published: list[Any] = []
        engine.scheduler.kv_event_publisher.publish = lambda batch, to=published: to.extend(
            batch.events
        )
        while not engine.is_done:
            engine.step()
        engine.settle()
        assert engine.outputs == engine.expected
        # What came after the last output is told with the next one.
        published += engine.scheduler.connector.take_events()
        ours = [each for each in published if each.medium == "CPU"]
        stored = sum(isinstance(each, BlockStored) for each in ours)
        assert stored > 10
        assert len(ours) > stored, "a store of 40 blocks gives some up"
        heard: set[Any] = set()
        for each in ours:
            change = heard.update if isinstance(each, BlockStored) else heard.difference_update
            change(each.block_hashes)
        hashes = {key for each in engine.runner.requests.values() for key in each.block_hashes}
        there = {key for key in hashes if engine.scheduler.paging.table.present([key])}
        assert there
        assert heard == set(map(maybe_convert_block_hash, there))
        # A router learns the tokens of a hash from vLLM's own events; a block that the last token
        # of a request fills is not among them.
        assert heard & {
            key
            for each in published
            if isinstance(each, BlockStored) and each.medium == "GPU"
            for key in each.block_hashes
        }
