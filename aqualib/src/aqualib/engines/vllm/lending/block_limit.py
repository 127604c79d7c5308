"""A limit on a pool of KV blocks: blocks at or above it are taken out of use as they come free.

vLLM's pool has no way to shrink, but all it takes is there: a free block that is *touched* leaves
the free queue with a reference of its own, a block that is *evicted* answers no prefix any more,
and *freeing* it puts it back. A block that is out is thus one that lending holds. Nothing is
taken from a request: blocks in use are waited for.

The pool's size counts without the blocks that are out, so usage and `reset_prefix_cache` mean what
they say. Admission reads the number of free blocks and needs no telling.

Not thread-safe: callers hold the scheduler's lock. Knows vLLM's pool by six names, which
`versions` looks for when an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aqualib.engines.vllm.lending.granules import BlockMask


class BlockLimit:
    """Which blocks of vLLM's `BlockPool` are out of use; `keep_free_count` free ones always stay.

    Free blocks that the next step is going to read, `still_read` by number, are left alone.

    Attributes:
        out: Blocks that are out of use, as a mask (block_count,).
        since: For each of them, the number of the step before which it was taken out.
    """

    def __init__(
        self, pool: Any, keep_free_count: int, still_read: Callable[[], Collection[int]] = frozenset
    ) -> None:
        self._pool = pool
        self._keep_free_count = keep_free_count
        self._still_read = still_read
        self.block_count: Final = len(pool.blocks)
        self.out: Final[BlockMask] = np.zeros(self.block_count, np.bool_)
        self.since: Final = np.zeros(self.block_count, np.int64)
        self._awaited: list[Any] = []

    def __repr__(self) -> str:
        return f"BlockLimit({self.out.sum()} of {self.block_count} blocks out)"

    @property
    def free_count(self) -> int:
        """Free blocks in the pool."""
        return int(self._pool.get_num_free_blocks())

    @property
    def is_pool_short(self) -> bool:
        """Whether less than half of what should be free in the pool is."""
        return 2 * self.free_count < self._keep_free_count

    def lower(self, limit: int, step: int) -> None:
        """Keep blocks from number `limit` on out of use from now on, those first that are free.

        Blocks taken now may still be used by steps before the next, `step`.
        """
        wanted = limit + np.flatnonzero(~self.out[limit:])
        # From the top: where not all can be had, the run at the end is to be as long as possible.
        self._awaited = [self._pool.blocks[index] for index in wanted[::-1]]
        self.settle(step)

    def settle(self, step: int) -> None:
        """Take out those of the awaited blocks that have come free."""
        spare = self.free_count - self._keep_free_count
        # Since vLLM 0.30 a free block may have readers that want to be told of its reuse.
        read = {*self._still_read(), *getattr(self._pool, "_reuse_watchers", ())}
        taken: list[Any] = []
        staying: list[Any] = []
        for block in self._awaited:
            is_free = block.ref_cnt == 0 and block.block_id not in read and not block.is_null
            (taken if is_free and len(taken) < spare else staying).append(block)
        self._awaited = staying
        if not taken:
            return
        self._pool.touch(taken)
        self._pool.evict_blocks({block.block_id for block in taken})
        index = [block.block_id for block in taken]
        self.out[index] = True
        self.since[index] = step
        self._pool.num_gpu_blocks -= len(taken)

    def give_back(self, blocks: BlockMask) -> None:
        """Put blocks that are out, as a mask, into use again; wait for no others."""
        self._awaited = []
        index = np.flatnonzero(self.out & blocks)
        self.out[index] = False
        self._pool.num_gpu_blocks += len(index)
        self._pool.free_blocks([self._pool.blocks[i] for i in index])
