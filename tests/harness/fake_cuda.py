"""The real CUDA transports over stand-ins for the driver (fake_cuda.c) and for CuPy's runtime.

"Device" tensors are CPU tensors and copies are memcpys; everything else is the shipped code.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import torch

from aqua_protocol import TransportError, TransportKind
from aqualib.transports.base import Copier, Transport
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_ipc import CudaIpcTransport
from aqualib.transports.cuda_vmm import CudaVmmTransport
from aqualib.transports.host import CPU, HostCopier
from aqualib.transports.host_pages import HostMapping

SOURCE: Final = Path(__file__).with_suffix(".c")
COUNTERS: Final = ("handles", "mappings", "reservations", "pinned", "contexts")


def build(directory: Path) -> Path:
    """Compile the library into `directory`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    library = directory / "libfake_cuda.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


@cache
def live(library: Path) -> ctypes.CDLL:
    """The library's own view of what is alive; the handle that the driver uses too."""
    return ctypes.CDLL(str(library))


def counts(library: Path) -> dict[str, int]:
    """Handles, mappings, reservations, pinned ranges, and contexts current in this thread."""
    return {name: live(library).fakeCudaLive(i) for i, name in enumerate(COUNTERS)}


class FakeVmmTransport(CudaVmmTransport):
    """The VMM transport over the fake driver: "device" tensors are CPU tensors, copies memcpys."""

    def __init__(self, library: Path, device: torch.device = CPU) -> None:
        super().__init__(device, CudaDriver(str(library)))

    def copier(self) -> Copier:
        return HostCopier()


class FakeRuntime:
    """`cuda_ipc.Runtime` over memfds that are opened through /proc, as unforgiving as CUDA.

    Memory freed under an importer's mapping is truncated, so that the importer's next access is
    a SIGBUS instead of undefined behaviour that happens to work.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, HostMapping]] = {}
        self._opened: dict[int, HostMapping] = {}

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create("fake-cuda-ipc")
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"dirt", 0)
        mapping = HostMapping(nbytes, fd=fd)
        self._memory[mapping.address] = fd, mapping
        return mapping.address

    def free(self, address: int) -> None:
        fd, mapping = self._memory.pop(address)
        mapping.unmap()
        os.ftruncate(fd, 0)
        os.close(fd)

    def handle_of(self, address: int) -> bytes:
        fd, mapping = self._memory[address]
        return f"{os.getpid()} {fd} {mapping.nbytes}".encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        try:
            pid, fd, nbytes = handle.rstrip(b"\0").decode().split()
            with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as memory:
                mapping = HostMapping(int(nbytes), fd=memory.fileno())
        except (OSError, ValueError) as error:
            raise TransportError(f"ipcOpenMemHandle failed: {error}") from error
        self._opened[mapping.address] = mapping
        return mapping.address

    def close(self, address: int) -> None:
        self._opened.pop(address).unmap()


class FakeIpcTransport(CudaIpcTransport):
    """The IPC transport over fakes of runtime and driver."""

    def __init__(self, library: Path) -> None:
        super().__init__(CPU, FakeRuntime(), CudaDriver(str(library)))

    def copier(self) -> Copier:
        return HostCopier()


def transport(kind: TransportKind, library: Path) -> Transport:
    """The transport of this kind over the fakes."""
    return (FakeIpcTransport if kind is TransportKind.CUDA_IPC else FakeVmmTransport)(library)
