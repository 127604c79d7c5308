"""The product's driver layer, transports and torch over a machine that is not there."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from aqua_protocol import TransportKind
from aqualib.transports import cuda_driver
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_ipc import CudaIpcTransport, CupyRuntime
from aqualib.transports.cuda_vmm import CudaVmmTransport
from harness.cuda.copy_ahead import copies_ahead_in_doubt
from harness.cuda.ipc import CupyOver
from harness.cuda.library import StandInLibrary
from harness.cuda.machine import Machine
from harness.cuda.torch_side import TorchSide
from harness.cuda.torch_streams import TorchStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports.base import Transport


class StandIn:
    """A machine with GPUs, and the product's layers over it.

    Args:
        options: Those of `Machine`.
    """

    def __init__(self, **options: Any) -> None:
        self.machine = Machine(**options)
        self.library = StandInLibrary(self.machine)
        self.torch = TorchSide(self.machine)

    @property
    def driver(self) -> CudaDriver:
        """The driver that the product has loaded."""
        return cuda_driver.load_driver()

    def transport(
        self, kind: TransportKind = TransportKind.CUDA_VMM, ordinal: int = 0
    ) -> Transport:
        """A transport of one of the GPUs."""
        device = torch.device("cuda", ordinal)
        if kind is TransportKind.CUDA_VMM:
            return CudaVmmTransport(device, self.driver)
        runtime: Any = CupyOver(self.machine).runtime
        devices = SimpleNamespace(Device=lambda _: contextlib.nullcontext(), runtime=runtime)
        with mock.patch.dict(sys.modules, cupy=SimpleNamespace(cuda=devices)):
            return CudaIpcTransport(device, self.driver, CupyRuntime(ordinal))

    def stream(self) -> Any:
        """A stream of torch's."""
        return TorchStream(self.torch, 0)

    def counts(self) -> dict[str, int]:
        """What is alive; tensors' own memory is given back first."""
        self.torch.allocator.empty_cache()
        return self.machine.counts()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be this process's CUDA; what rules were broken is raised at the end."""
        cuda_driver.load_driver.cache_clear()
        with (
            mock.patch.object(cuda_driver, "load_library", return_value=self.library),
            self.torch.installation(),
            copies_ahead_in_doubt(self.machine),
        ):
            yield
        cuda_driver.load_driver.cache_clear()
        self.machine.check()


@contextlib.contextmanager
def stand_in(**options: Any) -> Iterator[StandIn]:
    """A machine for a `with` block; fails at its end if a rule was broken."""
    standing = StandIn(**options)
    with contextlib.closing(standing.machine), standing.installed():
        yield standing
