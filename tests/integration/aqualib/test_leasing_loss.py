"""A producer that dies, and memory that cannot be read any more."""

from __future__ import annotations

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aqua_protocol import (
    ChecksumMismatchError,
    DataLostError,
    TransportError,
    TransportKind,
)
from aqualib import probe
from aqualib.producer.producer import Producer
from aqualib.tensor import AquaTensor, Location
from aqualib.transports import select
from aqualib.transports.host import HostCopier
from harness.bounds import HANG_S, until
from harness.consumers import LateTransport, await_rest, consuming
from harness.faults import UnforeseenError
from harness.loans import COUNT, lend, locations, require_intact, values
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports.base import Copier, MappedSlab


class TestLoss:
    def test_a_slab_that_cannot_be_read_raises_for_what_was_in_it_and_nothing_else(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with broken_reads() as (transport, broken), consuming(transport=transport) as aqua:
            lend(aqua, issuer, producer, 2)
            stored = values(3)
            tensors = [aqua.offload(value) for value in stored]
            broken.append(address_of(tensors[1]))
            assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
            await_rest(aqua)
            assert locations(tensors) == [Location.HOST, Location.LOST, Location.HOST]
            require_intact((tensors[at], stored[at]) for at in (0, 2))
            for access in (tensors[1].load, lambda: tensors[1].store(stored[1])):
                with pytest.raises(DataLostError, match="is lost") as caught:
                    access()
                assert "recompute" in caught.value.remedy
            with pytest.raises(DataLostError), tensors[1].pinned():
                pass
            assert aqua.stats().lost_bytes == SLAB
            has_changed, happened = aqua.has_changed, aqua.step()
            assert has_changed
            assert happened is not None
            assert happened.lost_bytes == SLAB
            assert not aqua.has_changed
            assert aqua.step() is None
            tensors[1].release()
            assert aqua.stats().lost_bytes == 0
            emptied = aqua.step()
            assert emptied is not None, "the frame can be used again: bytes are where they were not"
            assert emptied.lost_bytes == 0
            tensors[1] = aqua.offload(stored[1])
            require_intact(zip(tensors, stored, strict=True))

    def test_a_host_copy_that_is_still_good_saves_the_bytes(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with broken_reads() as (transport, broken), consuming(transport=transport) as aqua:
            stored = values(1)
            tensors = [aqua.offload(value) for value in stored]
            lend(aqua, issuer, producer, 1)
            await_rest(aqua)
            assert tensors[0].location is Location.PEER
            broken.append(address_of(tensors[0]))
            assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
            require_intact(zip(tensors, stored, strict=True))

    def test_lost_blocks_are_named_and_their_slots_come_back_when_freed(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with broken_reads() as (transport, broken), consuming(transport=transport) as aqua:
            lend(aqua, issuer, producer, 2)
            blocks = aqua.block_store(SLAB // 4, 8)
            src = torch.stack(values(7, SLAB // 4))
            slots, transfer = blocks.page_out(src)
            transfer.wait()
            slab = aqua.attachments[0].slabs[1]  # Under the second of the two frames.
            broken.append(slab.memory.tensor.data_ptr())
            assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
            await_rest(aqua)
            dst = torch.zeros_like(src)
            with pytest.raises(DataLostError) as caught:
                blocks.page_in(slots, dst)
            assert caught.value.details["slots"] == slots[4:].tolist()
            assert blocks.location(slots[4:]) is Location.LOST
            blocks.page_in(slots[:4], dst).wait()
            assert torch.equal(dst[:4], src[:4])
            with pytest.raises(DataLostError, match="not been freed"):
                blocks.page_out(src[:1])
            blocks.free(slots[4:])
            again, transfer = blocks.page_out(src[4:])
            transfer.wait()
            blocks.page_in(again, dst).wait()
            assert torch.equal(dst[:3], src[4:])

    @pytest.mark.parametrize("is_checking", [True, False])
    def test_a_flipped_bit_is_detected_by_the_checksum_and_by_nothing_else(
        self, issuer: TokenIssuer, producer: Producer, is_checking: bool
    ) -> None:
        with consuming(is_checking=is_checking) as aqua:
            lend(aqua, issuer, producer)
            (value,) = values(1)
            tensor = aqua.offload(value)
            blocks = aqua.block_store(SLAB // 4, 8)
            src = torch.stack(values(8, SLAB // 4))
            slots, transfer = blocks.page_out(src)
            transfer.wait()
            dst = torch.zeros_like(src)
            for slab in aqua.attachments[0].slabs:
                slab.memory.tensor[100] ^= 1
            if is_checking:
                with pytest.raises(ChecksumMismatchError):
                    tensor.load()
                with pytest.raises(ChecksumMismatchError), tensor.pinned():
                    pass
                with pytest.raises(ChecksumMismatchError) as caught:
                    blocks.page_in(slots, dst)
                assert caught.value.details["slots"] == [slots[0], slots[4]]
                blocks.page_in(slots[1:4], dst[1:4]).wait()
                tensor.store(value)
                assert torch.equal(tensor.load(), value)
            else:
                # The control: without the check the wrong byte comes through.
                assert (tensor.load() != value).nonzero().tolist() == [[100]]
                blocks.page_in(slots, dst).wait()
                assert (dst != src).nonzero().tolist() == [[0, 100], [4, 100]]


class BrokenCopier(HostCopier):
    """Cannot read from, or write to, slabs whose address is listed."""

    def __init__(self, broken: list[int]) -> None:
        self._broken = broken

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._require_whole(dst, src)
        super().copy(dst, src)

    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        self._require_whole(dst, src)
        super().copy_bytes(dst, dst_at, src, src_at, nbytes)

    def _require_whole(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() in self._broken:
                raise TransportError("the device is gone")


@contextlib.contextmanager
def broken_reads() -> Iterator[tuple[Any, list[int]]]:
    """A transport, and the list of addresses of slabs that it cannot copy from or to any more."""
    transport = select(TransportKind.MEMFD)
    broken: list[int] = []

    def copier(**_: bool) -> Copier:
        return BrokenCopier(broken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "copier", copier)
        yield transport, broken


def address_of(tensor: AquaTensor) -> int:
    """Of the slab in which the tensor's only piece is."""
    with tensor.pinned(writes=False) as view:
        return view.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "kind", [TransportError, torch.OutOfMemoryError, MemoryError, UnforeseenError]
)
def test_a_path_that_cannot_be_measured_strands_no_slab(
    monkeypatch: pytest.MonkeyPatch, issuer: TokenIssuer, producer: Producer, kind: type[Exception]
) -> None:
    def fail(_: object, mapped: MappedSlab) -> None:
        view = mapped.tensor[:1]
        raise kind(f"in the middle of {len(view)} bytes")

    with consuming() as aqua:
        stored = values(COUNT)
        tensors = [aqua.offload(value) for value in stored]
        with monkeypatch.context() as patch:
            patch.setattr(probe, "measure", fail)
            is_foreseen = kind is not UnforeseenError
            with pytest.raises(TransportError if is_foreseen else UnforeseenError):
                lend(aqua, issuer, producer)
            gc.collect()
        until(lambda: not aqua.attachments, "the attachment has ended")
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is back")
        assert producer.quarantined_bytes == 0
        lend(aqua, issuer, producer)
        await_rest(aqua)
        assert locations(tensors) == [Location.PEER] * COUNT
        require_intact(zip(tensors, stored, strict=True))


def test_a_reclaim_is_not_held_up_by_a_thread_that_has_ended(
    issuer: TokenIssuer, producer: Producer
) -> None:
    with consuming(transport=LateTransport()) as aqua:
        lend(aqua, issuer, producer)
        store = aqua.block_store(SLAB, COUNT)
        src = torch.randint(1, 256, (COUNT, SLAB), dtype=torch.uint8)

        def page_out() -> list[int]:
            slots: list[int] = store.page_out(src).slots.tolist()
            return slots

        with ThreadPoolExecutor(1) as thread:
            slots = torch.tensor(thread.submit(page_out).result())
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        dst = torch.zeros_like(src)
        store.page_in(slots, dst).wait()
        assert torch.equal(dst, src)
