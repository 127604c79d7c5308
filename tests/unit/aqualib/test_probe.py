from __future__ import annotations

import pytest
import torch

from aqua_protocol import MIB, TransportKind
from aqualib import probe
from aqualib.transports.base import Copier
from aqualib.transports.memfd import MemfdTransport


class MeteredCopier(Copier):
    """Copies nothing, on a clock that runs at the given rates."""

    is_synchronous = False

    def __init__(self, remote: torch.Tensor, *, write_rate: float, read_rate: float) -> None:
        self._remote = remote.untyped_storage().data_ptr()
        self._rates = {True: write_rate, False: read_rate}
        self.now_s = 0.0
        self.overhead_s = 0.0
        self.copied_bytes = 0

    def clock(self) -> float:
        return self.now_s

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        is_write = dst.untyped_storage().data_ptr() == self._remote
        self.now_s += src.nbytes / self._rates[is_write]
        self.copied_bytes += src.nbytes

    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        raise NotImplementedError

    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        raise NotImplementedError

    def scatter(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        raise NotImplementedError

    def fence(self) -> None:
        self.now_s += self.overhead_s


@pytest.mark.parametrize("nbytes", [64 * 1024, 2 * MIB, 16 * MIB])
@pytest.mark.parametrize("rates", [(10e9, 12e9), (400e9, 380e9), (1e9, 2e9)])
def test_rates_are_those_of_each_direction(nbytes: int, rates: tuple[float, float]) -> None:
    transport = MemfdTransport()
    slab = transport.create(nbytes)
    copier = MeteredCopier(slab.tensor, write_rate=rates[0], read_rate=rates[1])
    link = probe.measure(transport, slab, copier=copier, clock=copier.clock)
    assert link.transport is TransportKind.MEMFD
    assert link.write_bytes_per_s == pytest.approx(rates[0])
    assert link.read_bytes_per_s == pytest.approx(rates[1])
    slab.close()


def test_the_cost_of_launching_hardly_counts_on_a_fast_link() -> None:
    transport = MemfdTransport()
    slab = transport.create(16 * MIB)
    copier = MeteredCopier(slab.tensor, write_rate=400e9, read_rate=400e9)
    copier.overhead_s = 20e-6
    link = probe.measure(transport, slab, copier=copier, clock=copier.clock)
    assert link.write_bytes_per_s > 0.9 * 400e9
    slab.close()


def test_a_slow_link_is_not_measured_for_long() -> None:
    transport = MemfdTransport()
    slab = transport.create(MIB)
    copier = MeteredCopier(slab.tensor, write_rate=1e8, read_rate=1e8)
    probe.measure(transport, slab, copier=copier, clock=copier.clock)
    assert copier.copied_bytes == 2 * probe.ROUNDS * MIB
    slab.close()


def test_the_slab_keeps_its_bytes() -> None:
    transport = MemfdTransport()
    slab = transport.create(16 * MIB)
    before = torch.randint(0, 256, (slab.nbytes,), dtype=torch.uint8)
    slab.tensor.copy_(before)
    probe.measure(transport, slab)
    assert torch.equal(slab.tensor, before)
    slab.close()
