from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from aqua_protocol import MIB, TransportError
from aqualib.engines.vllm.lending.memory import HostKvMemory
from aqualib.transports.host_pages import PAGE_BYTES


def rights(address: int) -> str:
    """What the kernel allows at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end, found = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr] # every line has them
        if int(start, 16) <= address < int(end, 16):
            return found
    return "none"


def test_a_cache_is_zeroed_and_its_own_size() -> None:
    memory = HostKvMemory(PAGE_BYTES)
    tensor = memory.allocate(3 * PAGE_BYTES + 5)
    assert tensor.shape == (3 * PAGE_BYTES + 5,)
    assert tensor.dtype is torch.int8
    assert not tensor.any()
    assert memory.regions[0].size == 4 * PAGE_BYTES
    assert memory.account.used_bytes == memory.account.total_bytes == 4 * PAGE_BYTES
    memory.close()


def test_released_memory_is_gone_and_comes_back_as_zeros_at_its_address() -> None:
    memory = HostKvMemory(PAGE_BYTES)
    tensor = memory.allocate(4 * PAGE_BYTES)
    tensor.fill_(7)
    address = memory.regions[0].start
    middle = np.array([False, True, True, False])
    memory.release(middle)
    assert memory.account.used_bytes == 2 * PAGE_BYTES
    assert rights(address + PAGE_BYTES).startswith("---")
    assert rights(address).startswith("rw")
    assert tensor[:PAGE_BYTES].eq(7).all()
    memory.restore(middle)
    assert memory.account.used_bytes == 4 * PAGE_BYTES
    assert not tensor[PAGE_BYTES : 3 * PAGE_BYTES].any()
    assert tensor[3 * PAGE_BYTES :].eq(7).all()
    tensor.fill_(1)
    memory.close()


def test_the_pages_really_return_to_the_system() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    memory = HostKvMemory(MIB)
    tensor = memory.allocate(64 * MIB)
    tensor.fill_(1)
    before = resident_bytes()
    memory.release(np.arange(64) >= 16)
    assert resident_bytes() < before - 40 * MIB
    memory.close()


def test_memory_that_somebody_else_took_cannot_come_back_until_it_is_free() -> None:
    memory = HostKvMemory(PAGE_BYTES, budget_bytes=4 * PAGE_BYTES)
    memory.allocate(4 * PAGE_BYTES)
    last = np.array([False, False, False, True])
    memory.account.used_bytes  # noqa: B018 - the account opens when it is looked at
    memory.release(last)
    memory.account.take(PAGE_BYTES)
    with pytest.raises(TransportError, match="out of device memory"):
        memory.restore(last)
    memory.account.give_back(PAGE_BYTES)
    memory.restore(last)
    memory.close()


def test_several_tensors_are_numbered_one_after_the_other() -> None:
    memory = HostKvMemory(PAGE_BYTES)
    first, second = memory.allocate(2 * PAGE_BYTES), memory.allocate(2 * PAGE_BYTES)
    first.fill_(1)
    second.fill_(2)
    memory.release(np.array([False, True, True, False]))
    memory.restore(np.array([False, True, True, False]))
    assert first[:PAGE_BYTES].all()
    assert not first[PAGE_BYTES:].any()
    assert not second[:PAGE_BYTES].any()
    assert second[PAGE_BYTES:].all()
    memory.close()
