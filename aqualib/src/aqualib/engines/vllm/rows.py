"""KV caches as rows of bytes: row b is all that one layer keeps in block b.

Layers keep their blocks in tensors of many layouts: keys and values apart or together, heads
before tokens or after, a view permuted from what lies in memory. Aqua only moves bytes, so it
looks at memory: the dimensions in the order of their strides, the one that counts blocks, and
below it the dense bytes of a block. Dimensions above it (keys and values apart) make several rows
of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from aqua_protocol import ConfigError


def block_rows(caches: Iterable[torch.Tensor], block_count: int) -> list[torch.Tensor]:
    """Views of KV caches, each of shape (block_count, n) and dtype uint8.

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
