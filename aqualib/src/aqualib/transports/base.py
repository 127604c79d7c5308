"""The transport contract: how one process lends memory to another, in five verbs.

    exporter                                   importer
    create(nbytes) -> OwnedSlab
    slab.export()  -> Handle  --- socket --->  open(handle, nbytes) -> MappedSlab
                                               copier().copy(dst, src); fence()
                                               mapped.close()
    slab.close()

What every transport promises, and the contract suite checks on each:

- Both sides see the same bytes through `tensor`, a one-dimensional uint8 tensor on the side's own
  device, as soon as a copy has been fenced.
- A fresh slab reads as zeros. No other owner's bytes are ever visible in it.
- Physical memory lives until the exporter *and* every importer have closed (or died). An exporter
  that closes or is killed takes nothing away from an importer that has the slab open. (Legacy CUDA
  IPC cannot promise the latter: see `cuda_ipc`.)
- `close()` may be called twice. It refuses (`BufferError`) while tensors made from the slab are
  still alive, because unmapping under a live view is a crash, not an error.
- A `Handle` owns its descriptor and is closed by its last holder; an open descriptor pins
  the memory.

What none can promise: taking a mapping away from another process. See `aqua_protocol.slab`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aqua_protocol import TransportError, format_bytes

if TYPE_CHECKING:
    from aqua_protocol import TransportKind


@dataclass(slots=True)
class Handle:
    """What an importer needs to open one slab; single use.

    Attributes:
        payload: Transport-specific bytes, at most 256; empty when the descriptor says all.
        fd: An owned descriptor to travel by SCM_RIGHTS, or None for transports without one.
    """

    payload: bytes
    fd: int | None

    def close(self) -> None:
        """Close the descriptor, if it is still owned. Harmless when repeated."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedSlab:
    """Memory that this process can read and write through `tensor`.

    torch does not own that memory. Unmapping under a live view is a crash that no exception
    precedes, so `close` decides by torch's own reference count: the storage behind the tensor must
    have died with it. Views, `.numpy()` arrays and memoryviews all hold it, on host and device.
    (`torch.frombuffer` keeps nothing alive; `__cuda_array_interface__` ties a pointer to the device
    that owns it, while a slab of a peer must be a tensor on the *importing* device.)

    Nothing is unmapped when the object is collected, because views may outlive it: close it.

    Args:
        address: First byte; stays mapped and accessible from `device` while this is open.
        nbytes: Size in bytes.
        device: Where torch shall run operations on the tensor.
        undo: Gives the memory back. Taken over, and closed once, when no view is left; None where
            another slab gives it back.
    """

    def __init__(
        self, address: int, nbytes: int, device: torch.device, undo: ExitStack | None = None
    ) -> None:
        self.nbytes = nbytes
        self._address = address
        self._device = device
        self._tensor: torch.Tensor | None = tensor_at(address, nbytes, device, torch.uint8)
        self._lock = threading.Lock()
        self._undo = None if undo is None else undo.pop_all()

    @property
    def tensor(self) -> torch.Tensor:
        """The whole slab, shape (nbytes,), uint8, on this side's device.

        Raises:
            ValueError: The slab is closed.
        """
        if (tensor := self._tensor) is not None:
            return tensor
        with self._lock:  # A `close` that is being refused may be about to put it back.
            if self._tensor is None:
                raise ValueError("the slab is closed")
            return self._tensor

    @property
    def is_closed(self) -> bool:
        """Whether the memory is given back."""
        return self._tensor is None

    def close(self) -> None:
        """Unmap; copies must have been fenced. Harmless when repeated.

        Raises:
            BufferError: Tensors over this memory are still alive; nothing was unmapped.
        """
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
                self._tensor = _whole(survivor, self._device, torch.uint8)
                raise BufferError("tensors over the slab are still alive; drop them, then close")
            if self._undo is not None:
                self._undo.close()

    def __repr__(self) -> str:
        state = "closed" if self._tensor is None else f"at {self._address:#x}"
        return f"<{type(self).__name__} {self.nbytes} bytes {state}>"


def tensor_at(address: int, nbytes: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Memory that torch does not own, as a tensor over all of it, of one dimension."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)  # noqa: SLF001 - torch has no public constructor over a foreign pointer
    return _whole(cast("torch.UntypedStorage", storage), device, dtype)


def _whole(storage: torch.UntypedStorage, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


class OwnedSlab(MappedSlab):
    """A slab that this process created and may lend.

    Args:
        export: Makes a handle; called under the lock while the slab is open.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: torch.device,
        undo: ExitStack,
        export: Callable[[], Handle],
    ) -> None:
        super().__init__(address, nbytes, device, undo)
        self._export = export

    def export(self) -> Handle:
        """A fresh handle for one importer.

        Raises:
            TransportError: The slab is closed, or the driver or the limit of descriptors refuses.
        """
        with self._lock:
            if self._tensor is None:
                raise TransportError("a closed slab cannot be lent")
            return self._export()


class Copier(Protocol):
    """Moves bytes between slabs and local tensors, on a stream of its own.

    One copier belongs to one thread. On CPUs a copy is done when `copy` returns; on GPUs it runs
    on the copier's stream, apart from the engine's work, and `fence` waits for it.
    """

    is_synchronous: bool
    """Whether copies are done when they return, so that nothing has to wait for a fence."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy `src` into `dst` (same shape and dtype); may still be under way on return."""

    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        """Copy `nbytes` bytes from byte `src_at` of `src` to byte `dst_at` of `dst`, any dtypes.

        Both are contiguous. Says the same as `copy` of two views, but makes none where it can: a
        view costs some 50 us right after a copy that has emptied the caches.
        """

    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        """`dst[i] = src[index[i]]` for rows; dst (n, ...) contiguous, index int64 on CPU (n,).

        Raises:
            IndexError: An index is out of range; nothing was copied.
        """

    def scatter(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        """`dst[index[i]] = src[i]` for rows; src (n, ...) contiguous, index distinct.

        Raises:
            IndexError: An index is out of range; nothing was copied.
        """

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Submit gathers and scatters of the block together where that can be, at its end.

        They must not touch each other's rows; a fence in the block submits what there is.
        """
        yield

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Some memory on this side's device, shape (nbytes,), uint8, for copies within the block.

        Its contents are anything. It has been taken before: a device that is full has it too.
        """
        yield torch.empty(nbytes, dtype=torch.uint8)

    def fence(self) -> None:
        """Wait until every copy submitted so far is complete and visible to the other side."""


class Transport(Protocol):
    """One way to share memory. Instances are cheap and hold no slabs."""

    @property
    def kind(self) -> TransportKind:
        """Name on the wire."""

    @property
    def device(self) -> torch.device:
        """Device of this side's tensors."""

    def check(self) -> None:
        """Verify that the transport can work in this process.

        Raises:
            TransportUnavailableError: With what is missing and what to do about it.
        """

    def create(self, nbytes: int) -> OwnedSlab:
        """Allocate a zeroed slab.

        Raises:
            TransportError: Memory or descriptors ran out, or a size the transport cannot map: memfd
                wants whole pages, CUDA multiples of 2 MiB.
        """

    def open(self, handle: Handle, nbytes: int) -> MappedSlab:
        """Map a slab of another process; consumes the handle, also on failure.

        Raises:
            TransportError: The handle is not a slab of `nbytes`, or cannot be mapped here.
        """

    def create_host(self, nbytes: int) -> MappedSlab:
        """Host memory to spill to, faulted in (and pinned, where a GPU copies into it).

        First touch of fresh memory runs an order of magnitude below memcpy, and a reclaim must not
        pay for it: a landing area is prepared before a lease is accepted.

        Raises:
            TransportError: Memory or the limit of locked memory ran out.
        """

    def copier(self, *, is_background: bool = False) -> Copier:
        """A new copier, for the calling thread.

        Args:
            is_background: What it copies is at rest on both sides, so that it need not wait for
                the engine's work, and gives way to it.
        """

    def lanes(self, nbytes: int) -> int:
        """How many streams copies of so many bytes to or from peers' slabs are spread over."""
        del nbytes
        return 1

    def synchronize(self) -> None:
        """Wait for all that this process has queued on the device; a CPU has nothing queued.

        Raises:
            TransportError: The device has failed; it runs nothing any more.
        """


def require_multiple(nbytes: int, unit_bytes: int) -> None:
    """Refuse sizes that no slab can have.

    Raises:
        TransportError: Not a positive multiple of what is mapped at once.
    """
    if nbytes <= 0 or nbytes % unit_bytes:
        raise TransportError(
            f"{nbytes} bytes cannot be mapped",
            remedy=f"Choose a positive multiple of {format_bytes(unit_bytes)}.",
        )


def require_announced(size: int, nbytes: int) -> None:
    """Refuse a slab of another size than its owner said.

    Raises:
        TransportError: With both sizes.
    """
    if size != nbytes:
        raise TransportError(
            f"the slab has {size} bytes, {nbytes} were announced", size=size, announced=nbytes
        )
