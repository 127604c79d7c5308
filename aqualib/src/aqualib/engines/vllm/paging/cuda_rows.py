"""Blocks of all layers of a GPU's KV cache, gathered or scattered by one kernel.

A block lies in as many pieces as the model has layers, often twice as many. A launch for each, and
one more to put it into place, were 320 for a part at 80 layers, which the host takes longer to
submit than a PCIe link to carry. Here the caches are one table: rows of `unit_bytes`, the largest
size in which all pieces begin and end, from the first byte of the lowest cache to the last of the
highest. A kernel of torch's gathers rows of it by an index; rows that belong to other tensors, or
to none, are in no index and are not touched.

The index is read by the kernel where the host has written it, in pinned memory: a few kilobytes
over the link beside megabytes, and no submission of its own. With the copy of the store that makes
two submissions for a part, whatever the number of layers.

Not everywhere: caches whose pieces have no size in common, and GPUs that cannot read the host's
registered memory, are gathered layer by layer (`BlockCopier`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from jaxtyping import Int64, UInt8

from aqua_protocol import TransportError
from aqualib.transports.base import tensor_at
from aqualib.transports.cuda_buffers import PinnedBuffer
from aqualib.transports.cuda_driver import load_driver

if TYPE_CHECKING:
    from aqualib.ranges import Range
    from aqualib.transports.cuda_driver import CudaDevice

MIN_UNIT_BYTES: Final = 512
"""Bytes of a row of the table at least: what torch's allocator aligns to, so all but odd sizes have
it in common. Halved, an index of a part would be twice as long."""

MAX_UNIT_BYTES: Final = 4096
"""Bytes of a row at most, so that blocks can be cut between layers, and kernels find many rows to
spread over processors. Doubled, an index is half as long and cuts are as much coarser."""

INDEX_UNITS: Final = 65536
"""Rows of a launch at most: a staging buffer of 32 MiB in the shortest rows. Doubled, the ring
takes 2 MiB more of pinned memory."""

INDEX_SLOTS: Final = 4
"""Launches that may be queued before the host waits. Doubled, the ring takes 2 MiB more."""


class CudaRows:
    """The rows of a KV cache as one table of a GPU's memory.

    Args:
        rows: From `block_rows`, all on one GPU.
        unit_bytes: What divides their places, strides and sizes.

    Raises:
        TransportError: No host memory can be pinned.
    """

    def __init__(
        self,
        rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]],
        unit_bytes: int,
        gpu: CudaDevice,
    ) -> None:
        start = min(row.data_ptr() for row in rows)
        end = max(row[-1].data_ptr() + row.shape[1] for row in rows)
        self._device = rows[0].device
        self._words = unit_bytes // 8
        table = tensor_at(start, end - start, self._device, torch.uint8)
        self._table = table.view(torch.int64).view(-1, self._words)
        self.unit_bytes: Final = unit_bytes
        self._keep = rows  # The table owns nothing.
        # Of each unit of a block: its row for block 0, and how far on that of the next block is.
        places = [
            (row.data_ptr() - start) // unit_bytes + np.arange(row.shape[1] // unit_bytes)
            for row in rows
        ]
        self._firsts = np.concatenate(places)
        steps = [row.stride(0) // unit_bytes for row in rows]
        self._steps = np.repeat(steps, [len(place) for place in places])
        self._ring = PinnedBuffer(gpu, INDEX_UNITS, INDEX_SLOTS)
        self._lock = threading.Lock()

    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        """Queue a copy of blocks into rows, in this order."""
        for index, stretch in self._stretches(blocks, slice(None)):
            some = into.view(torch.int64).view(-1, self._words)[stretch]
            torch.index_select(self._table, 0, index, out=some)

    def scatter(
        self,
        rows: UInt8[torch.Tensor, "blocks column_bytes"],
        blocks: Sequence[int],
        columns: Range,
    ) -> None:
        """Queue a copy of rows into these bytes of distinct blocks, in this order."""
        units = slice(columns.start // self.unit_bytes, columns.end // self.unit_bytes)
        for index, stretch in self._stretches(blocks, units):
            some = rows.view(torch.int64).view(-1, self._words)[stretch]
            self._table.index_copy_(0, index, some)

    def _stretches(
        self, blocks: Sequence[int], columns: slice
    ) -> Iterator[tuple[Int64[torch.Tensor, " units"], slice]]:
        """Indexes for kernels, which the caller launches before it asks for the next."""
        numbers = np.asarray(blocks, dtype=np.int64)[:, None]
        units = (self._firsts[columns] + numbers * self._steps[columns]).ravel()
        for start in range(0, len(units), INDEX_UNITS):
            stretch = slice(start, min(start + INDEX_UNITS, len(units)))
            with self._placed(units[stretch]) as index:
                yield index, stretch

    @contextmanager
    def _placed(self, units: Int64[np.ndarray, " units"]) -> Iterator[torch.Tensor]:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock, self._ring.slot(units, stream) as here:
            yield tensor_at(here.data_ptr(), here.nbytes, self._device, torch.int64)


def cuda_rows(rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]]) -> CudaRows | None:
    """The rows as one table, where they can be."""
    if rows[0].device.type != "cuda":
        return None
    start = min(row.data_ptr() for row in rows)
    sizes = [size for row in rows for size in (row.data_ptr() - start, row.stride(0), row.shape[1])]
    unit_bytes = math.gcd(*sizes)
    if (finer := math.gcd(unit_bytes, MAX_UNIT_BYTES)) >= MIN_UNIT_BYTES:
        unit_bytes = finer
    gpu = load_driver().device(rows[0].device.index or 0)
    is_aligned = not (unit_bytes % 8 or start % 8) and unit_bytes >= MIN_UNIT_BYTES
    if not is_aligned or not gpu.reads_registered_memory:
        return None
    try:
        return CudaRows(rows, unit_bytes, gpu)
    except TransportError:  # An engine that is short of memory pages by more launches.
        return None
