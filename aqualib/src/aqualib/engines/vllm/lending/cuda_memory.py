"""KV memory on a GPU: addresses that stay, with physical memory behind them by the granule.

CUDA's virtual memory management keeps addresses and memory apart. Addresses are reserved once and
the engine's kernels, its captured graphs among them, use them for life; each granule of physical
memory (2 MiB) can be unmapped, which gives it back to the driver, and replaced by another.

Unmapping under a kernel is a fault of the whole context. `kv_lending` releases only what no step
uses that has not delivered its output; the device is waited for nevertheless, since kernels may
follow a step's output (a draft model's, say).

Neighbours are unmapped by one call of the driver, and restored with one call for their rights and
one to clear them, whatever their number. (kvcached measured 193 us to create a granule on an A100,
36 us for rights and 26 us to unmap.)

Addresses without memory of their own show zeros, all the same granule of them, to be read and not
written, where the driver can do that. A kernel that looks ahead of its block table reads zeros
there instead of ending the context; one that writes is a bug, and still ends it.

Not promised: that memory is there when it is wanted back. On a GPU that is shared with others the
driver may refuse, `restore` then changes nothing, and the informer asks again at its next look.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aqua_protocol import TransportUnavailableError
from aqualib.ranges import Range, runs_of
from aqualib.transports.base import tensor_at
from aqualib.transports.cuda_driver import CudaDevice, CudaError, load_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.absent: GranuleMask = np.zeros(0, np.bool_)
        # A granule that holes show, made with the first cache; and the holes that show it.
        self._zeros: int | None = None
        self._shown: GranuleMask = np.zeros(0, np.bool_)

    @property
    def regions(self) -> list[Range]:
        """See `KvMemory.regions`."""
        return list(self._regions)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `KvMemory.allocate`."""
        whole = -(-nbytes // self.granule_bytes) * self.granule_bytes
        torch.cuda.empty_cache()  # What torch holds in reserve, the driver does not have.
        region = Range(self._gpu.reserve(whole), whole)
        if self._zeros is None:
            try:
                self._zeros = self._new_zeros(region.start)
            except CudaError:
                self._gpu.free_reserved(region.start, whole)
                raise
        self._regions.append(region)
        before = len(self.absent)
        new = (0, whole // self.granule_bytes)
        self.absent = np.pad(self.absent, new, constant_values=True)
        self._shown = np.pad(self._shown, new)
        self.restore(np.arange(len(self.absent)) >= before)
        return tensor_at(region.start, nbytes, self._device, torch.int8)

    def release(self, granules: GranuleMask) -> None:
        """See `KvMemory.release`."""
        self._gpu.synchronize()
        for run in self._runs(granules):
            self._gpu.unmap_at(run.start, run.size)
            self.absent[self._within(run)] = True
            self._show_zeros(run)

    def restore(self, granules: GranuleMask) -> None:
        """See `KvMemory.restore`."""
        memory: list[int] = []
        with contextlib.ExitStack() as handles, contextlib.ExitStack() as undo:
            for _ in range(int(granules.sum())):
                memory.append(self._gpu.allocate(self.granule_bytes))
                handles.callback(self._gpu.release, memory[-1])
            for run in self._runs(granules):
                of_run, memory = self._split(memory, run)
                self._hide_zeros(run)
                undo.callback(self._show_zeros, run)
                self._gpu.map_run(run.start, of_run, self.granule_bytes)
                undo.callback(self._gpu.unmap_at, run.start, run.size)
                self._gpu.zero(run.start, run.size)
            # The mappings keep the memory from here on.
            self.absent = self.absent & ~granules
            undo.pop_all()

    def close(self) -> None:
        """See `KvMemory.close`."""
        self._gpu.synchronize()
        for run in self._runs(self._shown | ~self.absent):
            self._gpu.unmap_at(run.start, run.size)
        for region in self._regions:
            self._gpu.free_reserved(region.start, region.size)
        self._regions.clear()
        self.absent, self._shown = self.absent[:0], self._shown[:0]
        if self._zeros is not None:
            self._gpu.release(self._zeros)
            self._zeros = None

    def _show_zeros(self, run: Range) -> None:
        """Have a stretch without memory read as zeros, if the driver has them and lets it."""
        if self._zeros is None:
            return
        handles = [self._zeros] * (run.size // self.granule_bytes)
        with contextlib.suppress(CudaError):
            self._gpu.map_run(run.start, handles, self.granule_bytes, is_writable=False)
            self._shown[self._within(run)] = True

    def _hide_zeros(self, run: Range) -> None:
        """Leave nothing behind a stretch."""
        within = np.zeros_like(self._shown)
        within[self._within(run)] = True
        for shown in self._runs(within & self._shown):
            self._gpu.unmap_at(shown.start, shown.size)
            self._shown[self._within(shown)] = False

    def _new_zeros(self, address: int) -> int:
        """A granule of zeros, cleared at an address that is free."""
        zeros = self._gpu.allocate(self.granule_bytes)
        try:
            self._gpu.map_at(address, zeros, self.granule_bytes)
            try:
                self._gpu.zero(address, self.granule_bytes)
            finally:
                self._gpu.unmap_at(address, self.granule_bytes)
        except CudaError:
            self._gpu.release(zeros)
            raise
        return zeros

    def _split(self, memory: list[int], run: Range) -> tuple[list[int], list[int]]:
        count = run.size // self.granule_bytes
        return memory[:count], memory[count:]

    def _runs(self, granules: GranuleMask) -> Iterator[Range]:
        """Addresses of each run of neighbours."""
        before = 0
        for region in self._regions:
            count = region.size // self.granule_bytes
            for run in runs_of(granules[before : before + count]):
                start = region.start + run.start * self.granule_bytes
                yield Range(start, run.size * self.granule_bytes)
            before += count

    def _within(self, run: Range) -> slice:
        """The numbers of the granules of a stretch."""
        before = 0
        for region in self._regions:
            if region.start <= run.start < region.end:
                first = before + (run.start - region.start) // self.granule_bytes
                return slice(first, first + run.size // self.granule_bytes)
            before += region.size // self.granule_bytes
        raise AssertionError(f"{run} is in none of {self._regions}")
