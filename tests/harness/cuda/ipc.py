"""As much of CuPy as the IPC transport uses, over a `Machine`.

It is as unforgiving as CUDA: memory freed under an importer's mapping is truncated, so that the
importer's next access is a SIGBUS instead of undefined behaviour that happens to work.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Final

from harness.cuda.memory import Physical, free_addresses, make_memory, reserve_addresses

if TYPE_CHECKING:
    from harness.cuda.machine import Machine

HANDLE: Final = struct.Struct("<qqq40x")
"""Exporter's pid, its descriptor, and the ordinal of the GPU there: 64 bytes, like CUDA's."""


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class CupyOver:
    """`cupy.cuda.runtime`; the runtime keeps a context of its own current."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.runtime = self
        self.CUDARuntimeError = CUDARuntimeError

    def malloc(self, size: int) -> int:
        if size > self.machine.memory_bytes - self.machine.used[0]:
            raise CUDARuntimeError(2)
        self.machine.used[0] += size
        return self._show(
            Physical(make_memory(self.machine.visible[0], size), 0, size, is_ours=True)
        )

    def free(self, at: int) -> None:
        with self.machine.lock:
            found = self.machine.space.find(at)
            if found is not None and found.memory.is_ours:
                os.ftruncate(found.memory.fd, 0)
            self._hide(at, is_ours=True)

    def ipcGetMemHandle(self, at: int) -> bytes:
        with self.machine.lock:
            found = self.machine.space.find(at)
        if found is None or not found.memory.is_ours:
            raise CUDARuntimeError(1)
        return HANDLE.pack(os.getpid(), found.memory.fd, found.memory.device)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        pid, number, device = HANDLE.unpack(handle)
        if pid == os.getpid():
            raise CUDARuntimeError(201)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CUDARuntimeError(1) from error
        return self._show(Physical(fd, device, os.fstat(fd).st_size, is_ours=False))

    def ipcCloseMemHandle(self, at: int) -> None:
        self._hide(at, is_ours=False)

    def _show(self, memory: Physical) -> int:
        with self.machine.lock:
            at = reserve_addresses(memory.nbytes)
            mapping = self.machine.space.map(at, memory)
            for device in range(len(self.machine.visible)):
                self.machine.space.allow(mapping, device, writes=True)
            return at

    def _hide(self, at: int, *, is_ours: bool) -> None:
        with self.machine.lock:
            found: Any = self.machine.space.find(at)
            if found is None or found.at != at or found.memory.is_ours != is_ours:
                raise CUDARuntimeError(1)
            self.machine.unmap(found)
            free_addresses(at, found.memory.nbytes)
