"""A consumer and real producers over real sockets: reclaims, and the pins that delay them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from aqua_protocol import ConfigError
from aqua_protocol.channel import Released
from aqua_protocol.wire import Wire
from aqualib.channel import Channel
from aqualib.consumer import Aqua
from aqualib.producer.producer import Producer
from aqualib.tensor import AquaTensor, Location
from harness.bounds import HANG_S, until
from harness.consumers import await_rest, consuming
from harness.loans import COUNT, await_progress, lend, locations, require_intact, values
from harness.producers import SLAB, lending
from harness.raw_consumer import TokenIssuer


class TestReclaim:
    def test_a_reclaim_moves_data_to_host_memory_and_gives_every_slab_back(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        await_rest(aqua)
        assert locations(tensors) == [Location.HOST] * COUNT
        require_intact(zip(tensors, stored, strict=True))
        stats = aqua.stats()
        assert (stats.drained_bytes, stats.returned_bytes) == (COUNT * SLAB, COUNT * SLAB)
        (record,) = stats.reclaims
        assert record.bytes == COUNT * SLAB
        assert record.first_slab_ms is not None
        assert record.total_ms is not None
        assert record.first_slab_ms <= record.total_ms

    def test_a_slab_is_booked_as_returned_before_the_producer_is_told(
        self,
        aqua: Aqua,
        issuer: TokenIssuer,
        producer: Producer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """So once the producer has all, the figures of the reclaim say so too."""
        lend(aqua, issuer, producer)
        tensors = [aqua.offload(value) for value in values()]
        send = Channel.send
        left: list[int] = []

        def sending(channel: Channel[Any], message: Wire) -> None:
            if isinstance(message, Released):
                left.append(sum(each.slabs_out for each in aqua.stats().reclaims))
            send(channel, message)

        monkeypatch.setattr(Channel, "send", sending)
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        assert left == list(range(COUNT - 1, -1, -1))
        await_rest(aqua)
        assert locations(tensors) == [Location.HOST] * COUNT

    def test_a_reclaim_is_partial_and_slabs_that_hold_nothing_go_without_a_move(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values(3)
        tensors = [aqua.offload(value) for value in stored]
        assert producer.reclaim(5 * SLAB).wait(HANG_S)
        await_rest(aqua)
        assert len(aqua.attachments[0].slabs) == 3
        require_intact(zip(tensors, stored, strict=True))

    def test_data_moves_to_another_lender_while_one_has_room(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 4)
        stored = values(4)
        tensors = [aqua.offload(value) for value in stored]
        other_mint = TokenIssuer()
        with lending(other_mint, 3) as other:
            lend(aqua, other_mint, other, 3)
            assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
            await_rest(aqua)
            assert sorted(locations(tensors)) == [Location.HOST] + [Location.PEER] * 3
            require_intact(zip(tensors, stored, strict=True))
            assert other.leased_bytes == 3 * SLAB
            other.reclaim(3 * SLAB).wait(HANG_S)
            require_intact(zip(tensors, stored, strict=True))

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
        require_intact(zip(tensors, stored, strict=True))
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        await_rest(aqua)
        require_intact(zip(tensors, stored, strict=True))
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
                assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join(HANG_S)
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
        require_intact(zip(tensors, stored, strict=True))

    def test_a_channel_that_breaks_is_drained_from_the_surviving_mappings_and_slabs_go_back(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        aqua.attachments[0].channel.shutdown()
        until(lambda: not aqua.attachments, "the attachment is gone")
        await_rest(aqua)
        assert locations(tensors) == [Location.HOST] * COUNT
        require_intact(zip(tensors, stored, strict=True))
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
        assert producer.quarantined_bytes == 0

    def test_a_producer_that_closes_leaves_the_data_behind(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        producer.close(deadline_s=HANG_S)
        until(lambda: not aqua.attachments, "the attachment is gone")
        require_intact(zip(tensors, stored, strict=True))

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


class TestMayBorrow:
    def test_who_may_not_borrow_any_more_gives_everything_back_and_keeps_its_bytes(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        assert aqua.is_borrowing
        aqua.may_borrow = False
        until(lambda: not aqua.is_borrowing, "every lease has ended")
        until(lambda: producer.leased_bytes == 0, "the producer has all its slabs")
        assert locations(tensors) == [Location.HOST] * COUNT
        require_intact(zip(tensors, stored, strict=True))

    def test_a_lease_that_comes_too_late_goes_back_and_one_that_comes_after_it_is_used(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        aqua.may_borrow = False
        lend(aqua, issuer, producer)
        until(lambda: not aqua.is_borrowing, "the lease has ended")
        until(lambda: producer.leased_bytes == 0, "the producer has all its slabs")
        aqua.may_borrow = True
        lend(aqua, issuer, producer)
        await_rest(aqua)
        assert locations(tensors) == [Location.PEER] * COUNT
        require_intact(zip(tensors, stored, strict=True))


class TestPins:
    def test_a_pinned_tensor_stays_until_the_block_ends(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 1)
        (value,) = values(1)
        tensor = aqua.offload(value)
        with tensor.pinned() as view:
            reclaim = producer.reclaim(COUNT * SLAB)
            until(lambda: not aqua.attachments[0].kept_bytes, "the slab is asked back")
            view[0] = 3
            assert tensor.location is Location.PEER
            assert not reclaim.done
        assert reclaim.wait(HANG_S)
        value[0] = 3
        require_intact([(tensor, value)])
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
        assert reclaim.wait(HANG_S)
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
        assert reclaim.wait(HANG_S)
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
        assert reclaim.wait(HANG_S)

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
        assert reclaim.wait(HANG_S)
        assert torch.equal(tensor.load(), value.flip(0))

    def test_a_thread_that_holds_one_frame_and_waits_for_another_cannot_lock_anyone_out(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        one, other = (aqua.offload(value) for value in values(2))
        barrier = threading.Barrier(2, timeout=HANG_S)

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
            thread.join(HANG_S)
            assert not thread.is_alive()
        assert reclaim.wait(HANG_S)
