"""KV caches as rows of bytes: row b is all that layers keep next to each other in block b.

Layers keep their blocks in tensors of many layouts: keys and values apart or together, heads
before tokens or after, a view permuted from what lies in memory, pages of all layers side by side
in a block, pages with a gap behind them. Aqua only moves bytes, so it looks at memory: the
dimensions in the order of their strides, the one that counts blocks, and below it the dense bytes
of a block. Dimensions above it (keys and values apart), and those below it with other layers' bytes
between, make several rows of a block.

Groups of layers lie over each other in the same memory, where a block is one group's at a time. So
rows that share bytes, or touch, are one row: a block is moved whole, whichever group it is of.

`BlockCopier` gathers blocks from all rows into one tensor and scatters them back, by one call for
all layers where it can (`row_table`). In that tensor a block's rows follow each other in the order
of the model's layers (`by_layers`), so that some layers of it are some of its bytes: a *column*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import Final

import torch
from jaxtyping import UInt8

from aqua_protocol import ConfigError
from aqualib.engines.vllm.paging.row_table import row_table
from aqualib.ranges import Range
from aqualib.transports.cuda_driver import load_driver
from aqualib.transports.gpu_thresholds import CopyThresholds

CUT_ON: Final = frozenset({"cuda"})
"""Types of devices on which loads are cut. On a CPU, what loads beside the model takes cores and
memory bandwidth from it, so a load there has nothing to hide behind."""


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


def by_layers(
    caches: Mapping[str, torch.Tensor | Iterable[torch.Tensor]], block_count: int
) -> tuple[list[UInt8[torch.Tensor, "blocks row_bytes"]], dict[str, int]]:
    """The rows of `block_rows` in the order of layers; and of each layer, how much it needs.

    Args:
        caches: By the names of layers, in their order.
        block_count: Blocks that the engine hands out.

    Returns:
        The rows, and for each name the bytes of a block, from the first, that hold its layer's.

    Raises:
        ConfigError: As `block_rows`.
    """
    rows = block_rows(caches.values(), block_count)
    found: dict[int, None] = {}
    pieces: dict[str, list[tuple[int, int]]] = {}
    for name, cache in caches.items():
        for piece in block_rows([cache], block_count):
            memory, stride, start = _place_of(piece)
            for at, row in enumerate(rows):
                same, other_stride, begin = _place_of(row)
                if [same, other_stride] == [memory, stride] and 0 <= start - begin < row.shape[1]:
                    found.setdefault(at)
                    pieces.setdefault(name, []).append((at, start - begin + piece.shape[1]))
    ordered = [rows[at] for at in found]
    starts = dict(zip(found, accumulate((r.shape[1] for r in ordered), initial=0), strict=False))
    ends = {name: max(starts[at] + end for at, end in ends) for name, ends in pieces.items()}
    assert len(ordered) == len(rows), "a row belongs to no layer"
    return ordered, ends


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
        # Without a table torch may copy element by element: long ones where they fit.
        size = torch.int64.itemsize
        sizes = [
            each for row in rows for each in (row.shape[1], row.stride(0), row.storage_offset())
        ]
        fits = not any(each % size for each in sizes)
        self._word = torch.int64 if fits else torch.uint8
        self._layers = [row.view(self._word) for row in rows]
        self._bounds = list(pairwise(accumulate((x.shape[1] for x in self._layers), initial=0)))
        self.block_bytes = sum(row.shape[1] for row in rows)
        self.whole: Final = Range(0, self.block_bytes)
        self.device = rows[0].device
        self._table = row_table(rows)

    def columns(self, count: int, room_bytes: int) -> list[Range]:
        """Cut so many blocks into columns, for which they are copied one after the other.

        A column of all blocks fits the room, as far as its copies stay long enough for the copy
        engines: so columns take as many parts as whole blocks would. One where blocks are not to be
        cut, or all fit, or nothing is won by it.
        """
        if self.device.type not in CUT_ON:
            return [self.whole]
        unit_bytes = self._word.itemsize if self._table is None else self._table.unit_bytes
        least_bytes = CopyThresholds().host_run_bytes
        if self.device.type == "cuda":
            driver = load_driver()
            if self._table is None or driver.batch_copy is None:
                return [self.whole]  # It would take a submission for each block, or layer.
            limits = driver.device(self.device.index or 0).thresholds
            least_bytes = max(limits.device_run_bytes, limits.host_run_bytes)
        units = self.block_bytes // unit_bytes
        most = max(1, units // -(-least_bytes // unit_bytes))
        parts = -(-count * self.block_bytes // room_bytes)
        of_column = -(-parts // most)
        number = -(-parts // of_column)
        # Columns are whole units: the widest of them may need a little more than its share.
        room_units = room_bytes // unit_bytes // -(-count // of_column)
        while number < most and -(-units // number) > room_units:
            number += 1
        cuts = [units * at // number * unit_bytes for at in range(number + 1)]
        return [Range(start, end - start) for start, end in pairwise(cuts)]

    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        """Copy these blocks of the cache into the rows of `into`, in this order."""
        if self._table is not None:
            self._table.gather(blocks, into)
            return
        index = torch.tensor(blocks, device=self.device)
        words = into.view(self._word)
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            words[:, start:end] = layer.index_select(0, index)

    def scatter(
        self,
        rows: UInt8[torch.Tensor, "blocks column_bytes"],
        blocks: Sequence[int],
        columns: Range | None = None,
    ) -> None:
        """Copy rows into these blocks of the cache, in this order; into all of them or a column."""
        columns = columns or self.whole
        if self._table is not None:
            self._table.scatter(rows, blocks, columns)
            return
        index = torch.tensor(blocks, device=self.device)
        words = rows.view(self._word)
        first, last = (at // self._word.itemsize for at in (columns.start, columns.end))
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            low, high = max(first, start), min(last, end)
            if low < high:
                layer[:, low - start : high - start].index_copy_(
                    0, index, words[:, low - first : high - first]
                )


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
