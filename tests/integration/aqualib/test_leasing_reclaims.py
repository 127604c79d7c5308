"""A consumer and real producers over real sockets: attaching, reclaiming, and what may go wrong."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aqua_protocol import (
    CapabilityError,
    ChecksumMismatchError,
    ConfigError,
    DataLostError,
    ProtocolError,
    SocketPathTooLongError,
    TransportError,
    TransportKind,
    VersionMismatchError,
)
from aqua_protocol.leases import LeaseGrant
from aqualib.channel import ChannelClosedError
from aqualib.consumer import Aqua
from aqualib.leasing import handshake
from aqualib.producer.producer import Producer
from aqualib.tensor import AquaTensor, Location
from aqualib.transports import select
from aqualib.transports.host import HostCopier
from harness.consumers import await_rest, consuming, grant
from harness.producers import SLAB, lending, until
from harness.raw_consumer import WITHIN_S, TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports.base import Copier, MappedSlab

COUNT = 8


@pytest.fixture
def issuer() -> TokenIssuer:
    return TokenIssuer()


@pytest.fixture
def producer(issuer: TokenIssuer) -> Iterator[Producer]:
    with lending(issuer, COUNT) as producer:
        yield producer


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with consuming() as aqua:
        yield aqua


def lend(aqua: Aqua, issuer: TokenIssuer, producer: Producer, count: int = COUNT) -> None:
    aqua.attach(grant(issuer, producer.endpoint, count))


def values(count: int = COUNT, nbytes: int = SLAB, seed: int = 1) -> list[torch.Tensor]:
    order = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=order) for _ in range(count)
    ]


def require_intact(tensors: list[AquaTensor], stored: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, stored, strict=True):
        assert torch.equal(tensor.load(), value), tensor


def await_progress(rounds: list[int]) -> None:
    """Wait until every counter has gone up."""
    seen = list(rounds)
    until(lambda: all(map(int.__gt__, rounds, seen)), "every thread pages")


def locations(tensors: list[AquaTensor]) -> list[Location]:
    return [tensor.location for tensor in tensors]


class TestAttaching:
    def test_data_in_host_memory_moves_to_a_peer_that_begins_to_lend(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        assert locations(tensors) == [Location.HOST] * COUNT
        lend(aqua, issuer, producer)
        await_rest(aqua)
        assert locations(tensors) == [Location.PEER] * COUNT
        assert aqua.stats().promoted_bytes == COUNT * SLAB
        require_intact(tensors, stored)

    def test_new_data_goes_to_the_peer_first_and_to_host_memory_when_that_is_full(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        stored = values(3)
        tensors = [aqua.offload(value) for value in stored]
        assert locations(tensors) == [Location.PEER, Location.PEER, Location.HOST]
        require_intact(tensors, stored)

    def test_a_tensor_larger_than_the_lease_lies_in_both_places(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        (value,) = values(1, 3 * SLAB + 5)
        tensor = aqua.offload(value)
        assert tensor.location is Location.MIXED
        require_intact([tensor], [value])

    def test_the_measured_path_is_logged_and_exported(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "aqualib"):
            lend(aqua, issuer, producer)
        assert "GB/s" in caplog.text
        (link,) = aqua.stats().links
        assert link.transport is TransportKind.MEMFD
        assert link.write_bytes_per_s > 0
        registry = aqua.metrics.registry
        labels = {"transport": "memfd", "direction": "out"}
        rate = registry.get_sample_value("aqua_ipc_link_bytes_per_second", labels)
        assert rate == link.write_bytes_per_s
        assert registry.get_sample_value("aqua_ipc_transport_info", {"transport": "memfd"}) == 1

    def test_a_forged_token_is_refused_with_the_producers_own_error(
        self, aqua: Aqua, producer: Producer
    ) -> None:
        with pytest.raises(CapabilityError, match="not signed"):
            lend(aqua, TokenIssuer(), producer)
        assert not aqua.attachments

    def test_a_producer_of_another_version_is_refused_by_name(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 999)
        with pytest.raises(VersionMismatchError) as caught:
            lend(aqua, issuer, producer)
        assert "Install" in caught.value.remedy

    def test_a_socket_path_that_is_too_long_is_named(self, aqua: Aqua, issuer: TokenIssuer) -> None:
        endpoint = Path("/tmp") / ("x" * 200)
        with pytest.raises(SocketPathTooLongError) as caught:
            aqua.attach(_with_endpoint(grant(issuer, Path("/tmp/x"), 1), endpoint))
        assert caught.value.details["path"] == str(endpoint)

    def test_a_producer_that_is_not_there_is_a_transport_error(
        self, aqua: Aqua, issuer: TokenIssuer, tmp_path: Path
    ) -> None:
        with pytest.raises(ChannelClosedError, match="no producer answers"):
            aqua.attach(grant(issuer, Path("/tmp/aqua-nobody.sock"), 1))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"slab_bytes": 2 * SLAB}, "frames of 65536"),
            ({"transport": TransportKind.CUDA_VMM}, "cuda_vmm"),
        ],
    )
    def test_what_does_not_fit_this_store_is_refused_before_connecting(
        self, aqua: Aqua, issuer: TokenIssuer, change: dict[str, Any], message: str
    ) -> None:
        unfit = grant(issuer, Path("/tmp/aqua-nobody.sock"), 1).model_copy(update=change)
        with pytest.raises(ConfigError, match=message):
            aqua.attach(unfit)

    def test_a_welcome_under_another_epoch_is_refused_and_every_slab_goes_back(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        genuine = grant(issuer, producer.endpoint, 2)
        lease = genuine.lease.model_copy(update={"epoch": genuine.lease.epoch + 1})
        with pytest.raises(ProtocolError, match="welcomes under"):
            aqua.attach(genuine.model_copy(update={"lease": lease}))
        assert not aqua.attachments

    def test_slabs_that_cannot_be_mapped_are_declined_so_that_others_may_have_them(
        self, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transport = select(TransportKind.MEMFD)
        opened: list[MappedSlab] = []

        def open_two(handle: Any, nbytes: int) -> Any:  # noqa: ANN401 - as the transport's
            if len(opened) == 2:
                handle.close()
                raise TransportError("no more address space")
            opened.append(select(TransportKind.MEMFD).open(handle, nbytes))
            return opened[-1]

        monkeypatch.setattr(transport, "open", open_two)
        with consuming(transport=transport) as aqua:
            with pytest.raises(TransportError, match="address space"):
                lend(aqua, issuer, producer)
            until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
            assert producer.quarantined_bytes == 0

    def test_no_descriptor_is_left_open_by_attaches_that_fail_or_end(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        def descriptors() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        with consuming() as aqua:
            lend(aqua, issuer, producer)
            producer.reclaim(producer.offered_bytes).wait(WITHIN_S)
            until(lambda: not aqua.attachments, "the lease has ended")
        before = descriptors()
        with consuming() as aqua:
            for _ in range(5):
                producer.offer(COUNT * SLAB)
                lend(aqua, issuer, producer)
                with pytest.raises(CapabilityError):
                    lend(aqua, TokenIssuer(), producer)
                producer.reclaim(producer.offered_bytes).wait(WITHIN_S)
                until(lambda: not aqua.attachments, "the lease has ended")
        until(lambda: descriptors() <= before, "no descriptor is left")


class TestReclaim:
    def test_a_reclaim_moves_data_to_host_memory_and_gives_every_slab_back(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
        await_rest(aqua)
        assert locations(tensors) == [Location.HOST] * COUNT
        require_intact(tensors, stored)
        stats = aqua.stats()
        assert (stats.drained_bytes, stats.returned_bytes) == (COUNT * SLAB, COUNT * SLAB)
        (record,) = stats.reclaims
        assert record.bytes == COUNT * SLAB
        assert record.first_slab_ms is not None
        assert record.total_ms is not None
        assert record.first_slab_ms <= record.total_ms

    def test_a_reclaim_is_partial_and_slabs_that_hold_nothing_go_without_a_move(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values(3)
        tensors = [aqua.offload(value) for value in stored]
        assert producer.reclaim(5 * SLAB).wait(WITHIN_S)
        await_rest(aqua)
        assert len(aqua.attachments[0].slabs) == 3
        require_intact(tensors, stored)

    def test_data_moves_to_another_lender_while_one_has_room(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 4)
        stored = values(4)
        tensors = [aqua.offload(value) for value in stored]
        other_mint = TokenIssuer()
        with lending(other_mint, 3) as other:
            lend(aqua, other_mint, other, 3)
            assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
            await_rest(aqua)
            assert sorted(locations(tensors)) == [Location.HOST] + [Location.PEER] * 3
            require_intact(tensors, stored)
            assert other.leased_bytes == 3 * SLAB
            other.reclaim(3 * SLAB).wait(WITHIN_S)
            require_intact(tensors, stored)

    def test_what_was_only_read_since_its_promotion_leaves_without_a_copy(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        lend(aqua, issuer, producer)
        await_rest(aqua)
        with tensors[3].pinned() as view:
            view[7] += 1
        stored[3][7] += 1
        require_intact(tensors, stored)
        assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
        await_rest(aqua)
        require_intact(tensors, stored)
        assert aqua.stats().drain_copied_bytes == SLAB  # Of one tensor in eight.

    def test_memory_comes_and_goes_while_threads_store_and_load(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        stop = threading.Event()
        wrong: list[str] = []
        rounds = [0, 0, 0]

        def engine(number: int) -> None:
            blocks = aqua.block_store(SLAB // 4, 12)
            tensor = aqua.empty(SLAB + 100, torch.uint8)
            while not stop.is_set():
                (value,) = values(1, SLAB + 100, seed=rounds[number])
                rows = value[: SLAB // 4 * 4].view(4, -1)
                tensor.store(value)
                slots, transfer = blocks.page_out(rows, torch.tensor([2, 0, 3]))
                transfer.wait()
                back = torch.zeros_like(rows)
                blocks.page_in(slots, back, torch.tensor([3, 1, 0])).wait()
                if not torch.equal(back[[3, 1, 0]], rows[[2, 0, 3]]):
                    wrong.append(f"blocks of thread {number}, round {rounds[number]}")
                blocks.free(slots)
                with tensor.pinned(writes=False) as view:
                    if not torch.equal(view, value):
                        wrong.append(f"tensor of thread {number}, round {rounds[number]}")
                rounds[number] += 1

        threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                producer.offer(COUNT * SLAB)
                lend(aqua, issuer, producer)
                await_progress(rounds)
                assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WITHIN_S)
        assert not wrong
        stats = aqua.stats()
        assert stats.promoted_bytes > 0
        assert stats.drained_bytes > 0

    def test_a_lease_whose_right_has_ended_is_drained_and_left(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        (attachment,) = aqua.attachments
        aqua._store.ask_back(attachment.end())
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is back")
        until(lambda: not aqua.attachments, "the attachment is gone")
        require_intact(tensors, stored)

    def test_a_channel_that_breaks_is_drained_from_the_surviving_mappings(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        aqua.attachments[0].channel.shutdown()
        until(lambda: not aqua.attachments, "the attachment is gone")
        await_rest(aqua)
        assert locations(tensors) == [Location.HOST] * COUNT
        require_intact(tensors, stored)
        assert producer.quarantined_bytes == COUNT * SLAB

    def test_a_producer_that_closes_leaves_the_data_behind(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        producer.close(deadline_s=WITHIN_S)
        until(lambda: not aqua.attachments, "the attachment is gone")
        require_intact(tensors, stored)

    def test_a_closed_consumer_has_given_everything_back(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with consuming() as aqua:
            lend(aqua, issuer, producer)
            tensors = [aqua.offload(value) for value in values(12)]
            aqua.block_store(SLAB // 2, 8)
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
        assert producer.quarantined_bytes == 0
        with pytest.raises(ConfigError, match="closed"):
            tensors[0].load()


class TestPins:
    def test_a_pinned_tensor_stays_until_the_block_ends(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 1)
        (value,) = values(1)
        tensor = aqua.offload(value)
        with tensor.pinned() as view:
            reclaim = producer.reclaim(COUNT * SLAB)
            until(lambda: len(aqua._store._table.asked) == 1, "the slab is asked back")
            view[0] = 3
            assert tensor.location is Location.PEER
            assert not reclaim.done
        assert reclaim.wait(WITHIN_S)
        value[0] = 3
        require_intact([tensor], [value])
        assert locations([tensor]) == [Location.HOST]

    def test_a_pin_held_too_long_is_reported_and_never_unmapped(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
    ) -> None:
        lend(aqua, issuer, producer, 1)
        tensor = aqua.offload(torch.zeros(16))
        with tensor.pinned() as view:
            reclaim = producer.reclaim(COUNT * SLAB)
            until(lambda: aqua.stats().pins_overdue == 1, "the late pin is counted")
            view.fill_(5)
            assert not reclaim.done
        assert "keeps" in caplog.text
        assert reclaim.wait(WITHIN_S)
        assert tensor.load().tolist() == [5.0] * 16

    def test_a_view_that_outlives_its_block_keeps_the_bytes_in_place_and_is_reported_once(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
    ) -> None:
        lend(aqua, issuer, producer, 1)
        tensor = aqua.offload(torch.zeros(16))
        with tensor.pinned() as view:
            leaked = view[3:].numpy()
        with tensor.pinned() as view:
            also_leaked = view[1]
        assert view.shape == (0,)
        assert caplog.text.count("outlived pinned()") == 1
        reclaim = producer.reclaim(COUNT * SLAB)
        until(lambda: aqua.stats().moves_abandoned > 1, "the move was tried again and again")
        leaked[0] = 9
        assert tensor.load()[3] == 9
        assert not reclaim.done
        del leaked, also_leaked
        assert reclaim.wait(WITHIN_S)
        assert tensor.load()[3] == 9

    def test_a_view_that_outlives_its_block_keeps_its_tensor_out_of_a_promotion_too(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        tensor = aqua.offload(torch.zeros(SLAB // 4))
        others = [aqua.offload(value) for value in values(3)]
        with tensor.pinned() as view:
            leaked = view[3:]
        lend(aqua, issuer, producer, 4)
        until(lambda: set(locations(others)) == {Location.PEER}, "the others are promoted")
        assert locations([tensor]) == [Location.HOST]
        leaked[0] = 9
        assert tensor.load()[3] == 9
        del leaked
        until(lambda: locations([tensor]) == [Location.PEER], "it follows once the view is gone")
        assert tensor.load()[3] == 9

    def test_a_spare_slab_that_cannot_be_unmapped_yet_is_given_back_later(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        strays = [slab.memory.tensor[5:6] for slab in aqua.attachments[0].slabs]
        reclaim = producer.reclaim(COUNT * SLAB)
        until(lambda: aqua.stats().moves_abandoned > 3, "unmapping was refused again and again")
        assert not reclaim.done
        strays.clear()
        assert reclaim.wait(WITHIN_S)

    def test_a_slab_that_cannot_be_unmapped_yet_stays_the_place_of_its_bytes(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
    ) -> None:
        lend(aqua, issuer, producer, 1)
        (value,) = values(1)
        tensor = aqua.offload(value)
        (slab,) = aqua.attachments[0].slabs
        stray = slab.memory.tensor[5:6]
        reclaim = producer.reclaim(COUNT * SLAB)
        until(lambda: aqua.stats().moves_abandoned > 2, "unmapping was refused again and again")
        assert "outlived its use" in caplog.text
        tensor.store(value.flip(0))
        assert torch.equal(tensor.load(), value.flip(0))
        assert not reclaim.done
        del stray
        assert reclaim.wait(WITHIN_S)
        assert torch.equal(tensor.load(), value.flip(0))

    def test_a_thread_that_holds_one_frame_and_waits_for_another_cannot_lock_anyone_out(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        one, other = (aqua.offload(value) for value in values(2))
        barrier = threading.Barrier(2, timeout=WITHIN_S)

        def hold(first: AquaTensor, second: AquaTensor) -> None:
            with first.pinned():
                barrier.wait()
                until(lambda: len(aqua._store._table.closing) > 0, "the gates are closing")
                with second.pinned():
                    pass

        threads = [
            threading.Thread(target=hold, args=pair) for pair in ((one, other), (other, one))
        ]
        for thread in threads:
            thread.start()
        reclaim = producer.reclaim(COUNT * SLAB)
        for thread in threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()
        assert reclaim.wait(WITHIN_S)


class TestLoss:
    def test_a_slab_that_cannot_be_read_raises_for_what_was_in_it_and_nothing_else(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with broken_reads() as (transport, broken), consuming(transport=transport) as aqua:
            lend(aqua, issuer, producer, 2)
            stored = values(3)
            tensors = [aqua.offload(value) for value in stored]
            broken.append(address_of(tensors[1]))
            assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
            await_rest(aqua)
            assert locations(tensors) == [Location.HOST, Location.LOST, Location.HOST]
            require_intact([tensors[0], tensors[2]], [stored[0], stored[2]])
            for access in (tensors[1].load, lambda: tensors[1].store(stored[1])):
                with pytest.raises(DataLostError, match="is lost") as caught:
                    access()
                assert "recompute" in caught.value.remedy
            with pytest.raises(DataLostError), tensors[1].pinned():
                pass
            assert aqua.stats().lost_bytes == SLAB
            happened = aqua.step()
            assert happened is not None
            assert happened.lost_bytes == SLAB
            tensors[1].release()
            assert aqua.stats().lost_bytes == 0
            tensors[1] = aqua.offload(stored[1])
            require_intact(tensors, stored)

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
            assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
            require_intact(tensors, stored)

    def test_lost_blocks_are_named_and_their_slots_come_back_when_freed(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with broken_reads() as (transport, broken), consuming(transport=transport) as aqua:
            lend(aqua, issuer, producer, 2)
            blocks = aqua.block_store(SLAB // 4, 8)
            src = torch.stack(values(7, SLAB // 4))
            slots, transfer = blocks.page_out(src)
            transfer.wait()
            frame = blocks._frames[1]
            assert frame.peer is not None
            broken.append(frame.peer.memory.tensor.data_ptr())
            assert producer.reclaim(COUNT * SLAB).wait(WITHIN_S)
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

    def copier() -> Copier:
        return BrokenCopier(broken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "copier", copier)
        yield transport, broken


def address_of(tensor: AquaTensor) -> int:
    """Of the slab in which the tensor's only piece is."""
    (piece,) = tensor._pieces
    return piece.frame.memory.tensor.data_ptr()


def _with_endpoint(terms: LeaseGrant, endpoint: Path) -> LeaseGrant:
    return terms.model_copy(update={"endpoint": str(endpoint)})
