"""Device memory: how much there is, and who may still take some.

A producer must not promise what the device does not have. On a GPU the driver knows, and refuses an
allocation that does not fit. A CPU machine has no such limit worth the name, so tests and the demo
give one: `EmulatedMemory` is a budget of bytes that the engine and the lent slabs share, and that
is enforced the way a driver would, by failing the allocation.

What is not modelled: fragmentation, and memory that other processes take. On a GPU both show in
`free_bytes`; an emulated device belongs to one process.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from aqua_protocol import TransportError, format_bytes

if TYPE_CHECKING:
    import torch


class DeviceMemory(Protocol):
    """The memory of one device, as its process may use it."""

    @property
    def total_bytes(self) -> int:
        """All of it."""

    @property
    def used_bytes(self) -> int:
        """What cannot be allocated now."""

    def take(self, nbytes: int) -> None:
        """Account for an allocation about to be made.

        Raises:
            TransportError: It does not fit; nothing was taken.
        """

    def give_back(self, nbytes: int) -> None:
        """Account for an allocation that has been freed."""


class EmulatedMemory:
    """A byte budget that stands in for a GPU's memory on a CPU machine; thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        assert total_bytes > 0, total_bytes
        self.total_bytes: Final = total_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        used, total = format_bytes(self._used_bytes), format_bytes(self.total_bytes)
        return f"EmulatedMemory({used} of {total} used)"

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._used_bytes

    def take(self, nbytes: int) -> None:
        """Account for an allocation about to be made.

        Raises:
            TransportError: It does not fit; nothing was taken.
        """
        assert nbytes >= 0, nbytes
        with self._lock:
            if self._used_bytes + nbytes > self.total_bytes:
                raise TransportError(
                    f"out of device memory: {format_bytes(nbytes)} wanted, "
                    f"{format_bytes(self.total_bytes - self._used_bytes)} of "
                    f"{format_bytes(self.total_bytes)} free",
                    remedy="Offer less, or let the engine shrink first.",
                )
            self._used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Account for an allocation that has been freed."""
        with self._lock:
            self._used_bytes -= nbytes
            assert 0 <= self._used_bytes <= self.total_bytes, self


class CudaMemory:
    """A GPU's memory, by the driver's own count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __repr__(self) -> str:
        return f"CudaMemory({self._device})"

    @property
    def total_bytes(self) -> int:
        """What the device has."""
        return self._info()[1]

    @property
    def used_bytes(self) -> int:
        """What any process on the device has allocated, caches of allocators included."""
        free, total = self._info()
        return total - free

    def take(self, nbytes: int) -> None:
        """Nothing to account for: the driver refuses what does not fit."""

    def give_back(self, nbytes: int) -> None:
        """Nothing to account for: the driver counts."""

    def _info(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(self._device)


def device_memory(device: torch.device, emulated_bytes: int | None = None) -> DeviceMemory | None:
    """The memory of `device`, or None for a CPU without a budget.

    Args:
        device: Of the transport.
        emulated_bytes: Budget for a CPU (`AQUA_EMULATED_HBM_BYTES`); ignored on a GPU.
    """
    if device.type == "cuda":
        return CudaMemory(device)
    return None if emulated_bytes is None else EmulatedMemory(emulated_bytes)
