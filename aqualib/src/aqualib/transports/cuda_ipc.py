"""Slabs in device memory, shared by legacy CUDA IPC handles: the fallback.

For drivers and containers where memory cannot be exported as a descriptor. The handle is 64 bytes
and names a whole `cuMemAlloc` allocation, so slabs are multiples of 2 MiB: smaller allocations
share a block, and a handle to one would open its neighbours.

How it falls short of `cuda_vmm`, and what is done about it:

- Nothing counts references. Each handle carries a release pipe (see `release_pipe`); memory is
  freed when the last importer has let go, if need be after `close`.
- An exporter that dies takes the promise with it: what the importer then reads is undefined by
  CUDA. Importers that cannot recompute should use checksums, or `cuda_vmm`.
- A process cannot open its own handle, and cannot open one of a process that has the same pid in
  another pid namespace. Both are refused by name.

Source: CUDA Driver API, "Memory Management", `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from typing import Final

from typing_extensions import override

from aqua_protocol import MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib.transports.base import (
    Handle,
    MappedSlab,
    OwnedSlab,
    require_announced,
    require_multiple,
)
from aqualib.transports.cuda_copier import CudaSide
from aqualib.transports.cuda_driver import CudaError
from aqualib.transports.release_pipe import DEFERRED_FREE, ReleasePipes

PAYLOAD: Final = struct.Struct("<Q16s64s")
"""Size in bytes; name of the exporting process; the CUDA IPC handle."""

BLOCK_BYTES: Final = 2 * MIB
"""Bytes; cuMemAlloc gives allocations of this multiple blocks of their own. It is CUDA's; doubled,
slabs would have to be larger than needed."""

_THIS_PROCESS: Final = secrets.token_bytes(16)
"""Pids repeat across namespaces; this does not. A forked child cannot use CUDA anyway."""

_CAUSES: Final = {
    1: "The lender's GPU is probably not visible here: widen CUDA_VISIBLE_DEVICES or the "
    "container's device list.",
    201: "Lender and borrower probably have the same pid in different pid namespaces: share one "
    "(hostPID or shareProcessNamespace), or use cuda_vmm.",
}
"""What CUDA's error numbers mean for `cuIpcOpenMemHandle`."""


class CudaIpcTransport(CudaSide):
    """Slabs in the memory of a GPU, shared by IPC handle. See the module docstring.

    Importers need not use the exporter's GPU.
    """

    kind = TransportKind.CUDA_IPC

    @override
    def check(self) -> None:
        gpu = self._gpu
        try:  # A slab and a handle to it; opening one takes another process.
            with contextlib.closing(self.create(BLOCK_BYTES)) as slab:
                slab.export().close()
        except TransportError as error:
            raise TransportUnavailableError(
                f"cuda:{gpu.ordinal} does not share memory by IPC handle: {error.message}",
                remedy="Free a few MiB on the GPU if it is full, or use the cuda_vmm transport.",
                **error.details,
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedSlab:
        require_multiple(nbytes, BLOCK_BYTES)
        gpu, pipes = self._gpu, ReleasePipes()
        with contextlib.ExitStack() as undo:
            address = gpu.allocate_whole(nbytes)
            # At once, or when the last importer has let go.
            undo.callback(DEFERRED_FREE.free_when_released, pipes, lambda: gpu.free(address))
            gpu.zero(address, nbytes)

            def export() -> Handle:
                name = gpu.ipc_handle(address)
                return Handle(PAYLOAD.pack(nbytes, _THIS_PROCESS, name), pipes.add())

            return OwnedSlab(address, nbytes, self._device, undo, export)

    @override
    def open(self, handle: Handle, nbytes: int) -> MappedSlab:
        gpu = self._gpu
        with handle, contextlib.ExitStack() as undo:
            if len(handle.payload) != PAYLOAD.size or handle.fd is None:
                raise TransportError("not the handle of a CUDA IPC slab")
            size, exporter, name = PAYLOAD.unpack(handle.payload)
            require_announced(size, nbytes)
            if exporter == _THIS_PROCESS:
                raise TransportError(
                    "CUDA IPC cannot open a handle in the process that made it",
                    remedy="Use the slab itself, or the cuda_vmm transport.",
                )
            try:
                address = gpu.open_ipc(name)
            except CudaError as error:
                error.remedy = _CAUSES.get(error.details["result_code"], error.remedy)
                raise
            # Closed last: it tells the owner that the mapping is gone.
            release_pipe, handle.fd = handle.fd, None
            undo.callback(os.close, release_pipe)
            undo.callback(gpu.close_ipc, address)
            return MappedSlab(address, nbytes, self._device, undo)
