from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from aqua_protocol import MIB, TransportError
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.kv_lending import EngineLoad, KvLending
from aqualib.engines.vllm.lending.memory import HostKvMemory, lendable_cache
from aqualib.engines.vllm.lending.rank_memory import LocalMemory
from aqualib.transports.host_pages import PAGE_BYTES, HostMapping
from harness.block_pool import PaperPool
from harness.refusals import refuse_after


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


OUTER = np.array([True, False, True, False])


def test_a_restore_that_fails_half_way_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostKvMemory(PAGE_BYTES)
    tensor = memory.allocate(4 * PAGE_BYTES)
    address = memory.regions[0].start
    memory.release(OUTER)
    with monkeypatch.context() as patch:
        refuse_after(patch, HostMapping, "refill", 1)
        with pytest.raises(TransportError, match="refused"):
            memory.restore(OUTER)
    assert memory.account.used_bytes == 2 * PAGE_BYTES
    assert [rights(address + at * PAGE_BYTES)[:2] for at in range(4)] == ["--", "rw", "--", "rw"]
    memory.restore(OUTER)
    assert memory.account.used_bytes == 4 * PAGE_BYTES
    tensor.fill_(1)
    memory.close()


def test_a_release_that_fails_half_way_says_what_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostKvMemory(PAGE_BYTES)
    tensor = memory.allocate(4 * PAGE_BYTES)
    address = memory.regions[0].start
    with monkeypatch.context() as patch:
        refuse_after(patch, HostMapping, "vacate", 0)
        with pytest.raises(TransportError, match="refused"):
            memory.release(OUTER)
    holes = [rights(address + at * PAGE_BYTES).startswith("--") for at in range(4)]
    assert not (holes & ~memory.absent).any()
    memory.restore(memory.absent)
    assert not memory.absent.any()
    assert memory.account.used_bytes == 4 * PAGE_BYTES
    tensor.fill_(1)
    memory.close()


@pytest.mark.parametrize("released_count", [0, 1, 2])
@pytest.mark.parametrize("restored_count", [0, 1, 9])
def test_no_block_over_a_hole_is_used_when_a_release_fails_half_way(
    released_count: int, restored_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostKvMemory(PAGE_BYTES)
    layers = [memory.allocate(8 * PAGE_BYTES).view(8, PAGE_BYTES) for _ in range(3)]
    starts = [region.start for region in memory.regions]
    pool = PaperPool(8)
    lending = KvLending(
        [LocalMemory(lendable_cache(memory, layers, 8))],
        BlockLimit(pool, 0),
        slab_bytes=3 * PAGE_BYTES,
        keep_blocks=2,
        lock=threading.RLock(),
        read_load=lambda: EngineLoad(waiting_count=0, requests_per_s=0.0),
    )

    def over_holes() -> set[int]:
        return {
            block
            for block in range(8)
            for start in starts
            if not rights(start + block * PAGE_BYTES).startswith("rw")
        }

    with monkeypatch.context() as patch:
        refuse_after(patch, HostMapping, "vacate", released_count)
        refuse_after(patch, HostMapping, "refill", restored_count)
        with pytest.raises(TransportError, match="refused"):
            lending.shrink(9 * PAGE_BYTES)
        lending.load()
        assert not {block.block_id for block in pool.free} & over_holes()
    lending.load()
    assert not over_holes()
    assert len(pool.free) == 7
    assert (lending.surrendered_bytes, lending.out_blocks) == (0, 0)
    assert lending.shrink(9 * PAGE_BYTES) == 9 * PAGE_BYTES
    assert over_holes() == {5, 6, 7}
    lending.grow(9 * PAGE_BYTES)
    assert not over_holes()
    memory.close()
