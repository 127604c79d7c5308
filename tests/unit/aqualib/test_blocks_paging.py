"""Block stores in host memory: slots, batches, bounds. Moving them is tested elsewhere."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from aqua_protocol import CapacityError, ConfigError
from aqualib.blocks import BlockStore
from aqualib.consumer import Aqua
from aqualib.memory.frame_store import FrameStore
from aqualib.tensor import Location
from harness.consumers import consuming
from harness.producers import SLAB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aqualib.memory.frame import Frame
    from aqualib.ranges import Range

BLOCK = SLAB // 4
CAPACITY = 10


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with consuming(8) as aqua:
        yield aqua


@pytest.fixture
def store(aqua: Aqua) -> BlockStore:
    return aqua.block_store(BLOCK, CAPACITY)


def table(rows: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (rows, BLOCK), dtype=torch.uint8)


def page_out(store: BlockStore, src: torch.Tensor, *rows: int) -> torch.Tensor:
    slots, transfer = store.page_out(src, torch.tensor(rows, dtype=torch.int64))
    transfer.wait()
    return slots


@pytest.mark.parametrize("slot_order", ["as stored", "reversed", "every other", "shuffled"])
@pytest.mark.parametrize("row_order", ["first", "run", "reversed", "shuffled"])
def test_any_slots_come_back_to_any_rows(
    store: BlockStore, slot_order: str, row_order: str
) -> None:
    src = table()
    rows = torch.tensor([7, 1, 2, 3, 11, 0, 5, 9, 8, 4])
    slots = page_out(store, src, *rows.tolist())
    pick = {
        "as stored": torch.arange(10),
        "reversed": torch.arange(10).flip(0),
        "every other": torch.arange(0, 10, 2),
        "shuffled": torch.tensor([3, 9, 0, 4, 5, 1, 8]),
    }[slot_order]
    dst = torch.zeros(14, BLOCK, dtype=torch.uint8)
    index = {
        "first": None,
        "run": torch.arange(3, 3 + len(pick)),
        "reversed": torch.arange(3, 3 + len(pick)).flip(0),
        "shuffled": torch.tensor([12, 0, 5, 6, 7, 3, 13, 9, 1, 2])[: len(pick)],
    }[row_order]
    store.page_in(slots[pick], dst, index).wait()
    written = torch.arange(len(pick)) if index is None else index
    assert torch.equal(dst[written], src[rows[pick]])
    untouched = torch.ones(14, dtype=torch.bool)
    untouched[written] = False
    assert not dst[untouched].any()


def test_blocks_paged_out_together_lie_next_to_each_other(store: BlockStore) -> None:
    slots = page_out(store, table(), 11, 3, 7)
    assert slots.tolist() == [0, 1, 2]


def test_a_batch_without_an_index_is_all_rows(store: BlockStore) -> None:
    src = table(6)
    slots, transfer = store.page_out(src)
    transfer.wait()
    dst = torch.zeros_like(src)
    store.page_in(slots, dst).wait()
    assert torch.equal(dst, src)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((12, BLOCK // 4), torch.float32), ((12, 4, 2, BLOCK // 16), torch.bfloat16)],
)
def test_rows_may_have_any_shape_and_dtype(
    store: BlockStore, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    src = torch.randn(shape).to(dtype)
    slots = page_out(store, src, 5, 0)
    dst = torch.zeros_like(src)
    store.page_in(slots, dst, torch.tensor([1, 2])).wait()
    assert torch.equal(dst[[1, 2]], src[[5, 0]])


def test_rows_may_lie_apart_in_a_larger_tensor(store: BlockStore) -> None:
    whole = torch.randint(0, 256, (12, 2, BLOCK), dtype=torch.uint8)
    slots = page_out(store, whole[:, 1], 4, 9)
    target = torch.zeros_like(whole)
    store.page_in(slots, target[:, 0], torch.tensor([2, 3])).wait()
    assert torch.equal(target[[2, 3], 0], whole[[4, 9], 1])
    assert not target[:, 1].any()


def test_freed_slots_serve_again_and_a_broken_up_store_still_holds_its_capacity(
    store: BlockStore,
) -> None:
    src = table()
    slots = page_out(store, src, *range(10))
    store.free(slots[::2])
    assert (store.used_count, store.free_count) == (5, 5)
    again = page_out(store, src, 11, 10, 9, 8, 7)
    assert sorted(torch.cat((again, slots[1::2])).tolist()) == sorted(slots.tolist())
    dst = torch.zeros(10, BLOCK, dtype=torch.uint8)
    store.page_in(torch.cat((slots[1::2], again)), dst).wait()
    assert torch.equal(dst, src[[1, 3, 5, 7, 9, 11, 10, 9, 8, 7]])


def test_a_store_that_is_being_freed_is_full_and_not_lost(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = table(CAPACITY)
    slots = page_out(store, src, *range(CAPACITY))
    give_back = FrameStore.give_back
    heard: list[BaseException | None] = []

    def give_back_late(frames: FrameStore, runs: Iterable[tuple[Frame, Range]]) -> None:
        with ThreadPoolExecutor(1) as another:
            heard.append(another.submit(store.page_out, src).exception())
        give_back(frames, runs)

    monkeypatch.setattr(FrameStore, "give_back", give_back_late)
    store.free(slots)
    assert [type(error) for error in heard] == [CapacityError]
    monkeypatch.undo()
    assert store.free_count == CAPACITY
    assert len(page_out(store, src, *range(CAPACITY))) == CAPACITY


def test_a_full_store_says_so_and_stores_nothing(store: BlockStore) -> None:
    page_out(store, table(), *range(7))
    with pytest.raises(CapacityError) as caught:
        page_out(store, table(), 0, 1, 2, 3)
    assert caught.value.details["free_blocks"] == 3
    assert store.used_count == 7


def test_the_capacity_is_as_asked_though_the_last_slab_has_room_for_more(
    store: BlockStore,
) -> None:
    page_out(store, table(), *range(CAPACITY))
    with pytest.raises(CapacityError):
        page_out(store, table(), 0)


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(torch.tensor([5]), id="never used"),
        pytest.param(torch.tensor([-1]), id="negative"),
        pytest.param(torch.tensor([12]), id="beyond the end"),
        pytest.param(torch.tensor([0.0]), id="not an integer"),
        pytest.param(torch.tensor([[0]]), id="two-dimensional"),
    ],
)
def test_slots_that_are_not_in_use_are_refused(store: BlockStore, slots: torch.Tensor) -> None:
    page_out(store, table(), 0, 1)
    dst = torch.zeros(3, BLOCK, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"in use|index"):
        store.page_in(slots, dst)
    with pytest.raises(ValueError, match=r"in use|index"):
        store.free(slots)
    assert not dst.any()
    assert store.used_count == 2


def test_a_slot_is_freed_once(store: BlockStore) -> None:
    slots = page_out(store, table(), 0, 1)
    with pytest.raises(ValueError, match="only once"):
        store.free(torch.cat((slots, slots[:1])))
    store.free(slots)
    with pytest.raises(ValueError, match="not in use"):
        store.free(slots)
    assert store.used_count == 0


@pytest.mark.parametrize(
    "src",
    [
        pytest.param(torch.zeros(12, BLOCK + 1, dtype=torch.uint8), id="rows too large"),
        pytest.param(torch.zeros(12, BLOCK // 2, dtype=torch.uint8), id="rows too small"),
        pytest.param(torch.zeros(12, BLOCK, dtype=torch.int16), id="too large by dtype"),
        pytest.param(torch.zeros(BLOCK, 12, dtype=torch.uint8).t(), id="rows not dense"),
    ],
)
def test_rows_of_another_size_or_not_dense_are_refused(
    store: BlockStore, src: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="rows"):
        store.page_out(src, torch.tensor([0]))
    assert store.used_count == 0


@pytest.mark.parametrize("index", [[-1], [12], [0, 99]])
def test_an_index_outside_of_the_tensor_is_refused(store: BlockStore, index: list[int]) -> None:
    src = table()
    with pytest.raises(ValueError, match="within 0 and 11"):
        store.page_out(src, torch.tensor(index))
    slots = page_out(store, src, *range(len(index)))
    with pytest.raises(ValueError, match="within 0 and 11"):
        store.page_in(slots, src, torch.tensor(index))
    assert store.used_count == len(index)


def test_more_blocks_than_rows_are_refused(store: BlockStore) -> None:
    slots = page_out(store, table(), 0, 1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        store.page_in(slots, torch.zeros(2, BLOCK, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        store.page_in(slots, table(), torch.tensor([0]))


def test_an_empty_batch_is_a_batch(store: BlockStore) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    slots, transfer = store.page_out(table(), nothing)
    transfer.wait()
    assert slots.tolist() == []
    store.page_in(nothing, table(), nothing).wait()
    store.page_in(nothing, torch.empty(0, BLOCK, dtype=torch.uint8)).wait()
    store.free(nothing)


@pytest.mark.parametrize("block_bytes", [0, -1, SLAB + 1])
def test_a_block_must_fit_into_a_slab(aqua: Aqua, block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        aqua.block_store(block_bytes, 1)


def test_a_store_without_blocks_is_refused(aqua: Aqua) -> None:
    with pytest.raises(ConfigError, match="room for a block"):
        aqua.block_store(BLOCK, 0)


def test_a_store_that_does_not_fit_takes_nothing(aqua: Aqua) -> None:
    with pytest.raises(CapacityError):
        aqua.block_store(BLOCK, 9 * 4)
    assert " 0 of 8 frames," in repr(aqua)
    aqua.block_store(BLOCK, 8 * 4).close()


def test_blocks_need_not_divide_a_slab(aqua: Aqua) -> None:
    odd = SLAB // 3 - 100
    with aqua.block_store(odd, 7) as store:
        src = torch.randint(0, 256, (7, odd), dtype=torch.uint8)
        slots, transfer = store.page_out(src)
        transfer.wait()
        dst = torch.zeros_like(src)
        store.page_in(slots.flip(0), dst).wait()
        assert torch.equal(dst, src.flip(0))


def test_a_closed_or_forgotten_store_gives_its_room_back_and_refuses_use(aqua: Aqua) -> None:
    store = aqua.block_store(BLOCK, 32)
    page_out(store, table(), 0, 1)
    store.close()
    store.close()
    assert aqua.stats().used_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        store.page_out(table(), torch.tensor([0]))
    assert "closed" in repr(store)
    forgotten = aqua.block_store(BLOCK, 32)
    page_out(forgotten, table(), 0, 1)
    del forgotten
    gc.collect()
    aqua.block_store(BLOCK, 32).close()


def test_transfers_are_counted_in_bytes_and_time(aqua: Aqua, store: BlockStore) -> None:
    slots = page_out(store, table(), 0, 1, 2)
    store.page_in(slots[:2], table()).wait()
    stats = aqua.stats()
    assert (stats.paged_out_bytes, stats.paged_in_bytes) == (3 * BLOCK, 2 * BLOCK)
    sample = aqua.metrics.registry.get_sample_value
    out = {"direction": "out", "transport": "memfd"}
    assert sample("aqua_transfer_bytes_total", out) == 3 * BLOCK
    assert sample("aqua_transfer_duration_seconds_count", out) == 1


def test_the_store_says_where_its_blocks_are(store: BlockStore) -> None:
    slots = page_out(store, table(), 0)
    assert store.location() is store.location(slots) is Location.HOST
    assert "1/10 blocks of 16 KiB" in repr(store)
