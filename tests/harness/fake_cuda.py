"""The real CUDA transports over a stand-in for the driver (fake_cuda.c).

"Device" tensors are CPU tensors and copies are memcpys; everything else is the shipped code.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from aqua_protocol import TransportKind
from aqualib.transports.base import Copier, Transport
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_ipc import CudaIpcTransport
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


def transport(kind: TransportKind, library: Path) -> Transport:
    """The transport of this kind over the fake driver."""
    made = FakeIpcTransport if kind is TransportKind.CUDA_IPC else FakeVmmTransport
    return made(CPU, CudaDriver(str(library)))
