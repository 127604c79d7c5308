from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from aqua_protocol import ConfigError, TransportError
from aqualib.engines.vllm.paging import rows as rows_module
from aqualib.engines.vllm.paging import worker as worker_module
from aqualib.engines.vllm.paging.plan import PagingPlan, WorkerReport, WorkerStore
from aqualib.engines.vllm.paging.row_table import row_table
from aqualib.engines.vllm.paging.rows import BlockCopier, block_rows
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.ranges import Range
from harness.bounds import HANG_S, until
from harness.consumers import consuming

BLOCKS = 16


def cache(seed: int) -> torch.Tensor:
    """A layer's cache, heads before tokens in the view and after them in memory."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn((BLOCKS, 2, 8, 4, 16), generator=generator)
    return memory.permute(0, 1, 3, 2, 4)


@contextmanager
def paging(capacity: int = 12) -> Iterator[tuple[KvPagingWorker, list[torch.Tensor]]]:
    layers = [cache(seed) for seed in range(3)]
    with consuming() as aqua:
        worker = KvPagingWorker(block_rows(layers, BLOCKS), aqua, capacity)
        try:
            yield worker, layers
        finally:
            worker.close()


@pytest.mark.parametrize("is_one_table", [True, False])
def test_blocks_come_back_into_other_blocks(
    monkeypatch: pytest.MonkeyPatch, *, is_one_table: bool
) -> None:
    if not is_one_table:
        monkeypatch.setattr(rows_module, "row_table", lambda _: None)
    with paging() as (worker, layers):
        before = [layer.clone() for layer in layers]
        worker.page_out(PagingPlan(out_places=[3, 0, 7], out_blocks=[1, 5, 9]))
        for layer in layers:
            layer.zero_()
        worker.page_in(PagingPlan(in_places=[0, 3, 7], in_blocks=[2, 4, 6]))
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer[2], was[5])
            assert torch.equal(layer[4], was[1])
            assert torch.equal(layer[6], was[9])
            assert not layer[0].any()
        assert worker.take_failed_blocks() == set()
        assert worker.paged_bytes == dict.fromkeys(("out", "in"), 3 * worker.block_bytes)
        assert worker.step_wait_s >= sum(worker.paging_s.values()) > 0, "the steps waited for all"


def test_a_rate_that_nothing_has_measured_for_long_is_unknown_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "MIN_RATE_BYTES", 1)
    with paging() as (worker, _):
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
        measured = worker.take_report()
        assert measured is not None
        assert measured.link_bytes_per_s > 0
        monkeypatch.setattr(worker_module, "RATE_LIFETIME_S", -1.0)
        forgotten = worker.take_report()
        assert forgotten is not None
        assert forgotten.link_bytes_per_s == 0
        monkeypatch.setattr(worker_module, "RATE_LIFETIME_S", HANG_S)
        worker.page_in(PagingPlan(in_places=[0], in_blocks=[1]))
        anew = worker.take_report()
        assert anew is not None
        assert anew.link_bytes_per_s > 0


def test_blocks_of_an_odd_number_of_bytes_come_back_too() -> None:
    layers = [torch.arange(BLOCKS * 9, dtype=torch.uint8).reshape(BLOCKS, 9) + at for at in (0, 7)]
    before = [layer.clone() for layer in layers]
    with consuming() as aqua:
        worker = KvPagingWorker(block_rows(layers, BLOCKS), aqua, 4)
        worker.page_out(PagingPlan(out_places=[0, 1], out_blocks=[5, 9]))
        worker.page_in(PagingPlan(in_places=[0, 1], in_blocks=[9, 5]))
        worker.close()
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[9], was[5])
        assert torch.equal(layer[5], was[9])


def test_more_blocks_than_the_staging_buffer_holds_go_in_stretches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "STAGING_BYTES", 1)
    with paging() as (worker, layers):
        before = layers[0].clone()
        worker.page_out(PagingPlan(out_places=list(range(12)), out_blocks=list(range(12))))
        layers[0].zero_()
        worker.page_in(PagingPlan(in_places=list(range(12)), in_blocks=list(range(12))))
        assert torch.equal(layers[0][:12], before[:12])


def test_an_empty_place_is_reported_and_its_block_computed_again() -> None:
    with paging() as (worker, _):
        worker.page_out(PagingPlan(out_places=[1], out_blocks=[1]))
        worker.page_in(PagingPlan(in_places=[1, 2], in_blocks=[3, 4]))
        assert worker.take_failed_blocks() == {4}
        assert worker.take_failed_blocks() == set(), "told once"
        report = worker.take_report()
        assert report is not None
        assert report.lost_places == {2}


def test_dropped_places_give_their_room_back() -> None:
    with paging(capacity=2) as (worker, _):
        for _ in range(5):
            worker.page_out(PagingPlan(out_places=[0, 1], out_blocks=[0, 1]))
            worker.page_out(PagingPlan(drops=[0, 1]))
        assert worker.store is not None
        assert worker.store.used_count == 0
        assert worker.failures == {}


def test_a_place_that_is_filled_again_holds_the_new_block() -> None:
    with paging() as (worker, layers):
        wanted = layers[0][2].clone()
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[2]))
        worker.page_in(PagingPlan(in_places=[0], in_blocks=[5]))
        assert torch.equal(layers[0][5], wanted)


def test_loads_beside_the_model_arrive() -> None:
    with paging() as (worker, layers):
        wanted = layers[1][1].clone()
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
        worker.page_in(PagingPlan(async_loads={"r": ([0], [8]), "s": ([5], [9])}))
        worker.close()
        assert worker.take_arrived() == {"r", "s"}, "failed ones end as well"
        assert torch.equal(layers[1][8], wanted)
        assert worker.take_failed_blocks() == {9}


def test_without_a_store_everything_is_computed_again_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="aqualib")
    layers = [cache(0)]
    with consuming(host_slabs=1) as aqua:
        worker = KvPagingWorker(block_rows(layers, BLOCKS), aqua, 100_000)
        for _ in range(3):
            worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
            worker.page_in(PagingPlan(in_places=[0], in_blocks=[1]))
        assert worker.take_failed_blocks() == {1}
        assert worker.location().value == "nowhere"
        worker.close()
    assert len([r for r in caplog.records if "no store for KV blocks" in r.message]) == 1


def test_keys_and_values_that_lie_apart_are_two_rows() -> None:
    rows = block_rows([torch.zeros((2, BLOCKS, 8, 4, 16))], BLOCKS)
    assert [tuple(row.shape) for row in rows] == [(BLOCKS, 8 * 4 * 16 * 4)] * 2


def test_blocks_that_a_kernel_cuts_in_two_are_one_row() -> None:
    (row,) = block_rows([torch.zeros((2 * BLOCKS, 8, 16))], BLOCKS)
    assert row.shape == (BLOCKS, 2 * 8 * 16 * 4)


def test_layers_that_share_a_cache_count_once() -> None:
    layer = cache(0)
    assert len(block_rows([layer, layer], BLOCKS)) == 1


def test_a_layout_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot find 16 blocks"):
        block_rows([torch.zeros((3, 5, 7))], BLOCKS)


def test_layers_that_lie_together_in_a_block_are_one_row() -> None:
    # 32 elements of a layer are a multiple of 16 as well, but they are no blocks.
    both = torch.zeros((BLOCKS, 2, 32))
    (row,) = block_rows([both[:, 1], both[:, 0]], BLOCKS)
    assert row.is_contiguous()
    assert row.shape == (BLOCKS, 2 * 32 * 4)


def test_groups_that_lie_over_each_other_are_one_row_without_the_gap() -> None:
    memory = torch.zeros((BLOCKS, 100), dtype=torch.uint8)
    layers = [memory[:, 0:24], memory[:, 24:40], memory[:, 0:32], memory[:, 48:56]]
    rows = block_rows([layers[0], layers[1:]], BLOCKS)
    assert [(row.storage_offset(), row.shape[1]) for row in rows] == [(0, 40), (48, 8)]
    memory[3] = torch.arange(100, dtype=torch.uint8)
    copier = BlockCopier(rows)
    staged = torch.zeros((1, 48), dtype=torch.uint8)
    copier.gather([3], staged)
    copier.scatter(staged, [5])
    assert [memory[5, at].item() for at in (0, 39, 40, 47, 48, 55, 56)] == [0, 39, 0, 0, 48, 55, 0]


def test_only_blocks_of_layers_are_touched_in_the_memory_that_their_table_spans() -> None:
    memory = torch.zeros((6, BLOCKS, 64), dtype=torch.uint8)
    layers = [memory[4], memory[0], memory[3]]
    table = row_table(block_rows(layers, BLOCKS))
    assert table is not None
    staged = torch.randint(1, 255, (2, 3 * 64), dtype=torch.uint8)
    table.scatter(staged, [7, 2], Range(0, 3 * 64))
    found = torch.zeros_like(staged)
    table.gather([7, 2], found)
    assert torch.equal(found, staged)
    # One layer of one block.
    table.scatter(staged[:1, 64:128], [9], Range(64, 64))
    written = {(at, block) for at in (0, 3, 4) for block in (2, 7)} | {(3, 9)}
    assert {tuple(each) for each in memory.any(dim=2).nonzero().tolist()} == written


def test_blocks_that_a_kernel_cuts_with_a_gap_behind_each_are_rows_of_their_own() -> None:
    padded = torch.zeros((2 * BLOCKS, 40), dtype=torch.uint8)
    rows = block_rows([padded[:, :32]], BLOCKS)
    assert [(row.storage_offset(), tuple(row.shape), row.stride(0)) for row in rows] == [
        (0, (BLOCKS, 32), 80),
        (40, (BLOCKS, 32), 80),
    ]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("of the device")])
def test_a_load_beside_the_model_that_has_no_memory_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with paging() as (worker, _):
        worker.page_out(PagingPlan(out_places=[0, 1], out_blocks=[1, 2]))
        with monkeypatch.context() as patch:
            patch.setattr(worker.store, "page_in", _raising(error))
            worker.page_in(PagingPlan(async_loads={"r": ([0, 1], [8, 9])}))
            while not (arrived := worker.take_arrived()):
                pass
        assert arrived == {"r"}
        assert worker.take_failed_blocks() == {8, 9}
        assert worker.store is not None
        assert worker.store.used_count == 0


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def reported(worker: KvPagingWorker, number: int) -> WorkerReport:
    """The report that acknowledges this page-out."""
    reports: list[WorkerReport] = []

    def is_acknowledged() -> bool:
        report = worker.take_report()
        if report is not None:
            reports.append(report)
        return any(each.saved for each in reports)

    until(is_acknowledged, "the page-out is acknowledged")
    (found,) = [each for each in reports if each.saved]
    assert found.saved == {number: 1}
    # What is lost may be told in a report before the one that acknowledges.
    found.lost_places.update(*(each.lost_places for each in reports))
    return found


def test_page_outs_beside_the_model_are_there_when_they_are_acknowledged() -> None:
    with paging() as (worker, layers):
        wanted = layers[1][5].clone()
        worker.page_out(PagingPlan(async_saves={7: ([0, 3], [1, 5])}))
        assert not reported(worker, 7).lost_places
        for layer in layers:
            layer.zero_()
        worker.page_in(PagingPlan(in_places=[3], in_blocks=[2]))
        assert torch.equal(layers[1][2], wanted)
        assert worker.paged_bytes == {"out": 2 * worker.block_bytes, "in": worker.block_bytes}


@pytest.mark.parametrize("error", [TransportError("no link"), RuntimeError("no device")])
def test_page_outs_beside_the_model_that_fail_are_acknowledged_as_lost(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def page_out(*_: object) -> None:
        raise error

    with paging() as (worker, _):
        monkeypatch.setattr(worker.store, "page_out", page_out)
        worker.page_out(PagingPlan(async_saves={1: ([0, 3], [1, 5])}))
        assert reported(worker, 1).lost_places == {0, 3}


def test_page_outs_that_requests_wait_for_go_before_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[list[int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def gather(_: object, blocks: list[int], __: object) -> None:
        order.append(blocks)
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr(BlockCopier, "gather", gather)
    with paging() as (worker, _):
        worker.page_out(PagingPlan(async_saves={1: ([0], [1]), 2: ([1], [2]), 3: ([2], [3])}))
        assert begun.wait(10)
        worker.page_out(PagingPlan(async_saves={4: ([3], [4])}, urgent_saves=[4, 3, 1]))
        go_on.set()
        until(lambda: len(order) == 4, "all are read")
    assert order == [[1], [4], [3], [2]], "what is urgent, in its order; none twice"


def test_a_worker_says_once_what_its_store_holds() -> None:
    with paging(capacity=5) as (worker, _):
        report = worker.take_report()
        assert report is not None
        assert report.store == WorkerStore(5, worker.block_bytes)
        assert worker.take_report() is None


def test_a_plan_is_sent_as_what_is_not_empty_in_it() -> None:
    plan = PagingPlan(in_places=[3], async_loads={"a": ([1], [2])})
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own
    assert pickle.loads(pickle.dumps(PagingPlan())) == PagingPlan()  # noqa: S301 - our own
    assert len(pickle.dumps(PagingPlan())) < len(pickle.dumps(plan))


def test_a_worker_is_at_rest_once_all_is_told() -> None:
    def told(worker: KvPagingWorker) -> bool:
        worker.take_arrived()
        worker.take_failed_blocks()
        worker.take_report()
        worker.take_totals()
        return worker.is_at_rest

    with paging() as (worker, _):
        assert not worker.is_at_rest, "what its store holds is not told yet"
        assert told(worker)
        worker.page_in(PagingPlan(in_places=[5], in_blocks=[9]))
        assert not worker.is_at_rest, "it was empty"
        assert told(worker)
        worker.page_out(PagingPlan(async_saves={1: ([0], [1])}))
        worker.page_in(PagingPlan(async_loads={"r": ([0], [8])}))
        assert not worker.is_at_rest, "they are under way, or have ended"
        until(lambda: told(worker), "copies are under way")


def test_a_step_that_pages_nothing_changes_no_figure() -> None:
    with paging() as (worker, _):
        worker.take_report()
        assert worker.take_totals()
        worker.page_out(PagingPlan())
        worker.page_in(PagingPlan())
        assert worker.take_totals() is None, "figures that change are sent with every step"
        assert worker.take_report() is None
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
        counted = worker.take_totals()
        assert counted is not None
        assert counted["kv_paged_out_bytes"] == worker.block_bytes
        assert counted["kv_step_wait_seconds"] > 0
