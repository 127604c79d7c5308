"""Transfers whose copies arrive late, as on a GPU: what holds pins, and what hears of a failure."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aqua_protocol import ChecksumMismatchError, TransportError
from aqualib import blocks
from aqualib.blocks import BlockStore
from aqualib.memory.frame import Frame, PeerSlab
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.migration_policy import Promotion
from aqualib.memory.transfers import Transfers
from aqualib.metrics import ConsumerMetrics, Direction
from harness.bounds import HANG_S, until
from harness.consumers import IDENTITY, LateCopier, LateTransport
from harness.memory import PaperLender, PaperSlab
from harness.producers import SLAB

BLOCK = SLAB // 4


class Late:
    """Frames without a migrator, and transfers to and from them whose copies arrive late."""

    def __init__(self, *, is_checking: bool = False, is_synchronous: bool = False) -> None:
        transport = LateTransport(is_synchronous=is_synchronous)
        self.copiers = transport.copiers
        self.store = FrameStore(transport, slab_bytes=SLAB, host_bytes=64 * SLAB)
        self.metrics = ConsumerMetrics(transport.kind, IDENTITY)
        self.transfers = Transfers(self.store, transport, self.metrics, is_checking=is_checking)

    def blocks(self, capacity_blocks: int) -> BlockStore:
        return BlockStore(self.transfers, block_bytes=BLOCK, capacity_blocks=capacity_blocks)

    def frames(self) -> list[Frame]:
        with self.store.answering() as (table, _):
            return list(table.frames.values())

    def pins(self) -> int:
        return sum(frame.pins for frame in self.frames())


@contextlib.contextmanager
def late_copies(*, is_checking: bool = False, is_synchronous: bool = False) -> Iterator[Late]:
    """Audited at the end."""
    late = Late(is_checking=is_checking, is_synchronous=is_synchronous)
    yield late
    late.store.audit()
    late.store.close("the test is over", timeout_s=0)


def rows(count: int = 4) -> torch.Tensor:
    return torch.randint(1, 256, (count, BLOCK), dtype=torch.uint8)


def test_a_transfer_keeps_its_frames_in_place_until_it_is_waited_for() -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows(8)
        slots, transfer = store.page_out(src)
        assert (transfer.is_done, late.pins()) == (False, 2)
        transfer.wait()
        transfer.wait()
        assert (transfer.is_done, late.pins()) == (True, 0)
        dst = torch.zeros_like(src)
        incoming = store.page_in(slots.flip(0), dst)
        assert not dst.any()
        incoming.wait()
        assert torch.equal(dst, src.flip(0))


def test_one_fence_ends_every_transfer_before_it() -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        first, second = store.page_out(src), store.page_out(src)
        second.transfer.wait()
        assert first.transfer.is_done
        assert late.pins() == 0
        first.transfer.wait()
        assert late.metrics.paged_bytes[Direction.OUT] == 2 * src.nbytes


def test_a_transfer_that_was_dropped_ends_with_the_next_one_of_its_thread() -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        slots, transfer = store.page_out(src)
        del transfer
        gc.collect()
        assert late.pins() == 1
        dst = torch.zeros_like(src)
        incoming = store.page_in(slots, dst)
        assert late.pins() == 1, "of the second alone"
        incoming.wait()
        assert torch.equal(dst, src)
        assert late.pins() == 0


def test_slots_of_a_page_out_that_was_refused_half_way_are_free_of_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with late_copies() as late:
        store, src = late.blocks(8), rows(8)
        slots, transfer = store.page_out(src)
        transfer.wait()
        store.free(slots)
        (copier,) = late.copiers
        copy, copied = copier.copy, itertools.count()

        def copy_once(dst: torch.Tensor, src: torch.Tensor) -> None:
            if next(copied):
                raise RuntimeError("CUDA error: out of memory")
            copy(dst, src)

        with monkeypatch.context() as patch:
            patch.setattr(copier, "copy", copy_once)
            with pytest.raises(TransportError, match="out of memory"):
                store.page_out(src)
        assert (late.pins(), store.free_count) == (0, 8)

        def page_out() -> torch.Tensor:
            slots, transfer = store.page_out(src + 1)
            transfer.wait()
            return slots

        with ThreadPoolExecutor(1) as other:
            slots = other.submit(page_out).result()
        copier.fence()  # It has nothing left that comes late.
        back = torch.zeros_like(src)
        store.page_in(slots, back).wait()
        assert torch.equal(back, src + 1)


def test_a_failed_fence_is_heard_by_every_transfer_that_it_covers_however_often_they_wait() -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        transfers = [store.page_out(src).transfer for _ in range(3)]
        late.copiers[-1].failure = "the device has gone"
        for transfer in [*transfers, *transfers]:
            with pytest.raises(TransportError, match="the device has gone"):
                transfer.wait()
        assert late.pins() == 0
        failures = {"reason": "transport_failed"}
        sample = late.metrics.registry.get_sample_value
        assert sample("aqua_transfer_failures_total", failures) == 3
        assert late.metrics.paged_bytes[Direction.OUT] == 0


def test_the_next_transfer_gets_a_new_copier_and_the_old_one_lets_go_of_its_tensors() -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        slots, transfer = store.page_out(src)
        late.copiers[-1].failure = "the device has gone"
        broken = len(late.copiers)
        with pytest.raises(TransportError):
            transfer.wait()
        store.free(slots)
        slots, transfer = store.page_out(src)
        transfer.wait()
        assert len(late.copiers) == broken + 1
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_transfer_that_would_wait_for_a_frame_lets_go_of_those_that_it_holds(
    is_synchronous: bool,
) -> None:
    with late_copies(is_synchronous=is_synchronous) as late:
        store, src = late.blocks(8), rows(8)
        slots, transfer = store.page_out(src)
        transfer.wait()
        stays, moves = late.frames()
        late.store.pin(stays)
        late.store.adopt([PeerSlab(0, 1, PaperSlab(SLAB), PaperLender())])
        promotion = late.store.next_migration()
        assert isinstance(promotion, Promotion)
        assert promotion.frame is moves
        late.store.unpin(stays)
        outcome: list[bool] = []

        def page_in() -> None:
            dst = torch.zeros_like(src)
            store.page_in(slots, dst).wait()
            outcome.append(torch.equal(dst, src))

        ours = len(late.copiers)

        def fences_of_others(copiers: list[LateCopier]) -> int:
            return sum(copier.fence_count for copier in copiers[ours:])

        thread = threading.Thread(target=page_in)
        thread.start()
        until(lambda: fences_of_others(late.copiers) == 1, "the transfer has fenced what it could")
        until(lambda: stays.pins == 0, "it let go")
        with late.store.answering() as (table, now_s):
            table.abandoned(promotion, now_s)
        thread.join(HANG_S)
        assert outcome == [True]
        assert late.pins() == 0


def test_a_checksum_is_compared_once_the_bytes_have_arrived() -> None:
    with late_copies(is_checking=True) as late:
        store, src = late.blocks(8), rows()
        slots, transfer = store.page_out(src)
        transfer.wait()
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)
        late.frames()[0].host.tensor[BLOCK] ^= 1
        transfer = store.page_in(slots, dst)
        for _ in range(2):
            with pytest.raises(ChecksumMismatchError) as caught:
                transfer.wait()
            assert caught.value.details["slots"] == [1]


def test_slots_of_a_checksum_that_failed_are_another_threads_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with late_copies(is_checking=True) as late:
        store, ours, theirs = late.blocks(4), rows(), rows()

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


def test_a_fence_that_is_cut_short_keeps_the_pins_until_one_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        slots, transfer = store.page_out(src)
        with monkeypatch.context() as patch:
            patch.setattr(late.copiers[-1], "fence", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                transfer.wait()
            assert (transfer.is_done, late.pins()) == (False, 1)
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)
        assert (transfer.is_done, late.pins()) == (True, 0)


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_pins_of_a_thread_that_has_ended_end_with_its_copies(is_kept: bool) -> None:
    with late_copies() as late:
        store, src = late.blocks(16), rows()
        kept: list[object] = []

        def page_out() -> None:
            kept.append(store.page_out(src))

        with ThreadPoolExecutor(1) as thread:
            thread.submit(page_out).result()
        if not is_kept:
            kept.clear()
        gc.collect()
        assert late.pins() == 1
        fences = sum(copier.fence_count for copier in late.copiers)
        late.store.sweep()
        assert late.pins() == 0
        assert sum(copier.fence_count for copier in late.copiers) == fences + 1
