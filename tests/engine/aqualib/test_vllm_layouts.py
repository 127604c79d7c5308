"""What a CPU build cannot execute is held against vLLM's own specifications and layout code.

`kv_groups` says which blocks a group of layers reads; vLLM's cache managers say which it keeps.
`block_rows` finds the bytes of a block; vLLM's allocator places the layers, in every layout that it
has for GPUs: heads or tokens first, pages of all layers side by side, quantized pages, latent rows,
padded states, blocks that a kernel cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from aqua_protocol import ConfigError
from aqualib.engines.vllm.paging.kv_groups import KINDS, kv_groups
from aqualib.engines.vllm.paging.rows import BlockCopier, block_rows

# vLLM and torch warn about themselves and each other; not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

BLOCKS: Final = 7
TOKENS: Final = 16
HALF: Final[dict[str, Any]] = {
    "block_size": TOKENS,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float16,
}
FULL: Final = FullAttentionSpec(**HALF)
WINDOW: Final = SlidingWindowSpec(**HALF, sliding_window=40)
CHUNK: Final = ChunkedLocalAttentionSpec(**HALF, attention_chunk_size=48)
FP8: Final = FullAttentionSpec(**{**HALF, "dtype": torch.float8_e4m3fn})
LATENT: Final = MLAAttentionSpec(**{**HALF, "num_kv_heads": 1, "head_size": 36})
LATENT_FP8: Final = MLAAttentionSpec(
    **{**HALF, "num_kv_heads": 1, "head_size": 36, "dtype": torch.uint8}
)
STATE: Final = MambaSpec(
    block_size=TOKENS,
    shapes=((3, 10), (4, 8)),
    dtypes=(torch.float16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
)


def groups(*specs: Any) -> list[KVCacheGroupSpec]:  # noqa: ANN401 - vLLM's
    """Groups of two layers each."""
    return [KVCacheGroupSpec([f"{at}.0", f"{at}.1"], spec) for at, spec in enumerate(specs)]


def mixed() -> list[KVCacheGroupSpec]:
    """One group, whose layers have pages of different sizes."""
    wide = FullAttentionSpec(**{**HALF, "head_size": 24})
    spec = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": wide, "c": FULL})
    assert spec is not None
    return [KVCacheGroupSpec(["a", "b", "c"], spec)]


MODELS: Final[dict[str, Callable[[], list[KVCacheGroupSpec]]]] = {
    "full": lambda: groups(FULL),
    "windows": lambda: groups(WINDOW, FULL, WINDOW),
    "chunks": lambda: groups(CHUNK, FULL),
    "fp8": lambda: groups(FP8),
    "latent": lambda: groups(LATENT),
    "latent in fp8": lambda: groups(LATENT_FP8),
    "states": lambda: groups(STATE, FULL, STATE),
    "pages of different sizes": mixed,
}


@pytest.mark.parametrize(
    "spec", [FULL, LATENT, WINDOW, CHUNK, STATE], ids=lambda s: type(s).__name__
)
def test_a_group_reads_what_vllms_manager_keeps(spec: Any) -> None:  # noqa: ANN401 - vLLM's
    manager = get_manager_for_kv_cache_spec(
        spec,
        max_in_flight_tokens=64,
        max_model_len=512,
        block_pool=BlockPool(BLOCKS, enable_caching=True, hash_block_size=TOKENS),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=TOKENS,
    )
    (group,) = kv_groups(SimpleNamespace(kv_cache_groups=groups(spec)))
    assert [group.first(tokens) for tokens in range(1, 300)] == [
        manager.get_num_skipped_tokens(tokens) // TOKENS for tokens in range(1, 300)
    ]


def test_every_specification_that_vllm_has_is_paged_or_refused_by_name() -> None:
    known = {kind.__name__ for kind in vars(kv_cache_interface).values() if is_specification(kind)}
    assert known >= KINDS.keys()
    assert known - KINDS.keys() - NO_LAYERS <= REFUSED


def is_specification(kind: Any) -> bool:  # noqa: ANN401 - anything of a module
    return isinstance(kind, type) and issubclass(kind, KVCacheSpec)


NO_LAYERS: Final = {"AttentionSpec", "KVCacheSpec", "UniformTypeKVCacheSpecs"}


REFUSED: Final = {
    *("CircularBufferSpec", "SlidingWindowMLASpec"),  # DeepSeek-V4
    *("HiSparseHotSpec", "HiSparseResidentSpec"),
    *("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "HiddenStateCacheSpec"),
    *("RSWASpec", "SinkFullAttentionSpec"),
}
"""What else vLLM has: never run, and not like what was."""


def placed(model: str, layout: KVCacheLayout, *, is_cut: bool) -> dict[str, torch.Tensor] | None:
    """Each layer's cache as vLLM places it; None where vLLM itself says no."""
    of = MODELS[model]()
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    sizes = [TOKENS // 2 if is_cut else TOKENS] * len(of)
    try:
        cache: Any = get_kv_cache_config_from_groups(config, of, 1 << 30)
        return dict(allocate_kv_cache(cache, torch.device("cpu"), layout, sizes))
    except (AssertionError, ValueError):
        return None


CASES: Final = [
    (model, layout, is_cut)
    for model, layout, is_cut in product(MODELS, KVCacheLayout, (False, True))
    if not (model == "states" and (is_cut or layout.name == "LHBNC"))
    and placed(model, layout, is_cut=is_cut) is not None
]


def test_vllm_says_no_to_few() -> None:
    assert {(model, layout.name) for model, layout, _ in CASES} >= {
        *product(["full", "fp8", "latent", "latent in fp8"], KVCacheLayout.__members__),
        *product(["windows", "chunks"], KVCacheLayout.__members__),
        *product(["states"], ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]),
        *product(["pages of different sizes"], ["LBHNC", "BLHNC"]),
    }
    assert {layout.name for _, layout, is_cut in CASES if is_cut} >= {"LBHNC", "LBNHC"}


def test_states_across_the_heads_of_other_blocks_are_refused() -> None:
    caches = placed("states", KVCacheLayout.LHBNC, is_cut=False)
    assert caches is not None
    with pytest.raises(ConfigError, match="across several blocks") as refusal:
        block_rows(caches.values(), BLOCKS)
    assert "VLLM_KV_CACHE_LAYOUT" in str(refusal.value.remedy)


@pytest.mark.parametrize(("model", "layout", "is_cut"), CASES)
def test_a_block_is_moved_whole_and_nothing_beside_it(
    model: str, layout: KVCacheLayout, *, is_cut: bool
) -> None:
    caches = placed(model, layout, is_cut=is_cut)
    assert caches is not None
    whole = torch.tensor([], dtype=torch.uint8)
    whole.set_(next(iter(caches.values())).untyped_storage())
    for group in MODELS[model]():
        views = [by_block(caches[name]) for name in group.layer_names]
        copier = BlockCopier(block_rows(caches.values(), BLOCKS))
        assert copier.block_bytes <= whole.numel() // BLOCKS, "no byte is moved twice"
        whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8))
        before = [view.clone() for view in views]
        staged = torch.zeros((1, copier.block_bytes), dtype=torch.uint8)
        copier.gather([3], staged)
        copier.scatter(staged, [5])
        for view, was in zip(views, before, strict=True):
            assert torch.equal(view[5], was[3])
            others = [at for at in range(BLOCKS) if at != 5]
            assert torch.equal(view[others], was[others])


def by_block(cache: torch.Tensor) -> torch.Tensor:
    """A layer's bytes, (blocks, ...)."""
    raw = cache.view(torch.uint8) if cache.dtype is not torch.uint8 else cache
    return raw if len(raw) == BLOCKS else raw.view(BLOCKS, -1, *raw.shape[1:])
