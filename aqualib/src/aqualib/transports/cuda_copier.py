"""Copies on a stream of their own, so that paging overlaps with the engine's kernels.

Order: a copy sees everything that the calling thread's current stream was given before it, unless
the copier is one for the background: what that moves is at rest, and it waits for no engine. The
engine's stream does not wait for the copier's; `fence` does, on the host.

Rows go by their size:

- Long runs are copied where they lie, by the copy engines, in one batched submission of about 3 us.
  Drivers before CUDA 12.8 get one call per run. From which length on is measured for each kind of
  GPU and each side that the rows go to or come from (see `gpu_thresholds`).
- Short rows are packed first: `index_select` gathers them into a staging buffer in local memory
  and one large copy carries that to the slab; scattering is the mirror image. The gather kernel
  runs at the speed of local HBM for microseconds and leaves the link to the copy engines. A kernel
  that stores straight to the peer saves the buffer, but is slower than the copy engines (337-359
  against 371-380 GB/s on NVLink 4) and holds SMs for as long as the link takes.

Staging buffers are the GPU's, not the copier's: see `cuda_buffers`.

A copier has one stream, and lanes beside it where one copy engine or one link is not enough (see
`gpu_thresholds`): a large copy is then cut in equal shares that begin together. The lanes follow
the stream and it follows them, so that in what order things happen is the same with any number.
Background copiers have no lanes: they take what is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from typing_extensions import override

from aqua_protocol import MIB
from aqualib.transports.base import Copier, MappedSlab, Transport
from aqualib.transports.cuda_buffers import INDEX_ROWS, STAGING_BYTES
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


MAX_IN_FLIGHT: Final = 4096
"""Tensors kept alive before the copier fences by itself. Doubled, an engine that never waits keeps
twice as many."""


MIN_LANE_BYTES: Final = 4 * MIB
"""Bytes of a lane's share at least: an engine takes 10 us for them over NVLink 4, about as long as
a host to submit a share and its two events. Doubled, copies of 8 to 16 MiB go by one lane."""


class CudaCopier(Copier):
    """Copies between this GPU, its peers' slabs and host memory.

    Tensors handed in are kept alive until `fence`. Host memory should be pinned (`create_host`);
    pageable memory works, and waits.

    Args:
        device: The GPU whose copy engines do the work.
        gpu: The same GPU in the driver's terms.
        is_background: Whether what it moves is at rest, so that it follows no stream.

    Raises:
        TransportError: No room for the staging buffers. They are taken now, since a reclaim must
            not wait for memory on a GPU that is full.
    """

    is_synchronous = False

    def __init__(
        self, device: torch.device, gpu: CudaDevice, *, is_background: bool = False
    ) -> None:
        self._device = device
        self._gpu = gpu
        gpu.staging.prepare(device)
        self._is_background = is_background
        self._stream = gpu.make_stream(is_background=is_background)
        self._as_torch = torch.cuda.ExternalStream(self._stream.handle, device)  # type: ignore[no-untyped-call] # torch's
        self._in_flight: list[torch.Tensor] = []
        limits = gpu.thresholds
        most = 1 if is_background else max(limits.device_lanes, limits.host_lanes)
        self._lanes = [gpu.make_stream() for _ in range(most - 1)]
        # What waits for the end of a batch; None outside of one.
        self._batch: list[CopyList] | None = None
        self._host = HostCopier()

    @override
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        require_alike(dst, src)
        if dst.is_cpu and src.is_cpu:
            self._host.copy(dst, src)
            return
        self._begin(dst, src)
        is_large = bool(self._lanes) and dst.nbytes >= 2 * MIN_LANE_BYTES
        if (is_large or self._batch is not None) and _is_reachable(dst) and _is_reachable(src):
            at, of, nbytes = (
                np.array([n], np.uint64) for n in (dst.data_ptr(), src.data_ptr(), dst.nbytes)
            )
            self._submit(CopyList(at, of, nbytes, is_to_device=dst.is_cuda and src.is_cuda))
            return
        with on_stream(self._as_torch):
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
    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        self._batch = []
        try:
            yield
            self._submit_batch()
        finally:
            self._batch = None

    @override
    @contextlib.contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        with self._gpu.staging.buffer(self._stream) as buffer:
            yield buffer.rows[:nbytes]

    @override
    def fence(self) -> None:
        self._submit_batch()
        self._stream.synchronize()
        self._in_flight.clear()

    def _begin(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Order what follows after the caller's work, and keep the tensors until the fence."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self.fence()
        if not self._is_background:
            self._stream.follow(torch.cuda.current_stream(self._device).cuda_stream)
        self._in_flight += (dst, src)

    def _copy_rows(
        self, index: torch.Tensor, *, packed: torch.Tensor, table: torch.Tensor, into_table: bool
    ) -> None:
        rows = checked_rows(index, packed=packed, table=table)
        if not packed.nbytes:
            return
        self._begin(packed, table)
        runs = RowRuns.of(rows, table)
        if not self._goes_by_staging(packed, table, runs):
            self._copy_runs(runs, packed=packed, table=table, into_table=into_table)
            return
        with on_stream(self._as_torch), self._gpu.staging.buffer(self._stream) as buffer:
            table, packed = _as_tables(table, packed)
            for rows_of_stage, stage in _stages(packed, buffer.rows):
                where = buffer.put_index(rows[rows_of_stage], self._stream)
                if into_table:
                    stage.copy_(packed[rows_of_stage], non_blocking=True)
                    table.index_copy_(0, where, stage)
                else:
                    torch.index_select(table, 0, where, out=stage)
                    packed[rows_of_stage].copy_(stage, non_blocking=True)

    def _submit_batch(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, None
            self._submit(CopyList.joined(batch))
            self._batch = []

    def _submit(self, copies: CopyList) -> None:
        """Enqueue copies, over several lanes where they are large enough; later in a batch."""
        if self._batch is not None:
            self._batch.append(copies)
            return
        count = lane_count(self._gpu, copies.nbytes, is_to_device=copies.is_to_device)
        lanes = [self._stream, *self._lanes[: count - 1]]
        if len(lanes) == 1:
            self._gpu.copy_batch(copies.dsts, copies.srcs, copies.sizes, self._stream.handle)
            return
        for lane in lanes[1:]:
            lane.follow(self._stream.handle)
        try:
            for lane, share in zip(lanes, copies.shares(len(lanes)), strict=True):
                self._gpu.copy_batch(share.dsts, share.srcs, share.sizes, lane.handle)
        finally:
            for lane in lanes[1:]:
                self._stream.follow(lane.handle)

    def _goes_by_staging(self, packed: torch.Tensor, table: torch.Tensor, runs: RowRuns) -> bool:
        """Whether the rows are short and a kernel of this GPU can gather or scatter them."""
        limits = self._gpu.thresholds
        long_run = limits.device_run_bytes if packed.is_cuda else limits.host_run_bytes
        return (
            table.is_cuda
            and packed.nbytes < long_run * len(runs)
            and packed[0].nbytes <= STAGING_BYTES
        )

    def _copy_runs(
        self, runs: RowRuns, *, packed: torch.Tensor, table: torch.Tensor, into_table: bool
    ) -> None:
        if has_dense_rows(table) and all(x.is_cuda or x.is_pinned() for x in (packed, table)):
            row_bytes = packed[0].nbytes
            in_packed = _addresses(packed, runs.packed_rows, row_bytes)
            in_table = _addresses(table, runs.table_rows, table.stride(0) * table.element_size())
            sizes = (runs.counts * row_bytes).astype(np.uint64)
            dsts, srcs = (in_table, in_packed) if into_table else (in_packed, in_table)
            is_to_device = packed.is_cuda and table.is_cuda
            self._submit(CopyList(dsts, srcs, sizes, is_to_device=is_to_device))
            return
        # Pageable memory and rows that are not one stretch of bytes: torch knows how.
        with on_stream(self._as_torch):
            starts = zip(runs.table_rows.tolist(), runs.packed_rows.tolist(), strict=True)
            for (at, of), count in zip(starts, runs.counts.tolist(), strict=True):
                there, here = table[at : at + count], packed[of : of + count]
                dst, src = (there, here) if into_table else (here, there)
                dst.copy_(src, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CopyList:
    """Copies that are submitted together; arrays of shape (n,).

    Attributes:
        dsts: Addresses.
        srcs: Addresses.
        sizes: Bytes of each.
        is_to_device: Both sides of all are memory of GPUs.
    """

    dsts: Words
    srcs: Words
    sizes: Words
    is_to_device: bool

    @classmethod
    def joined(cls, parts: list[CopyList]) -> CopyList:
        """All copies of several."""
        return cls(
            np.concatenate([part.dsts for part in parts]),
            np.concatenate([part.srcs for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            is_to_device=all(part.is_to_device for part in parts),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return int(self.sizes.sum())

    def shares(self, count: int) -> Iterator[CopyList]:
        """Cut into equal numbers of bytes, in order; a copy that lies across is cut in two."""
        ends = np.cumsum(self.sizes)
        starts = ends - self.sizes
        bounds = [self.nbytes * at // count for at in range(count + 1)]
        for low, high in pairwise(np.array(bounds, np.uint64)):
            inside = (ends > low) & (starts < high)
            first = np.maximum(starts[inside], low)
            skipped = first - starts[inside]
            sizes = np.minimum(ends[inside], high) - first
            yield CopyList(
                self.dsts[inside] + skipped,
                self.srcs[inside] + skipped,
                sizes,
                is_to_device=self.is_to_device,
            )


def lane_count(gpu: CudaDevice, nbytes: int, *, is_to_device: bool) -> int:
    """Streams that copies of so many bytes are spread over, as was measured on this kind of GPU."""
    limits = gpu.thresholds
    wanted = limits.device_lanes if is_to_device else limits.host_lanes
    return max(1, min(wanted, nbytes // MIN_LANE_BYTES))


def _is_reachable(tensor: torch.Tensor) -> bool:
    """Whether copy engines can take a tensor as it is: dense, and a GPU's or pinned."""
    is_dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and (tensor.is_cuda or tensor.is_pinned())


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:  # noqa: ANN401 - a stream of torch's, which is untyped
    """Have the thread launch on a stream of torch's, whatever its own device is.

    `torch.cuda.stream` alone goes back to the device that the thread came from, and makes a context
    there: half a GiB on GPU 0 for a thread that never used it.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _stages(packed: torch.Tensor, staging: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Cut `packed` into stretches of rows that fit the staging buffer, each with its view."""
    row = packed[0]
    count = min(STAGING_BYTES // row.nbytes, INDEX_ROWS)
    for start in range(0, len(packed), count):
        rows = slice(start, min(start + count, len(packed)))
        shape = (rows.stop - start, *row.shape)
        nbytes = shape[0] * row.nbytes
        yield rows, staging[:nbytes].view(packed.dtype).view(shape)


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
        self._gpu.staging.prepare(self._device)  # Part of the place that bytes land in.
        return host_slab(nbytes, pin=self._gpu.pin, node=self._gpu.host_node)

    @override
    def copier(self, *, is_background: bool = False) -> Copier:
        return CudaCopier(self._device, self._gpu, is_background=is_background)

    @override
    def lanes(self, nbytes: int) -> int:
        return lane_count(self._gpu, nbytes, is_to_device=True)

    @override
    def synchronize(self) -> None:
        self._gpu.synchronize()

    @property
    def _gpu(self) -> CudaDevice:
        if self._driver is None:
            self._driver = load_driver()
        return self._driver.device(self._ordinal)
