"""A slab of any transport reads as zeros when it was made anew, to its very last byte."""

from __future__ import annotations

import pytest

from aqua_protocol import MIB, TransportKind
from aqualib.producer.slab_memory import SlabMemory
from aqualib.transports import select

transports = pytest.mark.parametrize(
    "kind",
    [
        TransportKind.MEMFD,
        pytest.param(TransportKind.CUDA_VMM, marks=pytest.mark.gpu),
        pytest.param(TransportKind.CUDA_IPC, marks=pytest.mark.gpu),
    ],
)


@transports
@pytest.mark.parametrize("nbytes", [2 * MIB, 6 * MIB])
def test_a_slab_made_anew_reads_as_zeros(kind: TransportKind, nbytes: int) -> None:
    memory = SlabMemory(select(kind), nbytes, None)
    old = memory.create()
    old.tensor.fill_(0xAB)
    assert int(old.tensor.min()) == 0xAB
    new = memory.make_anew(old)
    try:
        assert old.is_closed
        assert memory.physical_count == 1
        assert int(new.tensor.max()) == 0
    finally:
        memory.destroy(new)
