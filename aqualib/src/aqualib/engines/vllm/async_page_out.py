"""Page-outs beside the model, of blocks that no request waits for; the scheduler's half.

What may come to be needed (prefixes of finished requests, checkpoints of running ones) is not worth
a stall of the step. Its blocks are *held* in the KV cache, so that they are not overwritten when
their request frees them, and read by a thread of each worker while the model runs. When every
worker has acknowledged a save, the blocks are let go and their places can be found in the table.

What is on its way is bounded: memory that a save holds is not there for requests. What does not fit
is left out, for a cache may forget; what must not be lost is paged out within a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from aqualib.engines.vllm.block_table import BlockTable
from aqualib.engines.vllm.paging_plan import PagingPlan


@dataclass(slots=True)
class _Save:
    places: list[int]
    blocks: list[int]
    acknowledged: int = 0


class AsyncPageOut:
    """Begins saves and ends them as they are acknowledged.

    Args:
        table: Where saved blocks are found.
        pool: The KV cache's, with vLLM's `blocks`, `touch` and `free_blocks`.
        max_blocks: So many may be on their way at once.
    """

    def __init__(self, table: BlockTable, pool: Any, max_blocks: int) -> None:
        self._table = table
        self._pool = pool
        self._max_blocks = max_blocks
        self._saves: dict[int, _Save] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Whether any is not acknowledged yet."""
        return bool(self._saves)

    def begin(
        self, keys: Sequence[Hashable], block_ids: Sequence[int], plan: PagingPlan
    ) -> tuple[int, int]:
        """Have blocks saved, from the first on as far as there is room.

        Returns how many are there or on their way now, and how many of them were not before.
        """
        table = self._table
        room = self._max_blocks - sum(len(save.blocks) for save in self._saves.values())
        present = table.present(keys)
        # Used now, as far as their age counts; and not what others are given room by.
        table.hold(present)
        kept = 0
        save = _Save([], [])
        for key, block_id in zip(keys, block_ids, strict=False):
            if not table.is_known(key):
                place = table.begin(key) if len(save.blocks) < room else None
                if place is None:
                    break
                save.places.append(place)
                save.blocks.append(block_id)
            kept += 1
        table.release(present)
        if save.blocks:
            # A block with another holder is not reused, whatever else frees it.
            self._pool.touch([self._pool.blocks[block_id] for block_id in save.blocks])
            self._count += 1
            self._saves[self._count] = save
            plan.async_saves[self._count] = (save.places, list(save.blocks))
        return kept, len(save.blocks)

    def acknowledged(self, number: int, count: int, worker_count: int) -> None:
        """So many more of the workers have read the blocks of a save."""
        save = self._saves[number]
        save.acknowledged += count
        if save.acknowledged < worker_count:
            return
        del self._saves[number]
        self._release(save)
        for place in save.places:
            self._table.filled(place)

    def let_go(self) -> None:
        """Release all blocks at once: what is being read is of no use any more."""
        for save in self._saves.values():
            self._release(save)

    def _release(self, save: _Save) -> None:
        # Of a chain the last goes first when memory is short, for it is of use only with the rest.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(save.blocks)])
        save.blocks = []
