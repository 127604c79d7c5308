"""How large the demos with real vLLMs are, and the options of an engine that follow from it.

Engines have little memory on purpose: requests of a burst want more than there is, so that offline
ones have to give theirs up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aqua_demo.scale import LlamaSize
from aqua_protocol import MIB

STORE_BYTES: Final = 256 * MIB
"""For checkpoints: more than all offline requests have. Doubled, no more of it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScale:
    """Sizes of one run."""

    llama: LlamaSize
    online_count: int
    on_requests: int  # Of a burst, on average.
    alone_count: int  # One by one, for the objectives: fewer scatter more.
    offline_count: int  # Of the file.
    longest_prompt: int = 512  # Of the file.
    topics: int = 0  # Beginnings that its prompts share; 0 for none.
    blocks: int = 96  # Of keys and values: fewer than all requests want.
    block_tokens: int = 32
    max_tokens: int = 1024

    def engine_options(self, *, prefix_caching: bool = False) -> dict[str, Any]:
        """Options of an engine, as vLLM calls them."""
        return {
            "max_model_len": self.max_tokens,
            "block_size": self.block_tokens,
            "max_num_batched_tokens": self.max_tokens // 2,
            "num_gpu_blocks_override": self.blocks,
            "dtype": "float32",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
            "enable_prefix_caching": prefix_caching,
        }


FULL: Final = EngineScale(
    llama=LlamaSize(layers=8, heads=4, head_dim=64, feed_forward=512),
    online_count=160,
    on_requests=20,
    alone_count=20,
    offline_count=2000,
)

QUICK: Final = replace(
    FULL,
    llama=LlamaSize(layers=4, heads=2, head_dim=64, feed_forward=256),
    online_count=40,
    on_requests=10,
    alone_count=6,
    offline_count=600,
    blocks=64,
)


def with_aqua(engine: Mapping[str, Any], aqua: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of an engine with the adapter and its own options in it; None leaves it out."""
    if aqua is None:
        return dict(engine)
    return {
        **engine,
        "scheduler_cls": "aqualib.engines.vllm.AquaScheduler",
        "worker_cls": "aqualib.engines.vllm.AquaWorker",
        "kv_transfer_config": {
            "kv_connector": "AquaConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(aqua),
        },
    }


def co_serving_options(objectives: Mapping[str, float], **further: str) -> dict[str, Any]:
    """Options of the adapter that keep to `ttft_s` and `tpot_s`, seconds, for online requests.

    Args:
        objectives: These two, among others.
        further: Options of co-serving.
    """
    return {
        "mode": "checkpoint",
        "is_offline": True,
        "store_bytes": STORE_BYTES,
        "co_serving": {name: objectives[name] for name in ("ttft_s", "tpot_s")} | further,
    }
