from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from aqua_protocol import KIB, MIB
from aqualib.engines.vllm.paging import rows as rows_module
from aqualib.engines.vllm.paging import worker as worker_module
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.rows import BlockCopier, by_layers
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.ranges import Range
from aqualib.transports.gpu_thresholds import CopyThresholds
from harness.bounds import HANG_S
from harness.consumers import consuming
from harness.cuda.stand_in import stand_in

BLOCKS = 16
LAYERS = ("zero", "one", "two", "three")
ROW_BYTES = 4096
OUT = PagingPlan(out_places=[0, 1, 2, 3, 4, 5], out_blocks=[0, 1, 2, 3, 4, 5])
BACK = PagingPlan(
    in_places=[0, 1, 2, 3, 4, 5], in_blocks=[8, 9, 10, 11, 12, 13], written_blocks=[13]
)


def caches() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    # In memory the layers lie in another order than in the model.
    made = [torch.randint(1, 200, (BLOCKS, ROW_BYTES), generator=generator) for _ in LAYERS]
    made = [each.to(torch.uint8) for each in made]
    made.sort(key=lambda each: -each.data_ptr())
    return dict(zip(LAYERS, made, strict=True))


@contextmanager
def paged_out(
    *, is_checking: bool = False
) -> Iterator[tuple[KvPagingWorker, dict[str, torch.Tensor]]]:
    layers = caches()
    rows, ends = by_layers(layers, BLOCKS)
    with consuming(is_checking=is_checking) as aqua:
        worker = KvPagingWorker(rows, aqua, 8, ends)
        worker.page_out(OUT)
        try:
            yield worker, layers
        finally:
            worker.close()


@pytest.fixture(autouse=True)
def short_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STAGING_BYTES", 2 * len(LAYERS) * ROW_BYTES)
    shortest = CopyThresholds(device_run_bytes=1, host_run_bytes=1)
    monkeypatch.setattr(rows_module, "CopyThresholds", lambda: shortest)
    monkeypatch.setattr(rows_module, "CUT_ON", {"cpu"})


@contextmanager
def held_from(
    worker: KvPagingWorker, start: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Columns from this byte of a block on are not loaded before they are let go."""
    go_on, page_in = threading.Event(), worker.store.page_in  # type: ignore[union-attr] # there

    def gated(*args: Any, columns: Range | None = None) -> Any:  # noqa: ANN401 - a transfer
        if columns is not None and columns.start >= start:
            assert go_on.wait(HANG_S)
        return page_in(*args, columns=columns)

    monkeypatch.setattr(worker.store, "page_in", gated)
    try:
        yield go_on.set
    finally:
        go_on.set()


def test_a_layer_waits_for_its_blocks_and_not_for_those_of_later_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        paged_out() as (worker, layers),
        held_from(worker, 2 * ROW_BYTES, monkeypatch) as let_go,
    ):
        waited = worker.step_wait_s
        worker.page_in(BACK, is_layer_wise=True)
        for name in LAYERS[:2]:
            worker.await_layer(name)
            assert torch.equal(layers[name][8:14], layers[name][:6])
        assert not torch.equal(layers["three"][8:13], layers["three"][:5]), "it is held"
        let_go()
        worker.await_layer("three")
        assert torch.equal(layers["three"][8:14], layers["three"][:6])
        assert worker.take_failed_blocks() == set()
        assert worker.step_wait_s > waited
        assert worker.paged_bytes["in"] == 6 * worker.block_bytes, "each block counts once"


def test_what_the_step_writes_to_is_there_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paged_out() as (worker, layers), held_from(worker, 0, monkeypatch):
        worker.page_in(BACK, is_layer_wise=True)
        for layer in layers.values():
            assert torch.equal(layer[13], layer[5])
            assert not torch.equal(layer[8], layer[0])


def test_a_layer_without_a_cache_of_its_own_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        paged_out() as (worker, layers),
        held_from(worker, 2 * ROW_BYTES, monkeypatch) as let_go,
    ):
        worker.page_in(BACK, is_layer_wise=True)
        asking = threading.Thread(target=let_go)
        asking.start()
        worker.await_layer("reads another's")
        assert torch.equal(layers["three"][8:14], layers["three"][:6])
        asking.join()


def test_the_end_of_a_step_waits_for_what_no_layer_asked_for() -> None:
    with paged_out() as (worker, layers):
        worker.page_in(BACK, is_layer_wise=True)
        assert worker.take_failed_blocks() == set()
        for layer in layers.values():
            assert torch.equal(layer[8:14], layer[:6])


@pytest.mark.parametrize("why", ["no layer is asked for", "checksums", "all fit", "a CPU"])
def test_blocks_come_whole_where_they_must(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with paged_out(is_checking=why == "checksums") as (worker, layers):
        if why == "a CPU":
            monkeypatch.setattr(rows_module, "CUT_ON", {"cuda"})
        some = slice(2 if why == "all fit" else 6)
        plan = PagingPlan(in_places=BACK.in_places[some], in_blocks=BACK.in_blocks[some])
        count = len(plan.in_places)
        with held_from(worker, 0, monkeypatch):
            worker.page_in(plan, is_layer_wise=why != "no layer is asked for")
            for layer in layers.values():
                assert torch.equal(layer[8 : 8 + count], layer[:count]), "there before the step"


def test_a_block_that_fails_in_one_column_is_computed_again_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paged_out() as (worker, layers):
        page_in = worker.store.page_in  # type: ignore[union-attr] # there

        def fail(*args: Any, columns: Range | None = None) -> Any:  # noqa: ANN401 - a transfer
            if columns is not None and 0 < columns.start < columns.end < worker.block_bytes:
                raise RuntimeError("no device")
            return page_in(*args, columns=columns)

        monkeypatch.setattr(worker.store, "page_in", fail)
        worker.page_in(BACK, is_layer_wise=True)
        for name in LAYERS:
            worker.await_layer(name)
        assert worker.take_failed_blocks() == {8, 9, 10, 11, 12}
        report = worker.take_report()
        assert report is not None
        assert report.lost_places == {0, 1, 2, 3, 4}
        assert torch.equal(layers["one"][13], layers["one"][5])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 16])
def test_columns_take_no_more_parts_than_whole_blocks_as_long_as_they_may_be_so_short(
    count: int,
) -> None:
    copier = BlockCopier(by_layers(caches(), BLOCKS)[0])
    room = 2 * copier.block_bytes
    columns = copier.columns(count, room)
    assert columns[0].start == 0
    assert columns[-1].end == copier.block_bytes
    assert all(left.end == right.start for left, right in pairwise(columns))
    assert len(columns) == -(-count // 2)
    assert max(column.size for column in columns) * count <= room


def test_columns_are_no_shorter_than_copy_engines_like(monkeypatch: pytest.MonkeyPatch) -> None:
    shortest = CopyThresholds(device_run_bytes=1, host_run_bytes=ROW_BYTES)
    monkeypatch.setattr(rows_module, "CopyThresholds", lambda: shortest)
    copier = BlockCopier(by_layers(caches(), BLOCKS)[0])
    columns = copier.columns(64, copier.block_bytes)
    assert len(columns) == 4
    assert min(column.size for column in columns) >= ROW_BYTES


def test_a_large_model_has_its_blocks_back_in_fifteen_columns_of_three_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "CopyThresholds", CopyThresholds)
    copier = BlockCopier([torch.empty((1, 5 * MIB), dtype=torch.uint8)])
    columns = copier.columns(256, 30 * MIB)
    assert len(columns) == 15
    assert min(column.size for column in columns) > 256 * KIB
    assert sum(-(-256 // (30 * MIB // column.size)) for column in columns) == 45
    assert -(-256 // 6) == 43, "parts of whole blocks"


def test_a_gpu_whose_driver_takes_no_batches_gets_its_blocks_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "CUT_ON", {"cuda"})
    with stand_in() as standing:
        shortest = CopyThresholds(device_run_bytes=1, host_run_bytes=1)
        monkeypatch.setattr(standing.driver.device(0), "thresholds", shortest)
        layers = [torch.zeros((BLOCKS, ROW_BYTES), dtype=torch.uint8, device="cuda:0")] * 2
        copier = BlockCopier(layers)
        assert len(copier.columns(BLOCKS, copier.block_bytes)) == 2
        monkeypatch.setattr(standing.driver, "batch_copy", None)
        assert copier.columns(BLOCKS, copier.block_bytes) == [copier.whole]
        del layers, copier


def test_layers_over_each_other_end_where_their_own_bytes_do() -> None:
    memory = torch.zeros((BLOCKS, 96), dtype=torch.uint8)
    apart = torch.zeros((2, BLOCKS, 8), dtype=torch.uint8)
    layers = {"a": apart, "b": memory[:, 32:64], "c": memory[:, 0:32], "d": memory[:, 0:64]}
    rows, ends = by_layers(layers, BLOCKS)
    assert [row.shape[1] for row in rows] == [8, 8, 64]
    assert ends == {"a": 16, "b": 80, "c": 48, "d": 80}
