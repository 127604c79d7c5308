"""Buffers beside an engine: device memory for rows on their way, pinned memory for their indexes.

One pool for each GPU of a process, whatever the number of threads that copy: its size is known when
the first slab of host memory is made, which is before the first lease, and nothing later waits for
memory on a GPU that is full. torch's allocator is not asked, because it keeps what one stream freed
from every other.

A buffer is shared in the order of the device: who takes one has its stream wait for the stream that
had it last. No host thread waits, except for the lock while work is being queued.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aqua_protocol import MIB, TransportError
from aqualib.transports.base import tensor_at
from aqualib.transports.cuda_stream import CudaEvent
from aqualib.transports.host import host_slab
from aqualib.transports.host_pages import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Int64

    from aqualib.transports.cuda_driver import CudaDevice
    from aqualib.transports.cuda_stream import CudaStream

STAGING_BYTES: Final = 32 * MIB
"""Bytes of rows in a buffer: amortises three launches over 90 us of NVLink time, and is small
beside any model. Doubled, 64 MiB less for the engine."""

BUFFERS: Final = 2
"""Buffers of a GPU: one for what comes in beside one for what goes out. Doubled, 64 MiB less for
the engine, and four threads could page at once."""

INDEX_ROWS: Final = 8192
"""Rows whose index fits a slot of the ring: those of 4 KiB fill a buffer. Doubled, shorter rows
need fewer submissions, and the ring takes 1 MiB."""

INDEX_SLOTS: Final = 8
"""Slots of the ring in pinned memory; the host waits when it is that far ahead of the device.
Doubled, it waits later, and the ring takes 1 MiB."""


class PinnedBuffer:
    """Pinned memory for indexes that kernels and copies are about to read, slot after slot.

    Used under a lock of the owner's. Unpinned with the process, like the staging buffers.

    Args:
        row_count: Rows that fit a slot.
    """

    def __init__(self, gpu: CudaDevice, row_count: int, slot_count: int) -> None:
        nbytes = -(-row_count * slot_count * 8 // PAGE_BYTES) * PAGE_BYTES
        self._read = [CudaEvent(gpu) for _ in range(slot_count)]
        # Last: unlike events, nothing unpins it where what follows fails.
        self._slab = host_slab(nbytes, pin=gpu.pin, node=gpu.host_node)
        self._rows = self._slab.tensor.view(torch.int64)
        self._row_count = row_count
        self._next = 0

    @contextlib.contextmanager
    def slot(
        self, rows: Int64[np.ndarray, " n"], stream: int
    ) -> Iterator[Int64[torch.Tensor, " n"]]:
        """A copy of `rows` that stays until what the stream is given in the block has run."""
        number, self._next = self._next, (self._next + 1) % len(self._read)
        self._read[number].synchronize()
        here = self._rows[number * self._row_count :][: len(rows)]
        here.numpy()[:] = rows
        try:
            yield here
        finally:
            self._read[number].record(stream)


class StagingBuffer:
    """Room for rows on a GPU, used by one stream after the other.

    Attributes:
        rows: The room, shape (STAGING_BYTES,), uint8; its contents are the present user's.
    """

    def __init__(self, gpu: CudaDevice, device: torch.device) -> None:
        index_bytes = INDEX_ROWS * 8
        unit = gpu.granularity
        nbytes = -(-(STAGING_BYTES + index_bytes) // unit) * unit
        self.last_use: Final = CudaEvent(gpu)
        memory = gpu.allocate(nbytes)
        try:
            address = gpu.map(memory, nbytes)
        finally:
            gpu.release(memory)  # The mapping keeps it, for the life of the process.
        try:
            self._ring = PinnedBuffer(gpu, INDEX_ROWS, INDEX_SLOTS)
        except TransportError:
            gpu.unmap(address, nbytes)
            raise
        self.rows: Final = tensor_at(address, STAGING_BYTES, device, torch.uint8)
        index = tensor_at(address + STAGING_BYTES, index_bytes, device, torch.uint8)
        self._index = index.view(torch.int64)
        self.lock: Final = threading.Lock()

    def put_index(
        self, rows: Int64[np.ndarray, " n"], stream: CudaStream
    ) -> Int64[torch.Tensor, " n"]:
        """Queue the way of an index to the GPU; at most `INDEX_ROWS`.

        The caller has made the stream torch's current one. The tensor is good for what the stream
        is given before the next call.
        """
        there = self._index[: len(rows)]
        with self._ring.slot(rows, stream.handle) as here:
            there.copy_(here, non_blocking=True)
        return there


class StagingPool:
    """The buffers of one GPU, as many as it had room for."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._buffers: list[StagingBuffer] = []
        self._lock = threading.Lock()
        self._turn = 0

    def prepare(self, device: torch.device) -> None:
        """Take the memory, if that has not been done.

        Raises:
            TransportError: Not even one buffer fits.
        """
        with self._lock:
            if self._buffers:
                return
            try:
                while len(self._buffers) < BUFFERS:
                    self._buffers.append(StagingBuffer(self._gpu, device))
            except TransportError as error:
                if self._buffers:
                    return  # One is enough; who needs two waits, on the device.
                raise TransportError(
                    f"no room for a {STAGING_BYTES >> 20} MiB staging buffer on {device}: "
                    f"{error.message}",
                    remedy=error.remedy
                    or "Leave the library some memory: lower the engine's memory fraction.",
                ) from error

    @contextlib.contextmanager
    def buffer(self, stream: CudaStream) -> Iterator[StagingBuffer]:
        """A buffer for what the stream is given within the block."""
        with self._lock:
            self._turn += 1
            first = self._turn
            buffers = self._buffers
        assert buffers, "the pool was not prepared"
        order = [buffers[(first + n) % len(buffers)] for n in range(len(buffers))]
        chosen = next((b for b in order if b.lock.acquire(blocking=False)), None)
        if chosen is None:
            chosen = order[0]
            chosen.lock.acquire()
        try:
            chosen.last_use.hold_back(stream.handle)
            try:
                yield chosen
            finally:
                chosen.last_use.record(stream.handle)
        finally:
            chosen.lock.release()
