"""Tensors on the GPUs of a `Machine`: their memory, their type, and what a launch keeps of them."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch._C as torch_c  # noqa: N811 - a module

from harness.cuda.memory import GRANULE_BYTES, Physical, make_memory, reserve_addresses

if TYPE_CHECKING:
    from harness.cuda.torch_side import TorchSide

CPU: Final = torch.device("cpu")
BLOCK_BYTES: Final = 512
"""What torch's allocator rounds up to."""

construct = torch_c._construct_storage_from_data_pointer
"""torch's own, whatever stands in its place."""


class DeviceTensor(torch.Tensor):
    """A tensor on a GPU of the machine that is installed."""

    side: TorchSide | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        assert cls.side is not None, "a tensor of the stand-in outlived it"
        return cls.side.call(func, args, kwargs or {})


class CachingAllocator:
    """Device memory for tensors: freed blocks are kept by stream, and handed out again at once."""

    def __init__(self, side: TorchSide) -> None:
        self._side = side
        self._free: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}
        self.ordinals: dict[int, int] = {}
        self.reserved_bytes = 0

    def like(self, model: torch.Tensor, ordinal: int) -> torch.Tensor:
        """An unset tensor of the same shape, strides and type on a GPU."""
        span = sum((n - 1) * s for n, s in zip(model.shape, model.stride(), strict=True))
        nbytes = (span + 1) * model.element_size() if model.numel() else 0
        if not nbytes:
            return dress(torch.empty_strided(model.shape, model.stride(), dtype=model.dtype))
        storage = self._allocate(nbytes, ordinal)
        made = torch.empty(0, dtype=model.dtype).set_(storage, 0, model.shape, model.stride())
        return dress(made)

    def empty_cache(self) -> None:
        """Wait, and give every free block back to the driver."""
        machine = self._side.machine
        with machine.lock:
            for (device, _, size), blocks in self._free.items():
                machine.finish_device(device)
                while blocks:
                    at = blocks.pop()
                    mapping = machine.space.find(at)
                    assert mapping is not None, "a free block has no memory"
                    machine.unmap(mapping)
                    self.reserved_bytes -= size

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of a GPU."""
        machine = self._side.machine
        ordinal = self._side.ordinal_of(device)
        return machine.memory_bytes - machine.used[ordinal], machine.memory_bytes

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock a tensor for as long as it lives."""
        machine = self._side.machine
        machine.pin(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(tensor, machine.unpin, tensor.data_ptr())

    def _allocate(self, nbytes: int, ordinal: int) -> torch.UntypedStorage:
        machine, side = self._side.machine, self._side
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        with machine.lock:
            side.use(ordinal)
            key = (ordinal, side.current_stream(ordinal).found.number, size)
            at = self._free[key].pop() if self._free[key] else self._new_block(size, ordinal)
            array = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(at))
            weakref.finalize(array, self._release, key, at).atexit = False
            return torch.from_numpy(array).untyped_storage()

    def _new_block(self, size: int, ordinal: int) -> int:
        machine = self._side.machine
        whole = -(-size // GRANULE_BYTES) * GRANULE_BYTES if size > 1 << 20 else size
        whole = -(-whole // 4096) * 4096
        if machine.used[ordinal] + whole > machine.memory_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory (of the stand-in)")
        machine.used[ordinal] += whole
        memory = Physical(make_memory(ordinal, whole), ordinal, whole, is_ours=True)
        at = reserve_addresses(whole)
        mapping = machine.space.map(at, memory)
        for device in range(len(machine.visible)):
            machine.space.allow(mapping, device, writes=True)
        self.ordinals[at] = ordinal
        self.reserved_bytes += size
        return at

    def _release(self, key: tuple[int, int, int], at: int) -> None:
        machine = self._side.machine
        with machine.lock:
            mapping = machine.space.find(at)
            if mapping is not None and not mapping.is_gone:
                mapping.memory.log.forget(0, key[2])
                self._free[key].append(at)


class Frozen:
    """A tensor as addresses, which keep nothing alive; or a number, which travels with a launch."""

    def __init__(self, tensor: torch.Tensor, *, is_value: bool = False) -> None:
        storage = tensor.untyped_storage()
        self._base, self._nbytes = storage.data_ptr(), storage.nbytes()
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._value = tensor.clone() if is_value else None

    def thaw(self) -> torch.Tensor:
        """The tensor, over whatever is there now."""
        if self._value is not None:
            return self._value
        storage = construct(self._base, CPU, self._nbytes)
        plain = torch.empty(0, dtype=self._dtype)
        return plain.set_(storage, self._offset, self._shape, self._stride)


def dress(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a device tensor, which is no view of the plain one."""
    return torch.Tensor._make_subclass(DeviceTensor, tensor)


def ranges_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Addresses and sizes of the dense stretches that a tensor is made of."""
    if not tensor.numel():
        return []
    dims = sorted(
        ((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s),
        reverse=True,
    )
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    starts = np.zeros(1, np.int64)
    for stride, count in dims:
        starts = (starts[:, None] + np.arange(count) * stride).ravel()
    size = tensor.element_size()
    return [(tensor.data_ptr() + int(at) * size, run * size) for at in starts]


def rows_of(table: torch.Tensor, index: torch.Tensor) -> list[tuple[int, int]]:
    """Addresses and sizes of the rows of a table with dense rows that an index names, each once."""
    assert table[0].is_contiguous(), "rows that are no stretches of bytes"
    step = table.stride(0) * table.element_size()
    return [(table.data_ptr() + row * step, table[0].nbytes) for row in sorted({*index.tolist()})]
