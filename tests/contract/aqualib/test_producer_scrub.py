"""A slab of any transport reads as zeros after it was scrubbed, to its very last byte."""

from __future__ import annotations

import pytest

from aqua_protocol import MIB, TransportKind
from aqualib.producer.handout import ZEROS_BYTES, Scrubber
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
def test_a_scrubbed_slab_reads_as_zeros(kind: TransportKind, nbytes: int) -> None:
    transport = select(kind)
    slab = transport.create(nbytes)
    try:
        slab.tensor.fill_(0xAB)
        assert int(slab.tensor.min()) == 0xAB
        Scrubber(transport).scrub(slab.tensor)
        assert int(slab.tensor.max()) == 0
    finally:
        slab.close()


def test_a_slab_that_is_no_multiple_of_the_source_of_zeros_is_scrubbed_whole() -> None:
    transport = select(TransportKind.MEMFD)
    slab = transport.create(ZEROS_BYTES + 64 * 1024)
    try:
        slab.tensor.fill_(0xAB)
        Scrubber(transport).scrub(slab.tensor)
        assert int(slab.tensor.max()) == 0
    finally:
        slab.close()
