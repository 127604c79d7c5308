"""KV memory of a GPU over the stand-in for the driver; `tests/gpu` has the real one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aqua_protocol import MIB, TransportError, TransportUnavailableError
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.transports.cuda_driver import CudaDevice
from harness.cuda.stand_in import StandIn, stand_in
from harness.refusals import refuse_after

GRANULE = 2 * MIB


GPU = torch.device("cuda", 0)


@pytest.fixture
def standing() -> Iterator[StandIn]:
    with stand_in() as standing:
        yield standing


@pytest.fixture
def memory(standing: StandIn) -> Iterator[CudaKvMemory]:
    before = standing.counts()
    memory = CudaKvMemory(GPU)
    yield memory
    memory.close()
    assert standing.counts() == before


def test_a_cache_is_zeroed_and_rounded_up_to_granules(memory: CudaKvMemory) -> None:
    tensor = memory.allocate(3 * GRANULE - 5)
    assert tensor.shape == (3 * GRANULE - 5,)
    assert not tensor.any()
    assert [region.size for region in memory.regions] == [3 * GRANULE]


def test_released_granules_return_to_the_device_and_come_back_clean(
    memory: CudaKvMemory, standing: StandIn
) -> None:
    first, second = memory.allocate(2 * GRANULE), memory.allocate(2 * GRANULE)
    first.fill_(1)
    second.fill_(2)
    before = standing.counts()
    inner = np.array([False, True, True, False])
    memory.release(inner)
    now = standing.counts()
    assert before["handles"] - now["handles"] == 2
    assert before["mappings"] - now["mappings"] == 2
    assert now["reservations"] == before["reservations"], "addresses stay"
    memory.restore(inner)
    assert standing.counts() == before
    assert first[:GRANULE].all()
    assert not first[GRANULE:].any()
    assert not second[:GRANULE].any()
    assert second[GRANULE:].all()


def test_a_device_that_has_not_got_it_all_gives_nothing_back(
    memory: CudaKvMemory, standing: StandIn
) -> None:
    memory.allocate(4 * GRANULE)
    gone = np.array([False, True, True, True])
    memory.release(gone)
    before = standing.counts()
    standing.machine.memory_bytes = 3 * GRANULE
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        memory.restore(gone)
    assert standing.counts() == before
    standing.machine.memory_bytes = 4 * GRANULE
    memory.restore(gone)


@pytest.mark.parametrize("call", ["allocate", "map_at", "zero"])
def test_a_restore_that_fails_half_way_has_changed_nothing(
    memory: CudaKvMemory, standing: StandIn, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tensor = memory.allocate(3 * GRANULE)
    everything = np.ones(3, np.bool_)
    memory.release(everything)
    before = standing.counts()
    with monkeypatch.context() as patch:
        refuse_after(patch, CudaDevice, call, 1)
        with pytest.raises(TransportError, match="refused"):
            memory.restore(everything)
    assert standing.counts() == before
    assert memory.absent.all()
    memory.restore(everything)
    assert not tensor.any()


@pytest.mark.parametrize(("call", "is_done"), [("unmap_at", False), ("release", True)])
def test_a_release_that_fails_half_way_says_what_has_left(
    memory: CudaKvMemory,
    standing: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    is_done: bool,
) -> None:
    tensor = memory.allocate(3 * GRANULE)
    before = standing.counts()
    with monkeypatch.context() as patch:
        refuse_after(patch, CudaDevice, call, 1, is_done=is_done)
        with pytest.raises(TransportError, match="refused"):
            memory.release(np.ones(3, np.bool_))
    assert before["mappings"] - standing.counts()["mappings"] == memory.absent.sum() > 0
    memory.restore(memory.absent)
    assert standing.counts() == before
    tensor.fill_(1)


def test_a_gpu_that_cannot_map_by_hand_is_refused(
    standing: StandIn,
) -> None:
    standing.machine.exports_descriptors = False
    with pytest.raises(TransportUnavailableError, match="cannot map memory by hand"):
        CudaKvMemory(GPU)
