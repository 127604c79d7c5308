"""A torch program on a CPU is counted tensor by tensor, and refused what does not fit."""

from __future__ import annotations

import gc

import pytest
import torch

from aqualib.engines.cpu_memory import CpuMemoryLimit
from aqualib.engines.torch_loop import TorchLoop
from aqualib.producer.device import EmulatedMemory

KIB = 1024


@pytest.fixture
def memory() -> EmulatedMemory:
    return EmulatedMemory(64 * KIB)


def kibibytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB // 4)


def test_views_and_results_in_place_are_counted_once_and_freed_with_the_last(
    memory: EmulatedMemory,
) -> None:
    with CpuMemoryLimit(memory) as limit:
        tensor = kibibytes(16)
        view = tensor.view(4, -1)[1:].add_(1)
        assert limit.used_bytes == 16 * KIB
        del tensor
        assert limit.used_bytes == memory.used_bytes == 16 * KIB
        del view
        assert limit.used_bytes == memory.used_bytes == 0


def test_a_tensor_that_dies_with_a_cycle_is_given_back(memory: EmulatedMemory) -> None:
    with CpuMemoryLimit(memory) as limit:
        cycle: list[object] = [kibibytes(16)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert limit.used_bytes == 0


def test_what_a_step_needed_for_a_moment_is_not_lent(memory: EmulatedMemory) -> None:
    with CpuMemoryLimit(memory) as limit:
        weights = kibibytes(8)
        with torch.inference_mode():
            kibibytes(24)
        limit.step_ended()
        assert limit.used_bytes == 32 * KIB
        assert limit.shrink(64 * KIB) == limit.limit_bytes == 32 * KIB
        again = kibibytes(24)
        with pytest.raises(torch.OutOfMemoryError, match="1 KiB wanted, 32 KiB of 32 KiB"):
            kibibytes(1)
        del weights, again


def test_memory_that_came_back_can_be_used_once_its_slabs_are_closed(
    memory: EmulatedMemory,
) -> None:
    with CpuMemoryLimit(memory) as limit:
        given = limit.shrink(48 * KIB)
        memory.take(given)  # Slabs.
        loop = TorchLoop(limit, queue_length=lambda: 0)
        assert loop.load().memory_used_bytes == given
        loop.grow(given)
        with pytest.raises(torch.OutOfMemoryError, match="out of device memory"):
            kibibytes(64)
        memory.give_back(given)
        assert kibibytes(64).nbytes == memory.total_bytes


def test_a_loop_that_generates_goes_on_after_every_token(memory: EmulatedMemory) -> None:
    with CpuMemoryLimit(memory) as limit:
        loop = TorchLoop(limit, queue_length=lambda: 0)
        kibibytes(4)
        stops = loop.on_token(torch.ones((3, 5), dtype=torch.long), scores=None)
        assert stops.tolist() == [False] * 3
        assert loop.load().memory_used_bytes >= 4 * KIB
