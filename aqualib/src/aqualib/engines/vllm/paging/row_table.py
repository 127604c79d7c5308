"""Blocks of all layers of a KV cache, gathered or scattered by one call.

A block lies in as many pieces as the model has layers, often twice as many. On a GPU a launch for
each, and one more to put it into place, were 320 for a part at 80 layers, which the host takes
longer to submit than a PCIe link to carry. On a CPU torch takes up to three times as long over
single pieces as memcpy, and a call for each hands the interpreter over as often. Here the caches
are one table: rows of `unit_bytes`, the largest size in which all pieces begin and end, from the
first byte of the lowest cache to the last of the highest. One call gathers rows of it by an index;
rows that belong to other tensors, or to none, are in no index and are not touched.

On a GPU the index is read by a kernel of torch's where the host has written it, in pinned memory: a
few kilobytes over the link beside megabytes, and no submission of its own. With the copy of the
store that makes two submissions for a part, whatever the number of layers.

Not everywhere: caches whose pieces have no size in common, and GPUs that cannot read the host's
registered memory, are gathered layer by layer (`BlockCopier`).
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from typing_extensions import override

from aqua_protocol import TransportError
from aqualib.transports.base import tensor_at
from aqualib.transports.cuda_buffers import PinnedBuffer
from aqualib.transports.cuda_driver import load_driver
from aqualib.transports.host import HostCopier

if TYPE_CHECKING:
    from aqualib.ranges import Range
    from aqualib.transports.cuda_driver import CudaDevice

MIN_UNIT_BYTES: Final = {"cpu": 64, "cuda": 512}
"""Bytes of a row of the table at least: what torch's allocators align to, so all but odd sizes have
it in common. Halved, an index of a part would be twice as long."""

MAX_UNIT_BYTES: Final = 4096
"""Bytes of a row at most, so that blocks can be cut between layers, and kernels find many rows to
spread over processors. Doubled, an index is half as long and cuts are as much coarser."""

INDEX_UNITS: Final = 65536
"""Rows of a launch at most: a staging buffer of 32 MiB in the shortest rows. Doubled, the ring
takes 2 MiB more of pinned memory."""

INDEX_SLOTS: Final = 4
"""Launches that may be queued before the host waits. Doubled, the ring takes 2 MiB more."""


class RowTable(ABC):
    """The rows of a KV cache as one table of a device's memory.

    Args:
        rows: From `block_rows`, all on one device.
        unit_bytes: What divides their places, strides and sizes.
    """

    def __init__(
        self, rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]], unit_bytes: int
    ) -> None:
        start = min(row.data_ptr() for row in rows)
        end = max(row[-1].data_ptr() + row.shape[1] for row in rows)
        table = tensor_at(start, end - start, rows[0].device, torch.uint8)
        self.unit_bytes: Final = unit_bytes
        self._table = self._as_units(table)
        self._keep = rows  # The table owns nothing.
        # Of each unit of a block: its row for block 0, and how far on that of the next block is.
        places = [
            (row.data_ptr() - start) // unit_bytes + np.arange(row.shape[1] // unit_bytes)
            for row in rows
        ]
        self._firsts = np.concatenate(places)
        steps = [row.stride(0) // unit_bytes for row in rows]
        self._steps = np.repeat(steps, [len(place) for place in places])

    @abstractmethod
    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        """Copy blocks into rows, in this order; on a GPU by queued kernels."""

    @abstractmethod
    def scatter(
        self,
        rows: UInt8[torch.Tensor, "blocks column_bytes"],
        blocks: Sequence[int],
        columns: Range,
    ) -> None:
        """Copy rows into these bytes of distinct blocks, in this order, likewise."""

    def _units(self, blocks: Sequence[int], columns: Range | None) -> Int64[np.ndarray, " units"]:
        """Rows of the table that hold these bytes of blocks, in order; by default all bytes."""
        some = slice(None)
        if columns is not None:
            some = slice(columns.start // self.unit_bytes, columns.end // self.unit_bytes)
        numbers = np.asarray(blocks, dtype=np.int64)[:, None]
        units: Int64[np.ndarray, " units"] = self._firsts[some] + numbers * self._steps[some]
        return units.ravel()

    def _as_units(self, memory: UInt8[torch.Tensor, "*rows nbytes"]) -> torch.Tensor:
        """Memory as units, in words: kernels move one element per thread; a view."""
        return memory.view(torch.int64).view(-1, self.unit_bytes // torch.int64.itemsize)


class HostRows(RowTable):
    """A table in the host's memory; copies are done when they return."""

    _copier = HostCopier()

    @override
    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        index = torch.from_numpy(self._units(blocks, None))
        self._copier.gather(self._as_units(into), self._table, index)

    @override
    def scatter(
        self,
        rows: UInt8[torch.Tensor, "blocks column_bytes"],
        blocks: Sequence[int],
        columns: Range,
    ) -> None:
        index = torch.from_numpy(self._units(blocks, columns))
        self._copier.scatter(self._table, self._as_units(rows), index)


class CudaRows(RowTable):
    """A table in a GPU's memory.

    Args:
        rows: As for `RowTable`.
        unit_bytes: Likewise.
        gpu: Theirs.

    Raises:
        TransportError: No host memory can be pinned.
    """

    def __init__(
        self,
        rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]],
        unit_bytes: int,
        gpu: CudaDevice,
    ) -> None:
        super().__init__(rows, unit_bytes)
        self._device = rows[0].device
        self._ring = PinnedBuffer(gpu, INDEX_UNITS, INDEX_SLOTS)
        self._lock = threading.Lock()

    @override
    def gather(
        self, blocks: Sequence[int], into: UInt8[torch.Tensor, "blocks block_bytes"]
    ) -> None:
        some = self._as_units(into)
        for index, stretch in self._stretches(self._units(blocks, None)):
            torch.index_select(self._table, 0, index, out=some[stretch])

    @override
    def scatter(
        self,
        rows: UInt8[torch.Tensor, "blocks column_bytes"],
        blocks: Sequence[int],
        columns: Range,
    ) -> None:
        some = self._as_units(rows)
        for index, stretch in self._stretches(self._units(blocks, columns)):
            self._table.index_copy_(0, index, some[stretch])

    def _stretches(
        self, units: Int64[np.ndarray, " units"]
    ) -> Iterator[tuple[Int64[torch.Tensor, " units"], slice]]:
        """Indexes for kernels, which the caller launches before it asks for the next."""
        for start in range(0, len(units), INDEX_UNITS):
            stretch = slice(start, min(start + INDEX_UNITS, len(units)))
            with self._placed(units[stretch]) as index:
                yield index, stretch

    @contextmanager
    def _placed(self, units: Int64[np.ndarray, " units"]) -> Iterator[torch.Tensor]:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock, self._ring.slot(units, stream) as here:
            yield tensor_at(here.data_ptr(), here.nbytes, self._device, torch.int64)


def row_table(rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]]) -> RowTable | None:
    """The rows as one table, where they can be."""
    device = rows[0].device
    if device.type not in MIN_UNIT_BYTES:
        return None
    least_bytes = MIN_UNIT_BYTES[device.type]
    start = min(row.data_ptr() for row in rows)
    sizes = [size for row in rows for size in (row.data_ptr() - start, row.stride(0), row.shape[1])]
    unit_bytes = math.gcd(*sizes)
    if (finer := math.gcd(unit_bytes, MAX_UNIT_BYTES)) >= least_bytes:
        unit_bytes = finer
    if unit_bytes % 8 or start % 8 or unit_bytes < least_bytes:
        return None
    if device.type == "cpu":
        return HostRows(rows, unit_bytes)
    gpu = load_driver().device(device.index or 0)
    try:
        return CudaRows(rows, unit_bytes, gpu) if gpu.reads_registered_memory else None
    except TransportError:  # An engine that is short of memory pages by more launches.
        return None
