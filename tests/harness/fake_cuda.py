"""The real CUDA transports over a stand-in for the driver (fake_cuda.c).

"Device" tensors are CPU tensors and copies are memcpys; everything else is the shipped code.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest

from aqua_protocol import TransportKind
from aqualib.transports.base import Copier, Transport
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_ipc import CudaIpcTransport, CupyRuntime
from aqualib.transports.cuda_vmm import CudaVmmTransport
from aqualib.transports.host import CPU, HostCopier

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

    def copier(self) -> Copier:
        return HostCopier()


class FakeIpcTransport(CudaIpcTransport):
    """The IPC transport over the fake driver, likewise."""

    def copier(self) -> Copier:
        return HostCopier()


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


def cupy(library: Path) -> SimpleNamespace:
    """As much of CuPy as the IPC transport uses, over the fake driver."""
    cuda: Any = live(library)

    def require(status: int) -> None:
        if status:
            raise CUDARuntimeError(status)

    def malloc(size: int) -> int | None:
        address = ctypes.c_void_p()
        require(cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)))
        return address.value

    def get_handle(address: int) -> bytes:
        handle = IpcHandle()
        require(cuda.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)))
        return bytes(handle)

    def open_handle(handle: bytes) -> int | None:
        address = ctypes.c_void_p()
        given = IpcHandle.from_buffer_copy(handle)
        require(cuda.cudaIpcOpenMemHandle(ctypes.byref(address), given, 1))
        return address.value

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        malloc=malloc,
        free=lambda address: require(cuda.cudaFree(ctypes.c_void_p(address))),
        ipcGetMemHandle=get_handle,
        ipcOpenMemHandle=open_handle,
        ipcCloseMemHandle=lambda at: require(cuda.cudaIpcCloseMemHandle(ctypes.c_void_p(at))),
    )
    devices = SimpleNamespace(Device=lambda _: contextlib.nullcontext(), runtime=runtime)
    return SimpleNamespace(cuda=devices)


class IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def transport(kind: TransportKind, library: Path) -> Transport:
    """The transport of this kind over the fake driver."""
    driver = CudaDriver(str(library))
    if kind is not TransportKind.CUDA_IPC:
        return FakeVmmTransport(CPU, driver)
    with mock.patch.dict(sys.modules, cupy=cupy(library)):
        return FakeIpcTransport(CPU, driver, CupyRuntime(0))
