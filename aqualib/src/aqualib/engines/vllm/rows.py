"""KV caches as rows of bytes: row b is all that one layer keeps in block b.

Layers keep their blocks in tensors of many layouts: keys and values apart or together, heads
before tokens or after, a view permuted from what lies in memory. Aqua only moves bytes, so it
looks at memory: the dimensions in the order of their strides, the one that counts blocks, and
below it the dense bytes of a block. Dimensions above it (keys and values apart) make several rows
of a block.

`BlockCopier` gathers blocks from all rows into one tensor and scatters them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product

import torch
from jaxtyping import UInt8

from aqua_protocol import ConfigError


def block_rows(
    caches: Iterable[torch.Tensor], block_count: int
) -> list[UInt8[torch.Tensor, "blocks row_bytes"]]:
    """Views of KV caches, each of shape (block_count, row_bytes) and dtype uint8.

    Args:
        caches: One for each layer; layers that share one count once.
        block_count: Blocks that the engine hands out.

    Raises:
        ConfigError: A cache keeps the bytes of a block apart in a way unknown here.
    """
    rows: dict[tuple[int, int], torch.Tensor] = {}
    for cache in caches:
        for row in _rows_of(cache, block_count):
            rows.setdefault((row.data_ptr(), row.shape[1]), row)
    return list(rows.values())


class BlockCopier:
    """Copies blocks between a KV cache (`block_rows`) and rows that hold all layers of a block."""

    def __init__(self, rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]]) -> None:
        # On a CPU torch gathers and scatters element by element: long ones where they fit.
        size = torch.int64.itemsize
        fits = all(not (row.shape[1] % size or row.storage_offset() % size) for row in rows)
        self._word = torch.int64 if fits else torch.uint8
        self._layers = [row.view(self._word) for row in rows]
        self._bounds = list(pairwise(accumulate((x.shape[1] for x in self._layers), initial=0)))
        self.block_bytes = sum(row.shape[1] for row in rows)
        self.device = rows[0].device

    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        """Copy these blocks of the cache into the rows of `into`, in this order."""
        index = torch.tensor(blocks, device=self.device)
        words = into.view(self._word)
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            words[:, start:end] = layer.index_select(0, index)

    def scatter(
        self, rows: UInt8[torch.Tensor, "blocks block_bytes"], blocks: Sequence[int]
    ) -> None:
        """Copy rows into these blocks of the cache, in this order."""
        index = torch.tensor(blocks, device=self.device)
        words = rows.view(self._word)
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            layer.index_copy_(0, index, words[:, start:end])


def _rows_of(cache: torch.Tensor, block_count: int) -> list[torch.Tensor]:
    order = sorted(range(cache.dim()), key=cache.stride, reverse=True)
    memory = cache.permute(order)
    for dim, size in enumerate(memory.shape):
        # A kernel may cut a block in several; they lie next to each other.
        if size % block_count == 0:
            above = memory.shape[:dim]
            parts = [memory[index] for index in product(*map(range, above))]
            if all(part.is_contiguous() for part in parts):
                return [part.reshape(block_count, -1).view(torch.uint8) for part in parts]
            # Further in, a size may be a multiple by chance, and mean something else.
            break
    raise ConfigError(
        f"cannot find {block_count} blocks in a KV cache of shape {tuple(cache.shape)} and "
        f"strides {cache.stride()}",
        remedy="Please report the model and the attention backend; meanwhile set "
        '"mode": "recompute".',
    )
