"""Host DRAM: the landing place of a spill, and copies between tensors that the CPU can see.

A landing area is private memory, huge-paged where possible, faulted in before anyone needs it and
pinned when a GPU will copy into it: first touch of fresh memory runs at a tenth of memcpy, and a
reclaim must not pay for that.

`HostCopier` moves bytes by one plain memcpy on the calling thread. It avoids torch's copy kernels
on purpose: from a background thread they would start a second OpenMP team beside the engine's and
compete with it for cores, and `index_copy_` runs at a seventh of memcpy. NumPy's `take` and indexed
assignment move whole rows with memcpy, release the GIL, and reach memcpy speed from 16 KiB rows on.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from typing_extensions import override

from aqualib.ranges import are_neighbours
from aqualib.transports.base import Copier, MappedSlab
from aqualib.transports.host_pages import HostMapping
from aqualib.transports.rows import (
    as_words,
    bytes_of,
    checked_rows,
    has_dense_rows,
    require_alike,
    require_bytes,
)

CPU: Final = torch.device("cpu")


def host_slab(
    nbytes: int,
    *,
    pin: Callable[[int, int], Callable[[], None]] | None = None,
    node: int | None = None,
) -> MappedSlab:
    """Private host memory, faulted in and ready for memcpy speed.

    Args:
        nbytes: Size, a positive multiple of the page size.
        pin: Registers the range with a GPU driver and returns how to undo that.
        node: The NUMA node to take it from, if it has that much.

    Raises:
        TransportError: Memory ran out, or the driver refused to pin it.
    """
    with contextlib.ExitStack() as undo:
        mapping = HostMapping(nbytes)
        undo.callback(mapping.unmap)
        if node is not None:
            mapping.prefer_node(node)
        mapping.populate()
        if pin is not None:
            undo.callback(pin(mapping.address, nbytes))
        return MappedSlab(mapping.address, nbytes, CPU, undo)


class HostCopier(Copier):
    """Copies on the calling thread; each is complete when the call returns."""

    is_synchronous = True

    @override
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        require_alike(dst, src)
        if _is_dense(dst) and _is_dense(src):
            ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)
        else:
            dst.copy_(src)

    @override
    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        if not (dst.is_cpu and src.is_cpu):
            self.copy(bytes_of(dst, dst_at, nbytes), bytes_of(src, src_at, nbytes))
            return
        require_bytes(dst, dst_at, nbytes)
        require_bytes(src, src_at, nbytes)
        ctypes.memmove(dst.data_ptr() + dst_at, src.data_ptr() + src_at, nbytes)

    @override
    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        rows = checked_rows(index, packed=dst, table=src)
        if not dst.nbytes:
            return
        if not has_dense_rows(src):
            torch.index_select(src, 0, index, out=dst)
        elif _is_one_stretch(rows, src):
            self.copy(dst, src[rows[0] : rows[-1] + 1])
        elif src.is_contiguous():
            # `clip` because `raise` would buffer the whole output; the rows are checked already.
            np.take(_bytes_of(src), rows, axis=0, out=_bytes_of(dst), mode="clip")
        else:
            # Rows at a stride: `take` would first make a dense copy of all of `src`.
            stride, row_bytes = src.stride(0) * src.element_size(), dst[0].nbytes
            base, to = src.data_ptr(), dst.data_ptr()
            for row in rows.tolist():
                ctypes.memmove(to, base + row * stride, row_bytes)
                to += row_bytes

    @override
    def scatter(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        rows = checked_rows(index, packed=src, table=dst)
        if not src.nbytes:
            return
        if not has_dense_rows(dst):
            dst.index_copy_(0, index, src)
        elif _is_one_stretch(rows, dst):
            self.copy(dst[rows[0] : rows[-1] + 1], src)
        else:
            _bytes_of(dst)[rows] = _bytes_of(src)

    @override
    def fence(self) -> None:
        """Nothing to wait for: copies are done when they return.

        The other process learns of them by a message, and the system call that carries it comes
        after these stores.
        """


def _is_one_stretch(rows: Int64[np.ndarray, " n"], table: torch.Tensor) -> bool:
    """Whether the rows lie next to each other in memory, in order."""
    return len(rows) == 1 or (table.is_contiguous() and are_neighbours(rows))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes, in order, are its value."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(table: torch.Tensor) -> UInt8[np.ndarray, "rows bytes"]:
    array: UInt8[np.ndarray, "rows bytes"] = as_words(table, torch.uint8).numpy()
    return array
