"""Device memory on a machine without a GPU: how much there is, and who may still take some.

A producer must not promise what the device does not have. On a GPU the driver knows, and refuses an
allocation that does not fit. A CPU machine has no such limit worth the name, so tests and the demo
give one: `EmulatedMemory` is a budget of bytes that the engine and the lent slabs share, and that
is enforced the way a driver would, by failing the allocation.

What is not modelled: fragmentation, and memory that other processes take.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from aqua_protocol import TransportError, format_bytes

if TYPE_CHECKING:
    import torch


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


def device_memory(device: torch.device, nbytes: int | None) -> EmulatedMemory | None:
    """A budget for a CPU (`AQUA_EMULATED_HBM_BYTES`); none if None, and none for a GPU."""
    return None if device.type == "cuda" or nbytes is None else EmulatedMemory(nbytes)
