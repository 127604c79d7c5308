"""KV memory on a GPU: addresses that stay, with physical memory behind them by the granule.

CUDA's virtual memory management keeps addresses and memory apart. Addresses are reserved once and
the engine's kernels, its captured graphs among them, use them for life; each granule of physical
memory (2 MiB) can be unmapped, which gives it back to the driver, and replaced by another.

Unmapping under a kernel is a fault of the whole context. `kv_lending` releases only what no step
uses that has not delivered its output; the device is waited for nevertheless, since kernels may
follow a step's output (a draft model's, say).

Not promised: that memory is there when it is wanted back. On a GPU that is shared with others the
driver may refuse, `restore` then changes nothing, and the informer asks again at its next look.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aqua_protocol import TransportUnavailableError
from aqualib.ranges import Range
from aqualib.transports.base import tensor_at
from aqualib.transports.cuda_driver import CudaDevice, load_driver

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import GranuleMask


class CudaKvMemory:
    """KV memory of a GPU, mapped and unmapped by the granule.

    Raises:
        TransportUnavailableError: The GPU, or what virtualises it, cannot map memory by hand.
    """

    def __init__(self, device: torch.device, gpu: CudaDevice | None = None) -> None:
        self._device = device
        self._gpu = gpu or load_driver().device(device.index or 0)
        if not self._gpu.shares_by_descriptor:
            raise TransportUnavailableError(
                f"{device} cannot map memory by hand, so a KV cache on it cannot be lent",
                remedy='Run without "lend"; lend what --gpu-memory-utilization leaves instead.',
            )
        self.granule_bytes: Final = self._gpu.granularity
        self.account: Final = None
        self._regions: list[Range] = []
        # Of each granule; 0 where there is no memory.
        self._memory = np.zeros(0, np.uint64)

    @property
    def regions(self) -> list[Range]:
        """See `KvMemory.regions`."""
        return list(self._regions)

    @property
    def absent(self) -> GranuleMask:
        """See `KvMemory.absent`."""
        return np.equal(self._memory, 0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `KvMemory.allocate`."""
        whole = -(-nbytes // self.granule_bytes) * self.granule_bytes
        torch.cuda.empty_cache()  # What torch holds in reserve, the driver does not have.
        region = Range(self._gpu.reserve(whole), whole)
        self._regions.append(region)
        before = len(self._memory)
        self._memory = np.concatenate(
            [self._memory, np.zeros(whole // self.granule_bytes, np.uint64)]
        )
        self.restore(np.arange(len(self._memory)) >= before)
        return tensor_at(region.start, nbytes, self._device, torch.int8)

    def release(self, granules: GranuleMask) -> None:
        """See `KvMemory.release`."""
        self._gpu.synchronize()
        for index in np.flatnonzero(granules):
            self._unmap(int(index))

    def restore(self, granules: GranuleMask) -> None:
        """See `KvMemory.restore`."""
        with contextlib.ExitStack() as undo:
            for index in np.flatnonzero(granules):
                self._map(int(index))
                undo.callback(self._unmap, int(index))
                self._gpu.zero(self._address_of(int(index)), self.granule_bytes)
            undo.pop_all()

    def close(self) -> None:
        """See `KvMemory.close`."""
        self.release(self._memory != 0)
        for region in self._regions:
            self._gpu.free_reserved(region.start, region.size)
        self._regions.clear()
        self._memory = self._memory[:0]

    def _map(self, index: int) -> None:
        memory = self._gpu.allocate(self.granule_bytes)
        try:
            self._gpu.map_at(self._address_of(index), memory, self.granule_bytes)
        except BaseException:
            self._gpu.release(memory)
            raise
        self._memory[index] = memory

    def _unmap(self, index: int) -> None:
        self._gpu.unmap_at(self._address_of(index), self.granule_bytes)
        memory, self._memory[index] = int(self._memory[index]), 0
        self._gpu.release(memory)

    def _address_of(self, index: int) -> int:
        offset = index * self.granule_bytes
        for region in self._regions:
            if offset < region.size:
                return region.start + offset
            offset -= region.size
        raise AssertionError(f"granule {index} is in none of {self._regions}")
