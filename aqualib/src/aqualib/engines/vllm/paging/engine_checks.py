"""What of an engine's configuration paging can live with, asked when the engine starts.

A model or a setting that paging would get wrong is refused with what to do instead, before the
first request.
"""

from __future__ import annotations

from typing import Any, Final

from aqua_protocol import ConfigError
from aqualib.engines.vllm.options import AquaOptions, LoadMode, options_of
from aqualib.engines.vllm.paging.kv_groups import KvGroups, kv_groups

WITHOUT_CONNECTOR: Final = (
    "Drop --kv-transfer-config, and give options by --additional-config "
    "'{\"aqua\": {...}}': AquaScheduler by itself has preempted requests computed again."
)


def require_attention(vllm_config: Any) -> None:
    """Check, before vLLM lays its cache out, that a model has attention layers.

    Raises:
        ConfigError: It has none.
    """
    if vllm_config.model_config.is_attention_free:
        raise ConfigError(
            "a model without attention layers cannot be paged", remedy=WITHOUT_CONNECTOR
        )


def require_pageable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check that the engine's KV can be paged.

    Raises:
        ConfigError: It is kept in a way that is not supported.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("this model keeps no KV cache to page", remedy=WITHOUT_CONNECTOR)
    parallel = vllm_config.parallel_config
    shards = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if shards != 1:
        raise ConfigError(
            f"KV blocks over {shards} context-parallel ranks cannot be paged",
            remedy='Run without context parallelism, or set "mode": "recompute".',
        )
    kinds = kv_groups(kv_cache_config)
    if kinds.has_state and options_of(vllm_config).prefix_tier:
        raise ConfigError(
            "a prefix cannot be shared by way of the store where layers keep a state",
            remedy='Drop "prefix_tier"; preempted requests are paged without it.',
        )
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    begins_again = getattr(scheduler, "has_requests_begin_again", False)
    if kinds.loses_all and not begins_again:
        raise ConfigError(
            "a model with sliding windows or several groups of KV blocks needs Aqua's scheduler, "
            "which knows what to do when a block cannot be loaded",
            remedy="Add --scheduler-cls aqualib.engines.vllm.AquaScheduler.",
        )
    # The second model runner zeroes new blocks before a connector may save what was in them.
    if vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        raise ConfigError(
            "this model's blocks are zeroed before they could be paged out",
            remedy='Set "mode": "recompute", or VLLM_USE_V2_MODEL_RUNNER=0.',
        )


def require_blocks(kv_cache_config: Any) -> None:
    """Check that there is anything for requests to share.

    Raises:
        ConfigError: The model keeps no KV cache.
    """
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(
            "this model keeps no KV cache (an encoder, or pooling without attention over the "
            "past), so its requests have nothing to take turns with",
            remedy="Run it without --scheduler-cls.",
        )


def require_co_servable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check that online and offline requests can share the engine's steps.

    Raises:
        ConfigError: Drafts would grow stale while a request is parked, or memory is not in blocks
            of one kind.
    """
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "co-serving cannot park a request that has drafts",
            remedy='Drop "co_serving", or speculative decoding.',
        )
    if len(kv_cache_config.kv_cache_groups) != 1 or kv_groups(kv_cache_config).loses_all:
        raise ConfigError(
            "co-serving reckons memory in one group of KV blocks under full attention",
            remedy='Drop "co_serving" for this model.',
        )


def load_mode(options: AquaOptions, vllm_config: Any, groups: KvGroups) -> LoadMode:
    """Choose how KV comes back: within the step only where a load that fails is exact.

    vLLM takes a request back to its last good block when a load within a step fails. That is right
    when no later step has begun and no other request was given the block, on the first model
    runner; elsewhere tokens are decoded from a block that was never loaded. A request whose blocks
    load beside the steps runs when they are there, on whatever engine.

    Source: github.com/vllm-project/vllm/issues/49250; 0.28 to 0.32 have it.

    Raises:
        ConfigError: The options insist on what is not exact here.
    """
    ways = {
        "model runner V2": (vllm_config.use_v2_model_runner, "VLLM_USE_V2_MODEL_RUNNER=0"),
        "overlapping steps": (
            vllm_config.max_concurrent_batches > 1,
            "--no-async-scheduling (and no pipeline)",
        ),
        "prefix caching": (
            vllm_config.cache_config.enable_prefix_caching,
            "--no-enable-prefix-caching",
        ),
        "windows or several groups of blocks": (groups.loses_all, "a model with neither"),
    }
    found = {name: remedy for name, (is_so, remedy) in ways.items() if is_so}
    if options.load is LoadMode.SYNC and found and options.is_paging:
        raise ConfigError(
            f'with {" and ".join(found)} a load within the step ("load": "sync") that fails gives '
            "wrong tokens",
            remedy=f'Drop "load", or set {", ".join(found.values())}.',
        )
    return options.load or (LoadMode.ASYNC if found else LoadMode.SYNC)
