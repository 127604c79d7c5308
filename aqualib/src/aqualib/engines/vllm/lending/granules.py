"""Which bytes of a KV cache come free when which blocks are out of use.

A device gives memory back in granules (a page of a CPU, 2 MiB of a GPU), an engine in blocks, and
the two do not nest: a block keeps a piece in the tensor of every layer, a granule may hold pieces
of many blocks, and the granule where one layer ends and the next begins holds pieces of the last
blocks and of the first. So this module only knows intervals: granule g overlaps blocks first..last
of some row. A granule is free when no block that overlaps it is in use. One that also holds bytes
of anything else never is.

Blocks are given up from the highest number down. Then what is out of use is one run of blocks at
the end of every layer, and at most one granule at each end of a run is lost to rounding.

Arithmetic over addresses alone; sizes in bytes, granules and blocks by index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Bool, Int64

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aqualib.ranges import Range

BlockMask = Bool[np.ndarray, "blocks"]
GranuleMask = Bool[np.ndarray, "granules"]


class GranuleMap:
    """Granules of a KV cache, and the blocks that overlap each.

    Args:
        regions: Address ranges, each a whole number of granules; numbered in this order.
        rows: Where blocks lie: each row holds `block_count` pieces of equal size, one after the
            other. A row lies within one region.
        block_count: Blocks of the cache.
        granule_bytes: Unit in which memory comes and goes.
    """

    def __init__(
        self,
        regions: Sequence[Range],
        rows: Iterable[Range],
        *,
        block_count: int,
        granule_bytes: int,
    ) -> None:
        self.regions: Final = [*regions]
        self.rows: Final = [*rows]
        self.granule_bytes: Final = granule_bytes
        self.block_count: Final = block_count
        self.count: Final = sum(region.size // granule_bytes for region in regions)
        granules: list[Int64[np.ndarray, " rows"]] = []
        firsts: list[Int64[np.ndarray, " rows"]] = []
        lasts: list[Int64[np.ndarray, " rows"]] = []
        covered = np.zeros(self.count, np.int64)
        for row in self.rows:
            start = _offset_of(row, regions)
            piece_bytes, rest = divmod(row.size, block_count)
            assert not rest, (row, block_count)
            index = np.arange(start // granule_bytes, -(-(start + row.size) // granule_bytes))
            low = np.maximum(index * granule_bytes - start, 0)
            high = np.minimum((index + 1) * granule_bytes - start, row.size)
            granules.append(index)
            firsts.append(low // piece_bytes)
            lasts.append((high - 1) // piece_bytes)
            covered[index] += high - low
        # What holds other bytes as well can never be given up.
        granule = np.concatenate(granules)
        is_ours = (covered == granule_bytes)[granule]
        self._granule = granule[is_ours]
        self._first = np.concatenate(firsts)[is_ours]
        self._last = np.concatenate(lasts)[is_ours]
        # The lowest block of each granule; of those that stay, one that is never out of use.
        self._lowest = np.full(self.count, -1, np.int64)
        self._lowest[self._granule] = block_count
        np.minimum.at(self._lowest, self._granule, self._first)
        self._descending = np.sort(self._lowest[self._lowest >= 0])[::-1]

    def limit_for(self, nbytes: int) -> int:
        """The highest block number such that it and all above it hold `nbytes` of granules.

        Block 0 if there is not that much.
        """
        needed = -(-nbytes // self.granule_bytes)
        if not needed:
            return self.block_count
        return int(self._descending[needed - 1]) if needed <= len(self._descending) else 0

    def bytes_above(self, limit: int) -> int:
        """What comes free when `limit` and every higher block are out of use."""
        return int((self._descending >= limit).sum()) * self.granule_bytes

    def free(self, out: BlockMask) -> GranuleMask:
        """Granules that no block in use overlaps, given the blocks that are out of use."""
        in_use = np.concatenate([[0], np.cumsum(~out)])
        is_busy = in_use[self._last + 1] > in_use[self._first]
        free = self._lowest >= 0
        free[self._granule[is_busy]] = False
        return free

    def blocks_of(self, granules: GranuleMask) -> BlockMask:
        """Blocks that overlap any of these granules."""
        chosen = granules[self._granule]
        edges = np.bincount(self._first[chosen], minlength=self.block_count + 1)
        edges = edges - np.bincount(self._last[chosen] + 1, minlength=self.block_count + 1)
        return np.cumsum(edges)[:-1] > 0

    def highest(self, among: GranuleMask, count: int) -> GranuleMask:
        """The `count` granules of `among` with the highest lowest blocks."""
        index = np.flatnonzero(among)
        order = np.argsort(-self._lowest[index], kind="stable")
        chosen = np.zeros(self.count, np.bool_)
        chosen[index[order[:count]]] = True
        return chosen


def _offset_of(row: Range, regions: Sequence[Range]) -> int:
    """Where a row begins, counted over all regions."""
    before = 0
    for region in regions:
        start = row.start - region.start
        if start >= 0 and row.end <= region.end:
            return before + start
        before += region.size
    raise AssertionError(f"{row} lies in none of {regions}")
