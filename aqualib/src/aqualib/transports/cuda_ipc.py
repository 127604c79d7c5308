"""Slabs in device memory, shared by legacy CUDA IPC handles through CuPy: the fallback.

For drivers and containers where memory cannot be exported as a descriptor. The handle is 64 bytes
and names a whole `cudaMalloc` allocation, so slabs are multiples of 2 MiB: smaller allocations
share a block, and a handle to one would open its neighbours.

How it falls short of `cuda_vmm`, and what is done about it:

- Nothing counts references. Each handle carries a release pipe (see `release_pipe`); memory is
  freed when the last importer has let go, if need be after `close`.
- An exporter that dies takes the promise with it: what the importer then reads is undefined by
  CUDA. Importers that cannot recompute should use checksums, or `cuda_vmm`.
- An importer that closes its release pipe and keeps its mapping is believed; what it sees once the
  memory is freed is undefined by CUDA, too. Tenants that do not trust each other need `cuda_vmm`.
- A process cannot open its own handle, and cannot open one of a process that has the same pid in
  another pid namespace. Both are refused by name.

Source: CUDA Runtime API, "Device Management", `cudaIpcGetMemHandle` and `cudaIpcOpenMemHandle`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from typing import Any, Final

import torch
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
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.release_pipe import DEFERRED_FREE, ReleasePipes

PAYLOAD: Final = struct.Struct("<Q16s64s")
"""Size in bytes; name of the exporting process; the CUDA IPC handle."""

BLOCK_BYTES: Final = 2 * MIB
"""Bytes; cudaMalloc gives allocations of this multiple blocks of their own. It is CUDA's; doubled,
slabs would have to be larger than needed."""

_THIS_PROCESS: Final = secrets.token_bytes(16)
"""Pids repeat across namespaces; this does not. A forked child cannot use CUDA anyway."""

_CAUSES: Final = {
    1: "The lender's GPU is probably not visible here: widen CUDA_VISIBLE_DEVICES or the "
    "container's device list.",
    201: "Lender and borrower probably have the same pid in different pid namespaces: share one "
    "(hostPID or shareProcessNamespace), or use cuda_vmm.",
}
"""What CUDA's error numbers mean for `cudaIpcOpenMemHandle`."""


class CupyRuntime:
    """CUDA's runtime on one GPU, by CuPy.

    Raises:
        TransportUnavailableError: CuPy is not installed or does not fit the driver.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise TransportUnavailableError(
                f"cuda_ipc needs CuPy: {error}",
                remedy="Install cupy-cuda12x or cupy-cuda13x, whichever fits the driver.",
            ) from error
        self._device = cupy.cuda.Device(ordinal)
        self._runtime: Any = cupy.cuda.runtime

    def call(self, name: str, argument: int | bytes) -> Any:  # noqa: ANN401 - CuPy is untyped
        """Call `cuda<name>`: an address for a size or a handle, a handle for an address.

        Raises:
            TransportError: The result was not success.
        """
        try:
            with self._device:
                return getattr(self._runtime, name)(argument)
        except self._runtime.CUDARuntimeError as error:
            status = int(error.status)
            raise TransportError(
                f"{name} failed: {error}",
                remedy=_CAUSES.get(status, "") if name == "ipcOpenMemHandle" else "",
                call=name,
                result_code=status,
            ) from error


class CudaIpcTransport(CudaSide):
    """Slabs in the memory of a GPU, shared by IPC handle. See the module docstring.

    Importers need not use the exporter's GPU.

    Args:
        device: Where this side's tensors live.
        driver: The driver library; loaded when first needed.
        runtime: Likewise.
    """

    kind = TransportKind.CUDA_IPC

    def __init__(
        self,
        device: torch.device,
        driver: CudaDriver | None = None,
        runtime: CupyRuntime | None = None,
    ) -> None:
        super().__init__(device, driver)
        self._runtime = runtime

    @override
    def check(self) -> None:
        try:  # A slab and a handle to it; opening one takes another process.
            with contextlib.closing(self.create(BLOCK_BYTES)) as slab:
                slab.export().close()
        except TransportError as error:
            raise TransportUnavailableError(
                f"cuda:{self._ordinal} does not share memory by IPC handle: {error.message}",
                remedy="Free a few MiB on the GPU if it is full, or use the cuda_vmm transport.",
                **error.details,
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedSlab:
        require_multiple(nbytes, BLOCK_BYTES)
        call, pipes = self._call, ReleasePipes()
        with contextlib.ExitStack() as undo:
            address = int(call("malloc", nbytes))
            # At once, or when the last importer has let go.
            undo.callback(DEFERRED_FREE.free_when_released, pipes, lambda: call("free", address))
            self._gpu.zero(address, nbytes)

            def export() -> Handle:
                name = bytes(call("ipcGetMemHandle", address))
                return Handle(PAYLOAD.pack(nbytes, _THIS_PROCESS, name), pipes.add())

            return OwnedSlab(address, nbytes, self._device, undo, export)

    @override
    def open(self, handle: Handle, nbytes: int) -> MappedSlab:
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
            address = int(self._call("ipcOpenMemHandle", name))
            # Closed last: it tells the owner that the mapping is gone.
            release_pipe, handle.fd = handle.fd, None
            undo.callback(os.close, release_pipe)
            undo.callback(self._call, "ipcCloseMemHandle", address)
            return MappedSlab(address, nbytes, self._device, undo)

    def _call(self, name: str, argument: int | bytes) -> Any:  # noqa: ANN401 - CuPy is untyped
        if self._runtime is None:
            self._runtime = CupyRuntime(self._ordinal)
        return self._runtime.call(name, argument)
