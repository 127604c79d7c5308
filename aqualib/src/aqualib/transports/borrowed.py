"""Slabs as tensors over memory that torch does not own, and the proof that no view of it is left.

Every transport maps memory by itself and hands it out as one uint8 tensor. Unmapping under a live
view is a crash that no exception precedes, so `close` decides by torch's own reference count: the
storage behind the tensor must have died with it. Views, reshapes, `.numpy()` arrays and memoryviews
all hold that storage, so whatever can still reach the bytes is seen.

This holds for host and device memory alike. `torch.frombuffer` keeps nothing alive and cannot tell;
`__cuda_array_interface__` ties a pointer to the device that owns it, while a slab of a peer must be
a tensor on the *importing* device.
"""

from __future__ import annotations

import abc
import threading
from typing import cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from aqualib.transports.base import MappedSlab


class BorrowedSlab(MappedSlab, abc.ABC):
    """`nbytes` bytes at `address` as a tensor; `_let_go` says how they are given back.

    Nothing is unmapped when the object is collected, because views may outlive it: close it.

    Args:
        address: First byte; stays mapped and accessible from `device` until `_let_go`.
        nbytes: Size in bytes.
        device: Where torch shall run operations on the tensor.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self._address = address
        self._nbytes = nbytes
        storage = cast(
            "torch.UntypedStorage",
            torch._C._construct_storage_from_data_pointer(address, device, nbytes),  # noqa: SLF001 - torch has no public constructor over a foreign pointer
        )
        self._tensor: torch.Tensor | None = _whole(storage)
        self._lock = threading.Lock()

    @property
    @override
    def nbytes(self) -> int:
        return self._nbytes

    @property
    @override
    def tensor(self) -> torch.Tensor:
        if (tensor := self._tensor) is not None:
            return tensor
        with self._lock:  # A `close` that is being refused may be about to put it back.
            if self._tensor is None:
                raise ValueError("the slab is closed")
            return self._tensor

    @override
    def close(self) -> None:
        with self._lock:
            if self._tensor is None:
                return
            remains = StorageWeakRef(self._tensor.untyped_storage())  # type: ignore[no-untyped-call] # torch's
            self._tensor = None
            # None when the storage is gone. Asking for a strong reference instead of `expired()`
            # leaves no moment in which a view could die between the question and the repair.
            survivor = cast(
                "torch.UntypedStorage | None",
                torch.UntypedStorage._new_with_weak_ptr(remains.cdata),  # noqa: SLF001 - torch's own way back from a weak reference
            )
            if survivor is not None:
                self._tensor = _whole(survivor)
                raise BufferError("tensors over the slab are still alive; drop them, then close")
            self._let_go()

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Give the memory back; called once, under the lock, when no view is left."""

    def __repr__(self) -> str:
        state = "closed" if self._tensor is None else f"at {self._address:#x}"
        return f"<{type(self).__name__} {self._nbytes} bytes {state}>"


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
