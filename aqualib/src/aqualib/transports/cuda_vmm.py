"""Slabs in device memory, shared by CUDA virtual memory management: the primary way on GPUs.

The exporter allocates physical memory, maps it for itself and exports it once per importer as a
POSIX descriptor; the importer maps it for *its* GPU. The driver counts references over processes:
memory is freed when every mapping, handle and descriptor is gone, whichever process died. That
count is the fence that lets a producer drop a slab without asking the consumer that still has it
mapped.

The descriptor travels by SCM_RIGHTS, so no shared pid, ipc or user namespace is needed. It pins
the memory while open, so none is kept: `export` makes a fresh one each time, `open` closes it.

The payload names the size and the GPU that holds the memory: the driver cannot be asked for the
size of an import, and an import that this GPU cannot reach should fail by name, not in a copy.

Source: CUDA Driver API, "Virtual Memory Management"; Aqua section 6, where the consumer allocates
on the producer's GPU itself and the producer can neither account for that memory nor fence it.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Final

from typing_extensions import override

from aqua_protocol import TransportError, TransportKind, TransportUnavailableError
from aqualib.transports.base import (
    Handle,
    MappedSlab,
    OwnedSlab,
    require_announced,
    require_multiple,
)
from aqualib.transports.cuda_copier import CudaSide
from aqualib.transports.cuda_driver import CudaError

PAYLOAD: Final = struct.Struct("<Q40s")
"""Size in bytes; UUID of the GPU that holds the memory, `GPU-` and 36 characters."""


class CudaVmmTransport(CudaSide):
    """Slabs in the memory of a GPU, shared by descriptor. See the module docstring.

    Importers need not use the exporter's GPU.
    """

    kind = TransportKind.CUDA_VMM

    @override
    def check(self) -> None:
        # Attributes of the device say what the hardware can do; sandboxes that filter the driver's
        # requests still refuse. So a piece of memory is lent to ourselves.
        gpu = self._gpu
        if not gpu.shares_by_descriptor:
            raise TransportUnavailableError(
                f"cuda:{gpu.ordinal} cannot export memory as a POSIX descriptor",
                remedy="Use the cuda_ipc transport, or a GPU and driver with virtual memory "
                "management (Pascal and newer, on bare metal or with it enabled for the guest).",
            )
        try:
            with contextlib.closing(self.create(gpu.granularity)) as slab:
                self.open(slab.export(), slab.nbytes).close()
        except TransportError as error:
            raise TransportUnavailableError(
                f"cuda:{gpu.ordinal} does not share memory by descriptor: {error.message}",
                remedy="Free a few MiB on the GPU if it is full; in a container, allow the "
                "driver's memory export, or use the cuda_ipc transport.",
                **error.details,
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedSlab:
        gpu = self._gpu
        require_multiple(nbytes, gpu.granularity)
        payload = PAYLOAD.pack(nbytes, gpu.uuid.encode())
        with contextlib.ExitStack() as undo:
            memory = gpu.allocate(nbytes)
            undo.callback(gpu.release, memory)
            address = gpu.map(memory, nbytes)
            undo.callback(gpu.unmap, address, nbytes)
            gpu.zero(address, nbytes)
            return OwnedSlab(
                *(address, nbytes, self._device, undo),
                export=lambda: Handle(payload, gpu.export_fd(memory)),
            )

    @override
    def open(self, handle: Handle, nbytes: int) -> MappedSlab:
        gpu = self._gpu
        with handle, contextlib.ExitStack() as undo:
            if handle.fd is None or len(handle.payload) != PAYLOAD.size:
                raise TransportError("not the handle of a VMM slab")
            size, raw_uuid = PAYLOAD.unpack(handle.payload)
            require_announced(size, nbytes)
            home_uuid = raw_uuid.decode("ascii", "replace")
            try:
                memory = gpu.import_fd(handle.fd)
            except CudaError as error:
                raise TransportError(
                    f"the descriptor of a slab on {home_uuid} cannot be imported: {error.message}",
                    remedy="Make the lender's GPU visible to this process (CUDA_VISIBLE_DEVICES, "
                    "the container's device list).",
                    **error.details,
                ) from error
            try:
                home = gpu.home_of(memory)
                if not gpu.can_access(home):
                    raise TransportError(
                        f"cuda:{gpu.ordinal} cannot reach the memory of {home_uuid} (cuda:{home})",
                        remedy="Lend only between GPUs joined by NVLink or with PCIe peer access; "
                        "`nvidia-smi topo -p2p r` shows which are.",
                    )
                address = gpu.map(memory, nbytes)
            finally:
                gpu.release(memory)  # The mapping keeps it.
            undo.callback(gpu.unmap, address, nbytes)
            return MappedSlab(address, nbytes, self._device, undo)
