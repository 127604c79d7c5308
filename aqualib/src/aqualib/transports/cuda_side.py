"""What the transports of GPUs have in common: this side's GPU, its copier, its host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from aqualib.transports.base import Copier, MappedSlab, Transport
from aqualib.transports.cuda_copier import CudaCopier
from aqualib.transports.cuda_driver import CudaDevice, CudaDriver, load_driver
from aqualib.transports.host import host_slab

if TYPE_CHECKING:
    import torch


class CudaSide(Transport):
    """One process's side of a transport between GPUs.

    Args:
        device: Where this side's tensors live.
        driver: The driver library; loaded when first needed.
    """

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._ordinal = device.index or 0
        self._driver = driver

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @override
    def create_host(self, nbytes: int) -> MappedSlab:
        return host_slab(nbytes, pin=self._gpu.pin)

    @override
    def copier(self) -> Copier:
        return CudaCopier(self._device, self._gpu)

    @property
    def _gpu(self) -> CudaDevice:
        if self._driver is None:
            self._driver = load_driver()
        return self._driver.device(self._ordinal)
