"""Shapes of simulated engines (`harness.vllm_simulation`), and vLLM's configuration of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from aqua_schedulers.conserve import CoServingPlan, CoServingView
from harness.step_aborts import allow_aborts_in_process

BLOCK_TOKENS: Final = 4

MOST_TOKENS: Final = 128
WINDOW_TOKENS: Final = 7
CHUNK_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated.

    Attributes:
        aqua: Options of the adapter.
        depth: Steps under way at once; more than one schedules asynchronously.
        drafts: Speculative tokens of a step.
        caches_prefixes: vLLM's own prefix cache.
        is_second_runner: The second model runner's way of keeping how far a request is.
        loss: Chance that a load finds nothing.
        turns: Chance that a request goes on where an earlier one ends.
        speed: Chance that a load or a save beside the model ends within a step.
        groups: What each group of layers reads: all tokens (`full`), a `window` of them, a window
            in blocks of twice the size (`wide`), the `chunk` that the next token is in, a `state`
            that each token changes in its place, or one in a block for each few tokens (`states`).
        blocks: Of the KV cache.
        step_tokens: The most that a step computes.
        requests: How many run.
        connectors: Where our connector is among several; None makes it the only one.
        store_blocks: Places that each worker has.
        link_bytes_per_s: To the store and back, as its workers say; a block is one byte.
        storage: Folder of a connector beside ours.
        offline: Chance that a request is offline, where the engine co-serves.
        finish_in_s: Seconds within which requests are wanted, by name, where the engine co-serves.
        aborts: Chance that a step which may be aborted is.
    """

    aqua: dict[str, Any] = field(default_factory=dict)
    depth: int = 1
    drafts: int = 0
    caches_prefixes: bool = False
    is_second_runner: bool = False
    loss: float = 0.0
    turns: float = 0.0
    speed: float = 0.4
    groups: tuple[str, ...] = ("full",)
    blocks: int = 24
    step_tokens: int = 48
    requests: int = 8
    connectors: tuple[str, ...] = ("AquaConnector",)
    store_blocks: tuple[int, ...] = (1000,)
    link_bytes_per_s: float = 0.0
    storage: str = ""
    offline: float = 0.0
    finish_in_s: dict[str, float] = field(default_factory=dict)
    aborts: float = 0.0


def make_config(model: str, shape: Shape, **engine: Any) -> Any:  # noqa: ANN401 - vLLM's
    """What vLLM makes of the command line of an engine of this shape."""
    from vllm.engine.arg_utils import EngineArgs

    transfer: dict[str, Any] = {
        "kv_connector": "AquaConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"is_offline": True, **shape.aqua},
    }
    if shape.connectors != ("AquaConnector",):
        children = [
            transfer
            if name == "AquaConnector"
            else {
                "kv_connector": name,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": shape.storage},
            }
            for name in shape.connectors
        ]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
    speculative = None
    if shape.drafts:
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": shape.drafts,
            "prompt_lookup_max": 2,
        }
    if shape.aborts:
        allow_aborts_in_process()
        engine["worker_cls"] = "aqualib.engines.vllm.AquaWorker"
    config = EngineArgs(
        model=model,
        max_model_len=MOST_TOKENS,
        block_size=32,
        max_num_batched_tokens=shape.step_tokens,
        max_num_seqs=16,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=shape.caches_prefixes,
        scheduler_cls="aqualib.engines.vllm.AquaScheduler",
        kv_transfer_config=transfer,
        speculative_config=speculative,
        **engine,
    ).create_engine_config()
    # A CPU's platform says no to what is only the scheduler's affair here.
    config.scheduler_config.async_scheduling = shape.depth > 1
    runner = {"use_v2_model_runner": shape.is_second_runner}
    config.__class__ = type("SimulatedConfig", (type(config),), runner)
    config.cache_config.block_size = BLOCK_TOKENS
    return config


def block_tokens(kind: str) -> int:
    """Tokens of a block of such a group."""
    sizes = {"wide": 2 * BLOCK_TOKENS, "state": MOST_TOKENS}
    return sizes.get(kind, BLOCK_TOKENS)


def hash_tokens(shape: Shape) -> int:
    """Tokens of a block's hash."""
    return min(map(block_tokens, shape.groups)) if "state" not in shape.groups else MOST_TOKENS


def is_state(kind: str) -> bool:
    """Whether such a group keeps what the last token left, and nothing of those before."""
    return kind in {"state", "states"}


def first_read(kind: str, position: int) -> int:
    """The first position that the token at this one reads."""
    if kind == "full":
        return 0
    if is_state(kind):
        return position
    if kind == "chunk":
        return position // CHUNK_TOKENS * CHUNK_TOKENS
    return max(0, position + 1 - WINDOW_TOKENS)


def _spec(kind: str) -> Any:  # noqa: ANN401 - vLLM's
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    if is_state(kind):
        return MambaSpec(
            block_size=block_tokens(kind),
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="none" if kind == "state" else "align",
        )
    plain: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    plain["block_size"] = block_tokens(kind)
    if kind == "full":
        return FullAttentionSpec(**plain)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**plain, attention_chunk_size=CHUNK_TOKENS)
    return SlidingWindowSpec(**plain, sliding_window=WINDOW_TOKENS)


def make_scheduler(vllm_config: Any, shape: Shape) -> Any:  # noqa: ANN401 - vLLM's
    """Our scheduler over a KV cache of `shape.blocks` blocks."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    cache = KVCacheConfig(
        num_blocks=shape.blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([kind], _spec(kind)) for kind in shape.groups],
    )
    vllm_config.cache_config.num_gpu_blocks = shape.blocks
    if "states" in shape.groups:
        vllm_config.cache_config.mamba_cache_mode = "align"
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=cache,
        structured_output_manager=SimpleNamespace(
            accept_tokens=lambda *_: True,
            validate_tokens=lambda _, tokens: tokens,
            should_advance=lambda _, **__: False,
        ),
        block_size=max(map(block_tokens, shape.groups)),
        hash_block_size=hash_tokens(shape),
        log_stats=False,
    )
    if scheduler.co_serving is not None:
        _hold_views_to_the_engine(scheduler)
    return scheduler


def _hold_views_to_the_engine(scheduler: Any) -> None:  # noqa: ANN401 - ours, which needs vLLM
    """Have each step fail whose plan is made of other requests than the engine has."""
    co_serving = scheduler.co_serving
    plan: Callable[[CoServingView], CoServingPlan] = co_serving.plan

    def compare_and_plan(view: CoServingView) -> CoServingPlan:
        for seen in view.running:
            request = scheduler.requests[seen.request_id]
            tables = scheduler.kv_cache_manager.get_block_ids(seen.request_id)
            assert seen == co_serving.view(
                request,
                computed_tokens=request.num_computed_tokens,
                held_blocks=sum(map(len, tables)),
            )
        return plan(view)

    co_serving.plan = compare_and_plan
