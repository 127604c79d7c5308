"""A KV cache on a real GPU whose memory leaves and comes back behind the same addresses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aqua_protocol import MIB, TransportUnavailableError
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.transports.cuda_vmm import CudaVmmTransport

SLAB = 64 * MIB


@pytest.fixture
def memory() -> Iterator[CudaKvMemory]:
    try:
        memory = CudaKvMemory(torch.device("cuda", 0))
    except TransportUnavailableError as refusal:
        pytest.skip(str(refusal))
    yield memory
    torch.cuda.synchronize()
    memory.close()


def test_what_leaves_is_free_on_the_gpu_and_what_returns_is_clean(memory: CudaKvMemory) -> None:
    tensor = memory.allocate(4 * SLAB)
    assert not tensor.any()
    tensor.fill_(3)
    count = 4 * SLAB // memory.granule_bytes
    upper = np.arange(count) >= count // 2
    before = torch.cuda.mem_get_info()[0]
    memory.release(upper)
    assert torch.cuda.mem_get_info()[0] >= before + 2 * SLAB
    assert tensor[: 2 * SLAB].eq(3).all(), "what stays is untouched"
    memory.restore(upper)
    assert torch.cuda.mem_get_info()[0] < before + SLAB
    assert not tensor[2 * SLAB :].any()
    tensor.fill_(4)
    assert tensor.eq(4).all()


def test_a_graph_captured_before_works_after_memory_came_back(memory: CudaKvMemory) -> None:
    tensor = memory.allocate(2 * SLAB)
    torch.zeros_like(tensor[:64]).add_(1)  # The kernel is loaded before the capture.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    upper = np.arange(2 * SLAB // memory.granule_bytes) >= SLAB // memory.granule_bytes
    memory.release(upper)
    memory.restore(upper)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[:SLAB].eq(2).all()
    assert tensor[SLAB:].eq(1).all()


def test_slabs_take_the_place_of_what_left(memory: CudaKvMemory) -> None:
    memory.allocate(2 * SLAB)
    upper = np.arange(2 * SLAB // memory.granule_bytes) >= SLAB // memory.granule_bytes
    memory.release(upper)
    transport = CudaVmmTransport(torch.device("cuda", 0))
    slab = transport.create(SLAB)
    slab.tensor.fill_(7)
    torch.cuda.synchronize()
    slab.close()
    memory.restore(upper)
