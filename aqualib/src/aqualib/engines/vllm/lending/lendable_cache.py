"""A KV cache that can be lent from: the memory under it, and where its blocks lie in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aqua_protocol import ConfigError
from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.engines.vllm.lending.memory import KvMemory
from aqualib.engines.vllm.rows import block_rows
from aqualib.ranges import Range


@dataclass(frozen=True, slots=True)
class LendableCache:
    """A KV cache, ready to be lent from.

    Attributes:
        memory: Under it.
        granules: Which blocks are where in it.
        block_bytes: Of one block, all layers.
        device: Where it is.
    """

    memory: KvMemory
    granules: GranuleMap
    block_bytes: int
    device: torch.device


def lendable_cache(
    memory: KvMemory, caches: Iterable[torch.Tensor], block_count: int
) -> LendableCache:
    """Find the blocks of KV caches in the memory that they were made of.

    Raises:
        ConfigError: Some lie elsewhere, or in a layout that is not known here.
    """
    pieces = block_rows(caches, block_count)
    rows = [Range(piece.data_ptr(), piece.nbytes) for piece in pieces]
    regions = memory.regions
    strays = [
        row
        for row in rows
        if not any(region.start <= row.start and row.end <= region.end for region in regions)
    ]
    if strays or not rows:
        raise ConfigError(
            f"{len(strays)} of {len(rows)} parts of the KV cache were not made of memory that can "
            "be lent",
            remedy='Run without "lend", and report the model and the exact version of vLLM.',
        )
    granules = GranuleMap(
        regions, rows, block_count=block_count, granule_bytes=memory.granule_bytes
    )
    block_bytes = sum(row.size for row in rows) // block_count
    return LendableCache(memory, granules, block_bytes, pieces[0].device)
