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
from harness.cuda.violations import Kind
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
    torch.cuda.synchronize()
    before, used = standing.counts(), standing.machine.used[0]
    inner = np.array([False, True, True, False])
    memory.release(inner)
    assert used - standing.machine.used[0] == 2 * GRANULE
    assert standing.counts()["reservations"] == before["reservations"], "addresses stay"
    assert not first[GRANULE:].any(), "a hole reads as zeros"
    memory.restore(inner)
    assert standing.counts() == before
    assert standing.machine.used[0] == used
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
    standing.machine.memory_bytes = standing.machine.used[0] + 2 * GRANULE
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        memory.restore(gone)
    assert standing.counts() == before
    standing.machine.memory_bytes += GRANULE
    memory.restore(gone)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"])
def test_a_restore_that_fails_half_way_has_changed_nothing(
    memory: CudaKvMemory, standing: StandIn, call: str
) -> None:
    tensor = memory.allocate(5 * GRANULE)
    everything = np.array([True, False, True, False, True])
    memory.release(everything)
    before = standing.counts()
    standing.machine.refusing[call] = 2
    with pytest.raises(TransportError, match=f"{call} failed"):
        memory.restore(everything)
    assert standing.counts() == before
    assert (memory.absent == everything).all()
    memory.restore(everything)
    assert not tensor.any()


def test_a_release_that_fails_half_way_says_what_has_left(
    memory: CudaKvMemory,
    standing: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = memory.allocate(3 * GRANULE)
    before, used = standing.counts(), standing.machine.used[0]
    with monkeypatch.context() as patch:
        refuse_after(patch, CudaDevice, "unmap_at", 1)
        with pytest.raises(TransportError, match="refused"):
            memory.release(np.array([True, False, True]))
    assert memory.absent.tolist() == [True, False, False]
    assert used - standing.machine.used[0] == GRANULE
    memory.restore(memory.absent)
    assert standing.counts() == before
    tensor.fill_(1)


def test_neighbours_cost_one_call_for_their_rights_one_to_unmap_and_one_to_clear(
    memory: CudaKvMemory, standing: StandIn
) -> None:
    calls = standing.machine.calls
    memory.allocate(64 * GRANULE)
    half = np.arange(64) < 32
    calls.clear()
    memory.release(half)
    assert (calls["cuMemUnmap"], calls["cuMemSetAccess"]) == (1, 1)
    calls.clear()
    memory.restore(half)
    names = ("cuMemCreate", "cuMemUnmap", "cuMemSetAccess", "cuMemsetD8Async")
    assert [calls[name] for name in names] == [32, 1, 1, 1]
    assert calls["cuStreamSynchronize"] == 1


def test_a_hole_is_read_without_harm_and_written_to_with(
    memory: CudaKvMemory, standing: StandIn
) -> None:
    tensor = memory.allocate(2 * GRANULE)
    tensor.fill_(7)
    memory.release(np.array([False, True]))
    assert tensor[GRANULE - 1].item() == 7
    assert not tensor[GRANULE:].any()
    standing.machine.check()
    tensor[-1:] = 1
    assert standing.machine.take_violations() == [Kind.UNMAPPED]
    memory.restore(np.array([False, True]))


def test_a_driver_without_rights_to_read_only_leaves_holes(
    memory: CudaKvMemory, standing: StandIn
) -> None:
    tensor = memory.allocate(2 * GRANULE)
    torch.cuda.synchronize()
    standing.machine.refusing["cuMemSetAccess"] = 1
    memory.release(np.array([False, True]))
    tensor[-1:].clone()
    assert standing.machine.take_violations() == [Kind.UNMAPPED]
    memory.restore(np.array([False, True]))
    assert not tensor.any()


def test_a_gpu_that_cannot_map_by_hand_is_refused(
    standing: StandIn,
) -> None:
    standing.machine.exports_descriptors = False
    with pytest.raises(TransportUnavailableError, match="cannot map memory by hand"):
        CudaKvMemory(GPU)
