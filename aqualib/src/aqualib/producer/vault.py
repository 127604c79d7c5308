"""The vault: makes and frees physical slabs, and knows how many there are.

One place for both, so that device memory is accounted for whoever asks: the engine's thread that
grows the offer, or the custodian that replaces what was lost. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from aqua_protocol import TransportError

if TYPE_CHECKING:
    from aqualib.producer.device import DeviceMemory
    from aqualib.transports.base import OwnedSlab, Transport


class Vault:
    """Physical slabs of one size on one device.

    Args:
        transport: Makes them.
        slab_bytes: Their size.
        device: What they are taken from; None does not account.
    """

    def __init__(self, transport: Transport, slab_bytes: int, device: DeviceMemory | None) -> None:
        self._transport = transport
        self._slab_bytes = slab_bytes
        self._device = device
        self._count = 0
        self._lock = threading.Lock()

    @property
    def physical_count(self) -> int:
        """Slabs made and not freed."""
        return self._count

    def create(self) -> OwnedSlab:
        """Make one zeroed slab.

        Raises:
            TransportError: Device memory ran out.
        """
        if self._device is not None:
            self._device.take(self._slab_bytes)
        try:
            memory = self._transport.create(self._slab_bytes)
        except TransportError:
            if self._device is not None:
                self._device.give_back(self._slab_bytes)
            raise
        with self._lock:
            self._count += 1
        return memory

    def destroy(self, memory: OwnedSlab) -> None:
        """Give one slab back."""
        memory.close()
        with self._lock:
            self._count -= 1
        if self._device is not None:
            self._device.give_back(self._slab_bytes)
