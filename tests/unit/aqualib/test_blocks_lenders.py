from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby

import pytest
import torch

from aqualib.blocks import BlockStore
from aqualib.consumer import Aqua
from aqualib.producer.producer import Producer
from aqualib.transports.host import HostCopier
from aqualib.transports.memfd import MemfdTransport
from harness.bounds import HANG_S
from harness.consumers import consuming, grant
from harness.producers import SLAB, lending
from harness.raw_consumer import TokenIssuer

BLOCK_BYTES = SLAB // 8
LENDERS = ("one", "two", "three")


class LaneTransport(MemfdTransport):
    """Spreads what is large over lanes, and notes which frames are read from, in order."""

    def __init__(self, lane_count: int) -> None:
        self.lane_count = lane_count
        self.read_from: list[int] = []

    def lanes(self, nbytes: int) -> int:
        return self.lane_count if nbytes >= 4 * BLOCK_BYTES else 1

    def copier(self, *, is_background: bool = False) -> HostCopier:
        return NotingCopier([] if is_background else self.read_from)


class NotingCopier(HostCopier):
    def __init__(self, read_from: list[int]) -> None:
        self._read_from = read_from

    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        self._read_from.append(src.untyped_storage().data_ptr())
        super().gather(dst, src, index)


@contextmanager
def borrowing(
    transport: LaneTransport, lenders: tuple[str, ...] = LENDERS[:2]
) -> Iterator[tuple[Aqua, BlockStore, dict[str, Producer]]]:
    """A store of eight frames, of which each lender has two."""
    producers: dict[str, Producer] = {}
    with ExitStack() as stack:
        aqua = stack.enter_context(consuming(8, SLAB, transport=transport))
        for name in lenders:
            issuer = TokenIssuer(name)
            producer = stack.enter_context(lending(issuer, 2, producer_id=name, slab_bytes=SLAB))
            aqua.attach(grant(issuer, producer.endpoint, 2, slab_bytes=SLAB, producer_id=name))
            producers[name] = producer
        yield aqua, stack.enter_context(aqua.block_store(BLOCK_BYTES, 64)), producers


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8).view(count, -1)


def at_home_after_reclaim(producer: Producer, store: BlockStore, slots: torch.Tensor) -> list[int]:
    """Which of the blocks come home when this lender takes all back."""
    assert producer.reclaim(2 * SLAB).wait(HANG_S)
    return [at for at, slot in enumerate(slots) if store.location(slot.view(1)).value == "host"]


@pytest.mark.parametrize(
    ("lanes", "count", "expected"),
    [(1, 8, 8), (2, 8, 4), (2, 7, 3), (2, 2, 2), (3, 8, 4)],
    ids=["one lane", "halves", "odd", "small", "more lanes than lenders"],
)
def test_blocks_paged_out_together_lie_with_as_many_lenders_as_there_are_lanes(
    lanes: int, count: int, expected: int
) -> None:
    with borrowing(LaneTransport(lanes)) as (_, store, producers):
        slots, _ = store.page_out(rows(count))
        assert at_home_after_reclaim(producers["one"], store, slots) == list(range(expected))
        back = torch.zeros_like(rows(count))
        store.page_in(slots, back).wait()
        assert torch.equal(back, rows(count))


def test_a_lender_that_is_full_leaves_its_share_to_the_others() -> None:
    with borrowing(LaneTransport(2)) as (_, store, producers):
        first = store.page_out(rows(24))[0]  # Twelve each, of sixteen.
        second = store.page_out(rows(12))[0]
        assert store.location(second).value == "mixed", "eight fit, four go to host memory"
        assert at_home_after_reclaim(producers["one"], store, first) == list(range(12))


def test_a_lender_that_takes_memory_back_is_given_no_share() -> None:
    with borrowing(LaneTransport(3), LENDERS) as (_, store, producers):
        assert producers["one"].reclaim(2 * SLAB).wait(HANG_S)
        slots = store.page_out(rows(8))[0]
        assert store.location(slots).value == "peer"
        assert at_home_after_reclaim(producers["two"], store, slots) == [0, 1, 2, 3]


def test_what_lies_with_one_lender_is_read_one_after_the_other() -> None:
    transport = LaneTransport(2)
    with borrowing(transport) as (_, store, _producers):
        parts = [store.page_out(rows(8))[0] for _ in range(3)]
        slots = torch.cat(parts)
        back = torch.zeros((24, BLOCK_BYTES), dtype=torch.uint8)
        store.page_in(slots, back).wait()
        assert torch.equal(back, rows(8).repeat(3, 1))
        assert len(transport.read_from) == 6, "each part lies with both"
        frames = [frame for frame, _ in groupby(transport.read_from)]
        assert len(frames) == len(set(frames)) == 4, "the lenders take turns"
