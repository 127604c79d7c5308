"""`AquaCache`: a transformers cache that holds more than the device has room for.

    with aqualib.connect(...) as aqua:
        cache = AquaCache(model.config, budget_bytes=2 * GIB, max_tokens=9000, aqua=aqua)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=500)

A stock `generate` runs a prompt whose keys and values exceed the budget, with the same logits bit
for bit as with `DynamicCache`: greedy, sampled, batched, with beams, with an assistant, in several
prefill chunks or over several calls. `offload_plan` says which layers move, `storage` how.

What it promises: keys and values on the device never exceed the budget; bytes that come back
different from what was stored raise `ChecksumMismatchError` where the Aqua instance checks, and
bytes that cannot come back raise `DataLostError`; `reset()` then makes the cache usable again.
What it does not: the tensors that `update` returns are valid until the next `update`, which is all
that a decoder needs; it cannot be copied (`copy.deepcopy`) or have its batch changed.

Layers with sliding windows, linear attention, shared keys or an indexer are refused: they already
hold little, and to page them wrongly would be silent. Written against the cache interface of
transformers 5.23 (`CacheLayerMixin`, `crop` by a negative count).

Source: Aqua section 9.1, the long-prompt workload, which modifies FlexGen; we subclass instead.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import aqualib
from aqua_protocol import ConfigError, format_bytes
from aqualib.engines.transformers.offload_plan import (
    LayerShape,
    OffloadPlan,
    plan_offload,
    require_one_limit,
)
from aqualib.engines.transformers.storage import LayerStorage

if TYPE_CHECKING:
    from aqualib import Aqua

DEFAULT_BLOCK_TOKENS: Final = 64
"""Tokens of one head in one block: 16 KiB at 128 elements of two bytes. Prompts are paged in runs
of many blocks whatever the size. Doubled, the tails of offloaded layers, which stay on the device,
take twice the memory; halved, the runs of decoded tokens are half as long."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache holds and has moved.

    Resident bytes count free room in their buffers, and their peak is never above the budget;
    stored ones are in the block store. `stall_s` is the time that the model waited for a layer.
    """

    resident_bytes: int
    peak_resident_bytes: int
    stored_bytes: int
    paged_out_bytes: int
    paged_in_bytes: int
    stall_s: float


class AquaCache(Cache):
    """A cache with a budget; see the module.

    Args:
        config: The model's configuration.
        max_tokens: Prompt and new tokens together, per sequence; rounded up to whole blocks.
        budget_bytes: What keys and values may occupy on the device. Or:
        resident_layers: How many layer-sized buffers may exist, the two for streaming included.
        aqua: Where the rest goes; by default the process's own instance (`aqualib.connect`).
        block_tokens: Tokens of one head in one block.

    Raises:
        ConfigError: A layer kind that cannot be paged, or not exactly one limit. A limit too small
            for the shape of the keys is found, and raised, at the first `update`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_tokens: int,
        budget_bytes: int | None = None,
        resident_layers: int | None = None,
        aqua: Aqua | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        require_one_limit(budget_bytes, resident_layers)
        for name, count in (("max_tokens", max_tokens), ("block_tokens", block_tokens)):
            if count < 1:
                raise ConfigError(f"{name} is {count}", remedy="Pass a positive number.")
        self._layer_count = _require_full_attention(config)
        self._max_tokens = max_tokens
        self._block_tokens = block_tokens
        self._budget_bytes = budget_bytes
        self._resident_layers = resident_layers
        self._aqua = aqua
        self._storage: LayerStorage | None = None
        self._finalizer: weakref.finalize[..., AquaCache] | None = None
        # Layers refer to the cache weakly, so that dropping the cache frees its blocks at once.
        own = weakref.ref(self)
        super().__init__(layers=[AquaLayer(own, index) for index in range(self._layer_count)])

    def __repr__(self) -> str:
        limit = (
            f"{self._resident_layers} layers"
            if self._budget_bytes is None
            else format_bytes(self._budget_bytes)
        )
        if self._storage is None:
            return f"AquaCache({self._layer_count} layers within {limit}, empty)"
        plan = self._storage.offload_plan
        return (
            f"AquaCache({len(plan.resident)} resident and {len(plan.offloaded)} offloaded"
            f" layers within {limit}, {self.get_seq_length()} tokens)"
        )

    @property
    def offload_plan(self) -> OffloadPlan | None:
        """Which layers are resident and which offloaded; None before the first `update`."""
        return self._storage.offload_plan if self._storage is not None else None

    @property
    def statistics(self) -> CacheStatistics:
        """What the cache holds and has moved."""
        storage = self._storage
        if storage is None:
            return CacheStatistics(0, 0, 0, 0, 0, 0.0)
        return CacheStatistics(
            resident_bytes=storage.nbytes,
            peak_resident_bytes=storage.peak_bytes,
            stored_bytes=storage.stored_bytes,
            paged_out_bytes=storage.paged_out_bytes,
            paged_in_bytes=storage.paged_in_bytes,
            stall_s=storage.stall_s,
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder sequences for beam search. Blocks in the store are shared, not copied."""
        if self._storage is not None:
            self._storage.reorder(beam_idx)

    def reset(self) -> None:
        """Forget every token; the memory stays for the next prompt of the same shape."""
        if self._storage is not None:
            self._storage.clear()

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: the budget was planned for the batch that the cache has."""
        raise _batch_is_fixed(f"repeat each sequence {repeats} times")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused: the budget was planned for the batch that the cache has."""
        raise _batch_is_fixed(f"select {len(indices)} sequences")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ConfigError(
            "an AquaCache cannot be copied: its blocks are in another process's memory",
            remedy="Make a second cache and prefill it, or crop this one back after each use.",
        )

    def close(self) -> None:
        """Give the memory back, here and in the store. Harmless when repeated."""
        if self._finalizer is not None:
            self._finalizer()
        self._storage = None
        self._finalizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, keys: torch.Tensor) -> LayerStorage:
        """The storage, made for keys of this shape when the first ones arrive."""
        if self._storage is None:
            batch, heads, _, head_dim = keys.shape
            shape = LayerShape(
                batch=batch,
                heads=heads,
                head_dim=head_dim,
                element_bytes=keys.element_size(),
                block_tokens=self._block_tokens,
                max_blocks=-(-self._max_tokens // self._block_tokens),
            )
            plan = plan_offload(
                self._layer_count,
                shape,
                budget_bytes=self._budget_bytes,
                resident_layers=self._resident_layers,
            )
            aqua = aqualib.default() if self._aqua is None else self._aqua
            self._storage = LayerStorage(shape, plan, aqua.block_store, keys)
            self._finalizer = weakref.finalize(self, self._storage.close)
            # At the interpreter's end the whole store goes; see `Aqua.close`.
            self._finalizer.atexit = False
        return self._storage


class AquaLayer(CacheLayerMixin):
    """One layer of an `AquaCache`, as transformers wants to see it; all state is the cache's."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: weakref.ref[AquaCache], index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    @property
    def _storage(self) -> LayerStorage | None:
        cache = self._cache()
        return cache._storage if cache is not None else None  # noqa: SLF001 - one module, one noun

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for keys of this shape."""
        del value_states
        cache = self._cache()
        assert cache is not None, "a layer is used after its cache is gone"
        cache._open(key_states)  # noqa: SLF001 - one module, one noun
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new states, shape (batch, heads, new tokens, head_dim); all states come back."""
        cache = self._cache()
        assert cache is not None, "a layer is used after its cache is gone"
        storage = cache._open(key_states)  # noqa: SLF001 - one module, one noun
        self.is_initialized = True
        return storage.append(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Count the tokens held."""
        storage = self._storage
        return storage.length(self._index) if storage is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query of this length sees, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Name no maximum that masks should be made for: `max_tokens` bounds, it does not pad."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; a count of -3 removes three.

        Raises:
            ConfigError: A positive count, which older versions took as the length to keep.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) is ambiguous",
                remedy="Pass a negative number: how many tokens to remove.",
            )
        storage = self._storage
        if storage is not None and tokens_to_remove:
            storage.crop(self._index, max(0, storage.length(self._index) + tokens_to_remove))


def _require_full_attention(config: PreTrainedConfig) -> int:
    """The number of layers, if all are of the one kind that can be paged."""
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        # Exactly this type: its subclasses keep further state.
        if type(layer) is not DynamicLayer:
            raise ConfigError(
                f"layer {index} of this model is cached as {type(layer).__name__}; AquaCache pages"
                " full attention only",
                remedy="Use DynamicCache for this model, or disable its sliding window.",
                layer=index,
            )
    if not layers:
        raise ConfigError("this model's configuration names no layers")
    return len(layers)


def _batch_is_fixed(wish: str) -> ConfigError:
    return ConfigError(
        f"an AquaCache cannot {wish}: its budget is planned for one batch",
        remedy="Make a cache for the batch that generate will use, beams included.",
    )
