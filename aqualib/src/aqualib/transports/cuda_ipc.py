"""Slabs in device memory, shared by legacy CUDA IPC handles through CuPy: the fallback.

For drivers and containers where memory cannot be exported as a descriptor. The handle is 64 bytes
and names a whole `cudaMalloc` allocation, so slabs are multiples of 2 MiB: smaller allocations
share a block, and a handle to one would open its neighbours.

How it falls short of `cuda_vmm`, and what is done about it:

- Nothing counts references. Each handle carries a release pipe (see `release_pipe`); memory is
  freed when the last importer has let go, if need be after `close`.
- An exporter that dies takes the promise with it: what the importer then reads is undefined by
  CUDA. Importers that cannot recompute should use checksums, or `cuda_vmm`.
- A process cannot open its own handle, and cannot open one of a process that has the same pid in
  another pid namespace. Both are refused by name.

Source: CUDA Runtime API, "Device Management", `cudaIpcGetMemHandle` and `cudaIpcOpenMemHandle`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from typing_extensions import override

from aqua_protocol import (
    MIB,
    TransportError,
    TransportKind,
    TransportUnavailableError,
    format_bytes,
)
from aqualib.transports.base import Handle, OwnedSlab
from aqualib.transports.borrowed import BorrowedSlab
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_side import CudaSide
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


class Runtime(Protocol):
    """The CUDA runtime calls that this transport needs, on one device; they raise TransportError.

    An interface, so that the reference counting around it can be tested without a GPU.
    """

    def allocate(self, nbytes: int) -> int:
        """Device memory with an address of its own."""

    def free(self, address: int) -> None:
        """Give memory back that no process has mapped."""

    def handle_of(self, address: int) -> bytes:
        """The 64 bytes that another process opens."""

    def open(self, handle: bytes) -> int:
        """Map another process's memory; the address."""

    def close(self, address: int) -> None:
        """Unmap what `open` has mapped."""


class CupyRuntime(Runtime):
    """`Runtime` by CuPy.

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

    @override
    def allocate(self, nbytes: int) -> int:
        with self._calling("malloc"):
            return int(self._runtime.malloc(nbytes))

    @override
    def free(self, address: int) -> None:
        with self._calling("free"):
            self._runtime.free(address)

    @override
    def handle_of(self, address: int) -> bytes:
        with self._calling("ipcGetMemHandle"):
            return bytes(self._runtime.ipcGetMemHandle(address))

    @override
    def open(self, handle: bytes) -> int:
        with self._calling("ipcOpenMemHandle"):
            return int(self._runtime.ipcOpenMemHandle(handle))

    @override
    def close(self, address: int) -> None:
        with self._calling("ipcCloseMemHandle"):
            self._runtime.ipcCloseMemHandle(address)

    @contextlib.contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        try:
            with self._device:
                yield
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(
                f"{name} failed: {error}",
                remedy=_CAUSES.get(error.status, "") if name == "ipcOpenMemHandle" else "",
                call=name,
                result_code=int(error.status),
            ) from error


class IpcSlab(BorrowedSlab):
    """A slab of another process, mapped here; use `CudaIpcTransport.open`."""

    def __init__(
        self, runtime: Runtime, address: int, nbytes: int, device: torch.device, release_pipe: int
    ) -> None:
        super().__init__(address, nbytes, device)
        self._runtime = runtime
        self._release_pipe = release_pipe

    def _let_go(self) -> None:
        self._runtime.close(self._address)
        os.close(self._release_pipe)  # Only now: it tells the owner that the mapping is gone.


class OwnedIpcSlab(BorrowedSlab, OwnedSlab):
    """A slab that this process made and may lend; use `CudaIpcTransport.create`."""

    def __init__(self, runtime: Runtime, address: int, nbytes: int, device: torch.device) -> None:
        super().__init__(address, nbytes, device)
        self._runtime = runtime
        self._pipes: ReleasePipes | None = ReleasePipes()

    @override
    def export(self) -> Handle:
        with self._lock:
            if self._pipes is None:
                raise TransportError("a closed slab cannot be lent")
            name = self._runtime.handle_of(self._address)
            try:
                release_pipe = self._pipes.add()
            except OSError as error:
                raise TransportError(
                    f"cannot export a slab: {error.strerror}",
                    remedy="Raise the limit of open files: a lender holds one per importer.",
                ) from error
            return Handle(PAYLOAD.pack(self._nbytes, _THIS_PROCESS, name), release_pipe)

    def _let_go(self) -> None:
        pipes, self._pipes = self._pipes, None
        assert pipes is not None, "let go once"
        # At once, or when the last importer has let go.
        DEFERRED_FREE.free_when_released(pipes, lambda: self._runtime.free(self._address))


class CudaIpcTransport(CudaSide):
    """Slabs in the memory of a GPU, shared by IPC handle. See the module docstring.

    Args:
        device: Where this side's tensors live; importers need not use the exporter's GPU.
        runtime: CUDA's runtime; CuPy's, loaded when first needed.
        driver: The driver library; loaded when first needed.
    """

    def __init__(
        self, device: torch.device, runtime: Runtime | None = None, driver: CudaDriver | None = None
    ) -> None:
        super().__init__(device, driver)
        self._runtime_if_loaded = runtime

    kind = TransportKind.CUDA_IPC

    @override
    def check(self) -> None:
        try:  # A slab and a handle to it; opening one takes another process.
            with contextlib.closing(self.create(BLOCK_BYTES)) as slab:
                slab.export().close()
        except TransportUnavailableError:
            raise
        except TransportError as error:
            raise TransportUnavailableError(
                f"cuda:{self._ordinal} does not share memory by IPC handle: {error.message}",
                remedy="Free a few MiB on the GPU if it is full; install the CuPy build that fits "
                "the driver; or use the cuda_vmm transport.",
                **error.details,
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedIpcSlab:
        if nbytes <= 0 or nbytes % BLOCK_BYTES:
            raise TransportError(
                f"{nbytes} bytes cannot be shared alone",
                remedy=f"Choose a positive multiple of {format_bytes(BLOCK_BYTES)}.",
            )
        with contextlib.ExitStack() as undo:
            address = self._runtime.allocate(nbytes)
            undo.callback(self._runtime.free, address)
            self._gpu.zero(address, nbytes)
            slab = OwnedIpcSlab(self._runtime, address, nbytes, self._device)
            undo.pop_all()
        return slab

    @override
    def open(self, handle: Handle, nbytes: int) -> IpcSlab:
        with handle:
            if len(handle.payload) != PAYLOAD.size or handle.fd is None:
                raise TransportError("not the handle of a CUDA IPC slab")
            size, exporter, name = PAYLOAD.unpack(handle.payload)
            if size != nbytes:
                raise TransportError(
                    f"the slab has {size} bytes, {nbytes} were announced",
                    size=size,
                    announced=nbytes,
                )
            if exporter == _THIS_PROCESS:
                raise TransportError(
                    "CUDA IPC cannot open a handle in the process that made it",
                    remedy="Use the slab itself, or the cuda_vmm transport.",
                )
            address = self._runtime.open(name)
            release_pipe, handle.fd = handle.fd, None
        return IpcSlab(self._runtime, address, nbytes, self._device, release_pipe)

    @property
    def _runtime(self) -> Runtime:
        if self._runtime_if_loaded is None:
            self._runtime_if_loaded = CupyRuntime(self._ordinal)
        return self._runtime_if_loaded
