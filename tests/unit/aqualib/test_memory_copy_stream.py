"""Transfers whose copies arrive late, as on a GPU: what holds pins, and what hears of a failure."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aqua_protocol import ChecksumMismatchError, TransportError
from aqualib import blocks
from aqualib.consumer import Aqua
from harness.consumers import LateCopier, consuming_late
from harness.producers import SLAB, until

BLOCK = SLAB // 4


def rows(count: int = 4) -> torch.Tensor:
    return torch.randint(1, 256, (count, BLOCK), dtype=torch.uint8)


def pins(aqua: Aqua) -> int:
    return sum(frame.pins for frame in aqua._store._table.frames.values())


def test_a_transfer_keeps_its_frames_in_place_until_it_is_waited_for() -> None:
    with consuming_late() as (aqua, _):
        store, src = aqua.block_store(BLOCK, 16), rows(8)
        slots, transfer = store.page_out(src)
        assert (transfer.is_done, pins(aqua)) == (False, 2)
        transfer.wait()
        transfer.wait()
        assert (transfer.is_done, pins(aqua)) == (True, 0)
        dst = torch.zeros_like(src)
        incoming = store.page_in(slots.flip(0), dst)
        assert not dst.any()
        incoming.wait()
        assert torch.equal(dst, src.flip(0))


def test_one_fence_ends_every_transfer_before_it() -> None:
    with consuming_late() as (aqua, _):
        store, src = aqua.block_store(BLOCK, 16), rows()
        first, second = store.page_out(src), store.page_out(src)
        second.transfer.wait()
        assert first.transfer.is_done
        assert pins(aqua) == 0
        first.transfer.wait()
        assert aqua.stats().paged_out_bytes == 2 * src.nbytes


def test_a_transfer_that_was_dropped_ends_with_the_next_one_of_its_thread() -> None:
    with consuming_late() as (aqua, _):
        store, src = aqua.block_store(BLOCK, 16), rows()
        slots, transfer = store.page_out(src)
        del transfer
        gc.collect()
        assert pins(aqua) == 1
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)
        assert pins(aqua) == 0


def test_a_failed_fence_is_heard_by_every_transfer_that_it_covers_however_often_they_wait() -> None:
    with consuming_late() as (aqua, copiers):
        store, src = aqua.block_store(BLOCK, 16), rows()
        transfers = [store.page_out(src).transfer for _ in range(3)]
        copiers[-1].failure = "the device has gone"
        for transfer in [*transfers, *transfers]:
            with pytest.raises(TransportError, match="the device has gone"):
                transfer.wait()
        assert pins(aqua) == 0
        failures = {"reason": "transport_failed"}
        sample = aqua.metrics.registry.get_sample_value
        assert sample("aqua_transfer_failures_total", failures) == 3
        assert aqua.stats().paged_out_bytes == 0


def test_the_next_transfer_gets_a_new_copier_and_the_old_one_lets_go_of_its_tensors() -> None:
    with consuming_late() as (aqua, copiers):
        store, src = aqua.block_store(BLOCK, 16), rows()
        slots, transfer = store.page_out(src)
        copiers[-1].failure = "the device has gone"
        broken = len(copiers)
        with pytest.raises(TransportError):
            transfer.wait()
        store.free(slots)
        slots, transfer = store.page_out(src)
        transfer.wait()
        assert len(copiers) == broken + 1
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_transfer_that_would_wait_for_a_frame_lets_go_of_those_that_it_holds(
    is_synchronous: bool,
) -> None:
    with consuming_late() as (aqua, copiers):
        aqua._transfers._is_synchronous = is_synchronous
        store, src = aqua.block_store(BLOCK, 8), rows(8)
        slots, transfer = store.page_out(src)
        transfer.wait()
        frames = store._frames
        held = aqua._store.pin(frames[1])
        assert held is frames[1].host
        outcome: list[bool] = []

        def page_in() -> None:
            dst = torch.zeros_like(src)
            store.page_in(slots, dst).wait()
            outcome.append(torch.equal(dst, src))

        ours = len(copiers)

        def fences_of_others(copiers: list[LateCopier]) -> int:
            return sum(copier.fence_count for copier in copiers[ours:])

        with aqua._store._changed:
            frames[1].state = frames[1].state.PROMOTING
        thread = threading.Thread(target=page_in)
        thread.start()
        until(lambda: fences_of_others(copiers) == 1, "the transfer has fenced what it could")
        until(lambda: frames[0].pins == 0, "it let go")
        with aqua._store._changed:
            frames[1].state = frames[1].state.HOST
            aqua._store._changed.notify_all()
        aqua._store.unpin(frames[1])
        thread.join(20)
        assert outcome == [True]
        assert pins(aqua) == 0


def test_a_checksum_is_compared_once_the_bytes_have_arrived() -> None:
    with consuming_late(is_checking=True) as (aqua, _):
        store, src = aqua.block_store(BLOCK, 8), rows()
        slots, transfer = store.page_out(src)
        transfer.wait()
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)
        store._frames[0].host.tensor[BLOCK] ^= 1
        transfer = store.page_in(slots, dst)
        for _ in range(2):
            with pytest.raises(ChecksumMismatchError) as caught:
                transfer.wait()
            assert caught.value.details["slots"] == [1]


def test_slots_of_a_checksum_that_failed_are_another_threads_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with consuming_late(is_checking=True) as (aqua, _):
        store, ours, theirs = aqua.block_store(BLOCK, 4), rows(), rows()

        def fail(*_: torch.Tensor | None) -> list[int]:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(blocks, "row_checksums", fail)
            with pytest.raises(MemoryError):
                store.page_out(ours)
        assert store.used_count == 0

        def page_out() -> torch.Tensor:
            slots, transfer = store.page_out(theirs)
            transfer.wait()
            return slots

        with ThreadPoolExecutor(1) as another:
            slots = another.submit(page_out).result()
        # Whatever this thread left under way has arrived once its next transfer has.
        dst = torch.zeros_like(theirs)
        store.page_in(slots, dst).wait()
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, theirs)
