"""The producer adapter for programs in steps."""

from __future__ import annotations

import pytest
import torch

from aqua_protocol import ConfigError
from aqualib.engines.torch_loop import CountedMemoryLimit, CudaMemoryLimit, TorchLoop
from aqualib.producer.device import EmulatedMemory


@pytest.fixture
def memory() -> EmulatedMemory:
    return EmulatedMemory(1000)


@pytest.fixture
def limit(memory: EmulatedMemory) -> CountedMemoryLimit:
    return CountedMemoryLimit(memory, least_bytes=200)


def test_the_load_is_what_the_program_and_the_device_say(
    memory: EmulatedMemory, limit: CountedMemoryLimit
) -> None:
    loop = TorchLoop(limit, queue_length=lambda: 7, requests_per_s=lambda: 2.5)
    assert limit.try_take(300)
    memory.take(100)  # A slab.
    load = loop.load()
    assert (load.queue_length, load.requests_per_s) == (7, 2.5)
    assert (load.memory_used_bytes, load.memory_total_bytes) == (400, 1000)


def test_unused_memory_is_given_up_at_once_and_used_memory_as_it_becomes_free(
    limit: CountedMemoryLimit,
) -> None:
    assert limit.try_take(600)
    assert limit.shrink(700) == 400
    assert not limit.try_take(1), "the program may not grow while it owes memory"
    limit.give_back(350)
    assert limit.shrink(300) == 300
    assert not limit.try_take(100)


def test_the_program_keeps_what_it_needs_at_least(limit: CountedMemoryLimit) -> None:
    assert limit.shrink(5000) == 800
    assert limit.shrink(1) == 0
    assert limit.try_take(200)
    assert not limit.try_take(1)


def test_memory_that_comes_back_may_be_used_again(
    memory: EmulatedMemory, limit: CountedMemoryLimit
) -> None:
    given = limit.shrink(500)
    memory.take(given)  # Slabs.
    assert not limit.try_take(501)
    memory.give_back(given)
    limit.grow(given)
    assert limit.try_take(1000)


def test_an_allocation_waits_while_a_slab_is_not_closed_yet(
    memory: EmulatedMemory, limit: CountedMemoryLimit
) -> None:
    memory.take(900)
    assert not limit.try_take(200)
    assert limit.own_bytes == 0
    memory.give_back(900)
    assert limit.try_take(200)


def test_a_cpu_has_no_allocator_to_limit() -> None:
    with pytest.raises(ConfigError, match="CountedMemoryLimit"):
        CudaMemoryLimit(torch.device("cpu"))
