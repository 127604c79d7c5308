"""Copies on a stream of their own, so that paging overlaps with the engine's kernels.

Order: a copy sees everything that the calling thread's current stream was given before it. The
engine's stream does not wait for the copier's; `fence` does, on the host.

Rows go by their size:

- Long runs (256 KiB and more on average) are copied where they lie, by the copy engines, in one
  batched submission of about 3 us. Drivers before CUDA 12.8 get one call per run.
- Short rows are packed first: `index_select` gathers them into a staging buffer in local memory
  and one large copy carries that to the slab; scattering is the mirror image. The gather kernel
  runs at the speed of local HBM for microseconds and leaves the link to the copy engines. A kernel
  that stores straight to the peer saves the buffer, but is slower than the copy engines (337-359
  against 371-380 GB/s on NVLink 4) and holds SMs for as long as the link takes.

The staging buffer is reused in stream order, so no wait is needed between its uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from typing_extensions import override

from aqua_protocol import KIB, MIB, TransportError
from aqualib.transports.base import Copier, MappedSlab, Transport
from aqualib.transports.cuda_driver import CudaDevice, CudaDriver, Words, load_driver
from aqualib.transports.host import HostCopier, host_slab
from aqualib.transports.rows import (
    RowRuns,
    as_words,
    bytes_of,
    checked_rows,
    has_dense_rows,
    require_alike,
    widest_word,
)

if TYPE_CHECKING:
    import numpy.typing as npt


LONG_RUN_BYTES: Final = 256 * KIB
"""Bytes from which a copy engine is as fast on pieces as on the whole
(benchmarks/gpu_transport.py). Doubled, runs of 256 to 512 KiB take the detour through the staging
buffer."""

STAGING_BYTES: Final = 32 * MIB
"""Bytes of the staging buffer: amortises three launches over 90 us of NVLink time, and is small
beside any model. Doubled, 32 MiB less for the engine."""

MAX_IN_FLIGHT: Final = 4096
"""Tensors kept alive before the copier fences by itself. Doubled, an engine that never waits keeps
twice as many."""


class CudaCopier(Copier):
    """Copies between this GPU, its peers' slabs and host memory.

    Tensors handed in are kept alive until `fence`. Host memory should be pinned (`create_host`);
    pageable memory works, and waits.

    Args:
        device: The GPU whose copy engines do the work.
        gpu: The same GPU in the driver's terms.

    Raises:
        TransportError: No room for the staging buffer. It is taken now, since a reclaim must not
            wait for memory on a GPU that is full.
    """

    is_synchronous = False

    def __init__(self, device: torch.device, gpu: CudaDevice) -> None:
        self._device = device
        self._gpu = gpu
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        self._in_flight: list[torch.Tensor] = []
        self._host = HostCopier()
        try:
            with torch.cuda.stream(self._stream):
                self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise TransportError(
                f"no room for a {STAGING_BYTES >> 20} MiB staging buffer on {device}",
                remedy="Leave the library some memory: lower the engine's memory fraction.",
            ) from error

    @override
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        require_alike(dst, src)
        if dst.is_cpu and src.is_cpu:
            self._host.copy(dst, src)
            return
        self._begin(dst, src)
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    @override
    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        if dst.is_cpu and src.is_cpu:
            self._host.copy_bytes(dst, dst_at, src, src_at, nbytes)
        else:
            self.copy(bytes_of(dst, dst_at, nbytes), bytes_of(src, src_at, nbytes))

    @override
    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        if dst.is_cpu and src.is_cpu:
            self._host.gather(dst, src, index)
        else:
            self._copy_rows(index, packed=dst, table=src, into_table=False)

    @override
    def scatter(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        if dst.is_cpu and src.is_cpu:
            self._host.scatter(dst, src, index)
        else:
            self._copy_rows(index, packed=src, table=dst, into_table=True)

    @override
    def fence(self) -> None:
        self._stream.synchronize()
        self._in_flight.clear()

    def _begin(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Order what follows after the caller's work, and keep the tensors until the fence."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self.fence()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._in_flight += (dst, src)

    def _copy_rows(
        self, index: torch.Tensor, *, packed: torch.Tensor, table: torch.Tensor, into_table: bool
    ) -> None:
        rows = checked_rows(index, packed=packed, table=table)
        if not packed.nbytes:
            return
        self._begin(packed, table)
        runs = RowRuns.of(rows, table)
        if not _goes_by_staging(packed, table, runs):
            self._copy_runs(runs, packed=packed, table=table, into_table=into_table)
            return
        with torch.cuda.stream(self._stream):
            table, packed = _as_tables(table, packed)
            where = index.to(self._device)
            for rows_of_stage, stage in self._stages(packed):
                if into_table:
                    stage.copy_(packed[rows_of_stage], non_blocking=True)
                    table.index_copy_(0, where[rows_of_stage], stage)
                else:
                    torch.index_select(table, 0, where[rows_of_stage], out=stage)
                    packed[rows_of_stage].copy_(stage, non_blocking=True)

    def _stages(self, packed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Cut `packed` into stretches of rows that fit the staging buffer, each with its view."""
        row = packed[0]
        count = STAGING_BYTES // row.nbytes
        for start in range(0, len(packed), count):
            rows = slice(start, min(start + count, len(packed)))
            shape = (rows.stop - start, *row.shape)
            nbytes = shape[0] * row.nbytes
            yield rows, self._staging[:nbytes].view(packed.dtype).view(shape)

    def _copy_runs(
        self, runs: RowRuns, *, packed: torch.Tensor, table: torch.Tensor, into_table: bool
    ) -> None:
        reachable = all(side.is_cuda or side.is_pinned() for side in (packed, table))
        if reachable and has_dense_rows(table):
            row_bytes = packed[0].nbytes
            in_packed = _addresses(packed, runs.packed_rows, row_bytes)
            in_table = _addresses(table, runs.table_rows, table.stride(0) * table.element_size())
            sizes = (runs.counts * row_bytes).astype(np.uint64)
            dsts, srcs = (in_table, in_packed) if into_table else (in_packed, in_table)
            self._gpu.copy_batch(dsts, srcs, sizes, self._stream.cuda_stream)
            return
        # Pageable memory and rows that are not one stretch of bytes: torch knows how.
        with torch.cuda.stream(self._stream):
            starts = zip(runs.table_rows.tolist(), runs.packed_rows.tolist(), strict=True)
            for (at, of), count in zip(starts, runs.counts.tolist(), strict=True):
                there, here = table[at : at + count], packed[of : of + count]
                dst, src = (there, here) if into_table else (here, there)
                dst.copy_(src, non_blocking=True)


def _goes_by_staging(packed: torch.Tensor, table: torch.Tensor, runs: RowRuns) -> bool:
    """Whether the rows are short and a kernel of this GPU can gather or scatter them."""
    return (
        table.is_cuda
        and packed.nbytes < LONG_RUN_BYTES * len(runs)
        and packed[0].nbytes <= STAGING_BYTES
    )


def _as_tables(table: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides as rows of wide words, so that kernels move eight bytes per thread."""
    if not has_dense_rows(table):
        return table, packed
    word = widest_word(table, packed)
    return as_words(table, word), as_words(packed, word)


def _addresses(table: torch.Tensor, rows: npt.NDArray[np.int64], stride_bytes: int) -> Words:
    return (table.data_ptr() + rows * stride_bytes).astype(np.uint64)


class CudaSide(Transport):
    """What the transports of GPUs have in common: this side's GPU, its copier, its host memory.

    Args:
        device: Where this side's tensors live.
        driver: The driver library; loaded when first needed.
    """

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._ordinal = device.index or 0
        self._driver = driver

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @override
    def create_host(self, nbytes: int) -> MappedSlab:
        return host_slab(nbytes, pin=self._gpu.pin)

    @override
    def copier(self) -> Copier:
        return CudaCopier(self._device, self._gpu)

    @override
    def synchronize(self) -> None:
        self._gpu.synchronize()

    @property
    def _gpu(self) -> CudaDevice:
        if self._driver is None:
            self._driver = load_driver()
        return self._driver.device(self._ordinal)
