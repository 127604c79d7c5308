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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch

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


@runtime_checkable
class MappedSlab(Protocol):
    """Memory that this process can read and write through `tensor`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def tensor(self) -> torch.Tensor:
        """The whole slab, shape (nbytes,), uint8, on this side's device.

        Raises:
            ValueError: The slab is closed.
        """

    def close(self) -> None:
        """Unmap; copies must have been fenced. Harmless when repeated.

        Raises:
            BufferError: Tensors over this memory are still alive; nothing was unmapped.
        """


@runtime_checkable
class OwnedSlab(MappedSlab, Protocol):
    """A slab that this process created and may lend."""

    def export(self) -> Handle:
        """A fresh handle for one importer.

        Raises:
            TransportError: The slab is closed, or the driver or the limit of descriptors refuses.
        """


class Copier(Protocol):
    """Moves bytes between slabs and local tensors, on a stream of its own.

    One copier belongs to one thread. On CPUs a copy is done when `copy` returns; on GPUs it runs
    on the copier's stream, apart from the engine's work, and `fence` waits for it.
    """

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

    def copier(self) -> Copier:
        """A new copier, for the calling thread."""
