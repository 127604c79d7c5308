"""KV caches as rows of bytes: row b is all that layers keep next to each other in block b.

Layers keep their blocks in tensors of many layouts: keys and values apart or together, heads
before tokens or after, a view permuted from what lies in memory, pages of all layers side by side
in a block, pages with a gap behind them. Aqua only moves bytes, so it looks at memory: the
dimensions in the order of their strides, the one that counts blocks, and below it the dense bytes
of a block. Dimensions above it (keys and values apart), and those below it with other layers' bytes
between, make several rows of a block.

Groups of layers lie over each other in the same memory, where a block is one group's at a time. So
rows that share bytes, or touch, are one row: a block is moved whole, whichever group it is of.

`BlockCopier` gathers blocks from all rows into one tensor and scatters them back, on a GPU by one
kernel for all layers (`cuda_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations, pairwise, product

import torch
from jaxtyping import UInt8

from aqua_protocol import ConfigError
from aqualib.engines.vllm.paging.cuda_rows import cuda_rows


def block_rows(
    caches: Iterable[torch.Tensor | Iterable[torch.Tensor]], block_count: int
) -> list[UInt8[torch.Tensor, "blocks row_bytes"]]:
    """Views of KV caches, each of shape (block_count, row_bytes) and dtype uint8.

    Args:
        caches: One for each layer, or several where a layer keeps a state in parts.
        block_count: Blocks that the engine hands out.

    Raises:
        ConfigError: A cache keeps the bytes of a block apart in a way unknown here.
    """
    tensors: list[torch.Tensor] = []
    for cache in caches:
        tensors += [cache] if isinstance(cache, torch.Tensor) else cache
    found = [row for each in tensors for row in _rows_of(each, block_count)]
    rows: list[torch.Tensor] = []
    for row in sorted(found, key=_place_of):
        last = rows[-1] if rows else row
        (memory, stride, start), (*before, begin) = _place_of(row), _place_of(last)
        if rows and [memory, stride] == before and start <= begin + last.shape[1]:
            end = max(begin + last.shape[1], start + row.shape[1])
            rows[-1] = last.as_strided((block_count, end - begin), last.stride())
        else:
            rows.append(row)
    _require_apart(rows)
    return rows


def _require_apart(rows: Sequence[torch.Tensor]) -> None:
    if len({row.stride(0) for row in rows}) == 1:
        return
    for row, other in combinations(rows, 2):
        (memory, stride, start), (same, other_stride, begin) = _place_of(row), _place_of(other)
        if memory != same or stride == other_stride:
            continue
        if start < begin + other_stride * len(other) and begin < start + stride * len(row):
            raise ConfigError(
                "a block of some layers lies across several blocks of others",
                remedy="Set VLLM_KV_CACHE_LAYOUT=LBHNC, and report the model; or set "
                '"mode": "recompute".',
            )


def _place_of(row: torch.Tensor) -> tuple[int, int, int]:
    return row.untyped_storage().data_ptr(), row.stride(0), int(row.storage_offset())


class BlockCopier:
    """Copies blocks between a KV cache (`block_rows`) and rows that hold all layers of a block."""

    def __init__(self, rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]]) -> None:
        # On a CPU torch gathers and scatters element by element: long ones where they fit.
        size = torch.int64.itemsize
        sizes = [
            each for row in rows for each in (row.shape[1], row.stride(0), row.storage_offset())
        ]
        fits = not any(each % size for each in sizes)
        self._word = torch.int64 if fits else torch.uint8
        self._layers = [row.view(self._word) for row in rows]
        self._bounds = list(pairwise(accumulate((x.shape[1] for x in self._layers), initial=0)))
        self.block_bytes = sum(row.shape[1] for row in rows)
        self.device = rows[0].device
        self._all_layers = cuda_rows(rows)

    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        """Copy these blocks of the cache into the rows of `into`, in this order."""
        if self._all_layers is not None:
            self._all_layers.gather(blocks, into)
            return
        index = torch.tensor(blocks, device=self.device)
        words = into.view(self._word)
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            words[:, start:end] = layer.index_select(0, index)

    def scatter(
        self, rows: UInt8[torch.Tensor, "blocks block_bytes"], blocks: Sequence[int]
    ) -> None:
        """Copy rows into these blocks of the cache, in this order."""
        if self._all_layers is not None:
            self._all_layers.scatter(rows, blocks)
            return
        index = torch.tensor(blocks, device=self.device)
        words = rows.view(self._word)
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            layer.index_copy_(0, index, words[:, start:end])


def _rows_of(cache: torch.Tensor, block_count: int) -> list[torch.Tensor]:
    order = sorted(range(cache.dim()), key=cache.stride, reverse=True)
    memory = cache.permute(order)
    # Further in, a size may be a multiple by chance, and mean something else.
    dim = next((at for at, size in enumerate(memory.shape) if size % block_count == 0), None)
    if dim is None:
        raise ConfigError(
            f"cannot find {block_count} blocks in a KV cache of shape {tuple(cache.shape)} and "
            f"strides {cache.stride()}",
            remedy="Please report the model and the attention backend; meanwhile set "
            '"mode": "recompute".',
        )
    # A kernel may cut a block in several, and keep other layers between a block's heads.
    cuts = memory.shape[dim] // block_count
    dense = dim + 1
    while not memory[(0,) * dense].is_contiguous():
        dense += 1
    shape = (block_count, math.prod(memory.shape[dense:]))
    strides = (cuts * memory.stride(dim), 1)
    outer = [*memory.shape[:dim], cuts, *memory.shape[dim + 1 : dense]]
    return [
        memory.as_strided(shape, strides, memory[index].storage_offset()).view(torch.uint8)
        for index in product(*map(range, outer))
    ]
