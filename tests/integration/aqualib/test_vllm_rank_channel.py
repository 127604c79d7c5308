"""Ranks of one engine over real sockets: memory and producers of their own, one decision.

Memory is pages of this machine, unmapped while they are lent; slabs are lent to nobody in most
tests, so whatever is offered comes back at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import pytest
import torch

from aqua_protocol import ConfigError, TransportError
from aqua_protocol.members import LoadReport
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.engine_ranks import EngineRanks, open_remote
from aqualib.engines.vllm.lending.kv_lending import EngineLoad, KvLending
from aqualib.engines.vllm.lending.memory import HostKvMemory, lendable_cache
from aqualib.engines.vllm.lending.rank_messages import packed, unpacked
from aqualib.engines.vllm.lending.rank_service import RankService
from aqualib.engines.vllm.lending.step_count import STEP, StepCount
from aqualib.producer.copy_limit import FIRST_RATE, MIN_STEPS
from aqualib.producer.informer import StepListener
from aqualib.transports.host_pages import PAGE_BYTES
from harness.block_pool import PaperPool
from harness.bounds import until
from harness.consumers import consuming, grant
from harness.producers import socket_dir
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import GranuleMask

SLAB: Final = 16 * PAGE_BYTES
BLOCKS: Final = 64
LONG_STEP_S: Final = 10.0
"""Of which a pace lasts longer than any test."""
LOAD: Final = LoadReport(queue_length=0, memory_used_bytes=0, memory_total_bytes=1)


class PaperBorrower:
    """What a rank borrows with."""

    def __init__(self) -> None:
        self.may_borrow = True
        self.is_borrowing = True


class Workers:
    """Two workers' ends; the second has half as much again in each block."""

    def __init__(self, stack: ExitStack) -> None:
        directory = stack.enter_context(socket_dir())
        self.steps = [StepCount(), StepCount()]
        self.tensors: list[torch.Tensor] = []
        self.memories: list[HostKvMemory] = []
        self.services: list[RankService] = []
        self.borrowers = [PaperBorrower(), PaperBorrower()]
        self.endpoints = [directory / f"rank{rank}.sock" for rank in range(2)]
        for rank, pages in enumerate((2, 3)):
            memory = HostKvMemory(PAGE_BYTES)
            tensor = memory.allocate(BLOCKS * pages * PAGE_BYTES)
            cache = lendable_cache(memory, [tensor.view(BLOCKS, -1)], BLOCKS)
            service = RankService(
                cache, rank, self.endpoints[rank], self.steps[rank], self.borrowers[rank]
            )
            stack.callback(service.close)
            self.tensors.append(tensor)
            self.memories.append(memory)
            self.services.append(service)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    with ExitStack() as stack:
        for name, value in {
            "COORDINATOR_URL": "http://127.0.0.1:9",
            "SLAB_BYTES": str(SLAB),
            "SOCKET_DIR": str(stack.enter_context(socket_dir())),
            "NODE": "node",
            "DOMAIN": "domain",
            "GPU_UUID": "GPU-0",
        }.items():
            monkeypatch.setenv(f"AQUA_{name}", value)
        yield Workers(stack)


@pytest.fixture
def engine(workers: Workers) -> Iterator[EngineRanks]:
    with open_remote(workers.endpoints, "tiny", []) as opened:
        yield opened


def test_ranks_report_under_the_names_that_they_are_given(workers: Workers) -> None:
    with open_remote(workers.endpoints, "tiny", [], ["llama.0", "llama.1"]) as opened:
        assert len(opened.memories) == 2
        directory = Path(os.environ["AQUA_SOCKET_DIR"])
        for name in ("llama.0", "llama.1"):
            assert (directory / f"{name}.sock").is_socket()


def test_an_engine_borrows_as_long_as_any_rank_does_and_all_ranks_are_told(
    workers: Workers,
) -> None:
    with open_remote(workers.endpoints, "tiny", [], is_borrowing=True) as engine:
        borrower = engine.borrower
        assert borrower is not None
        borrower.may_borrow = False
        assert [each.may_borrow for each in workers.borrowers] == [False, False]
        for each in workers.borrowers:
            assert borrower.is_borrowing
            each.is_borrowing = False
            engine.lender.load = LOAD
        assert not borrower.is_borrowing
        borrower.may_borrow = True
        assert [each.may_borrow for each in workers.borrowers] == [True, True]


def lending_of(engine: EngineRanks) -> KvLending:
    return KvLending(
        engine.memories,
        BlockLimit(PaperPool(BLOCKS), 2),
        slab_bytes=SLAB,
        keep_blocks=8,
        lock=threading.RLock(),
        read_load=lambda: EngineLoad(waiting_count=0, requests_per_s=0.0),
    )


def absent_bytes(workers: Workers) -> list[int]:
    return [int(memory.absent.sum()) * PAGE_BYTES for memory in workers.memories]


def test_all_ranks_give_up_offer_and_take_back_as_much(
    workers: Workers, engine: EngineRanks
) -> None:
    lending = lending_of(engine)
    lender = engine.lender
    assert lending.shrink(3 * SLAB) == 3 * SLAB
    assert absent_bytes(workers) == [3 * SLAB, 3 * SLAB]
    assert lender.offer(3 * SLAB) == 3 * SLAB
    assert lender.committed_bytes == 3 * SLAB
    ticket = lender.reclaim(2 * SLAB)
    until(lambda: ticket.done, "two slabs are back on both ranks")
    lender.load = LOAD
    assert (lender.offered_bytes, lender.committed_bytes) == (SLAB, SLAB)
    lending.grow(2 * SLAB)
    assert absent_bytes(workers) == [SLAB, SLAB]
    assert lender.ended_reclaims.returned_bytes == 2 * SLAB
    names = lender.identity.gpu_uuid
    assert names == "GPU-0,GPU-0.1", "each rank has a GPU of its own"


def test_consumers_of_all_ranks_hear_what_the_engines_steps_decide(
    workers: Workers, engine: EngineRanks
) -> None:
    lender = engine.lender
    assert isinstance(lender, StepListener)
    lending_of(engine).shrink(SLAB)
    lender.offer(SLAB)
    lender.step_ended(LONG_STEP_S)
    assert engine.take_pace() is None, "there is nobody to tell"
    with consuming(slab_bytes=SLAB) as aqua:
        for service in workers.services:
            producer = service.producer
            assert producer is not None
            issuer = TokenIssuer(producer.producer_id)
            producer.acknowledge(issuer.ack())
            aqua.attach(
                grant(
                    issuer,
                    producer.endpoint,
                    1,
                    slab_bytes=SLAB,
                    producer_id=producer.producer_id,
                )
            )
        lender.load = LOAD

        def are_told(rate: float) -> bool:
            return [each.pace.bytes_per_s for each in aqua.attachments] == [rate, rate]

        for rate in (0.0, FIRST_RATE):
            for _ in range(MIN_STEPS):
                lender.step_ended(LONG_STEP_S)
                if (pace := engine.take_pace()) is not None:
                    break
            assert pace is not None
            assert pace.bytes_per_s == rate
            assert engine.take_pace() is None, "it is told once"
            for service in workers.services:
                service.tell_pace(pace)
            until(partial(are_told, rate), "both ranks have told their consumers")


def test_a_rank_gives_up_nothing_before_its_own_step_has_ended(
    workers: Workers, engine: EngineRanks
) -> None:
    lending = lending_of(engine)
    for step in (1, 2):
        lending.step_begun()
        for each in workers.steps:
            each.begun(SimpleNamespace(**{STEP: step}))
        lending.step_ended()
    workers.steps[0].ended()  # The second rank is still at work.
    with pytest.raises(TransportError, match="rank 1 of this engine refuses: step 2 has not ended"):
        lending.shrink(SLAB)
    assert absent_bytes(workers) == [0, 0], "the other rank has taken it back"
    assert lending.surrendered_bytes == 0
    assert lending.out_blocks == 0
    workers.steps[1].ended()
    assert lending.shrink(SLAB) == SLAB


def test_what_an_operator_takes_from_one_rank_the_others_take_back_too(
    workers: Workers, engine: EngineRanks
) -> None:
    lending_of(engine).shrink(3 * SLAB)
    engine.lender.offer(3 * SLAB)
    producer = workers.services[1].producer
    assert producer is not None
    producer.reclaim(2 * SLAB).wait(10)
    engine.lender.load = LOAD
    until(lambda: engine.lender.committed_bytes == SLAB, "both ranks are down to one slab")
    assert engine.lender.offered_bytes == SLAB


def test_a_rank_that_cannot_offer_takes_the_others_down(
    workers: Workers, engine: EngineRanks
) -> None:
    lending_of(engine).shrink(2 * SLAB)
    # Somebody else has the memory of the second rank's device.
    workers.memories[1].account.take(2 * SLAB)
    with pytest.raises(TransportError, match="rank 1"):
        engine.lender.offer(2 * SLAB)
    engine.lender.load = LOAD
    until(lambda: engine.lender.committed_bytes == 0, "nothing is offered")
    workers.memories[1].account.give_back(2 * SLAB)


def test_a_rank_that_is_slow_costs_its_blocks_until_it_is_heard(
    workers: Workers, engine: EngineRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending = lending_of(engine)
    go_on = threading.Event()
    release = workers.memories[1].release

    def release_late(granules: GranuleMask) -> None:
        go_on.wait(60)
        release(granules)

    monkeypatch.setattr(workers.memories[1], "release", release_late)
    monkeypatch.setattr(engine.memories[1], "answer_within_s", 0.05)
    with pytest.raises(TransportError, match="rank 1 of this engine has not acknowledged yet"):
        lending.shrink(SLAB)
    assert absent_bytes(workers) == [0, 0], "the first rank has taken it back, the second not begun"
    assert lending.surrendered_bytes == 0
    assert lending.out_blocks, "blocks that the second may give up at any moment"
    with pytest.raises(TransportError, match="rank 1 of this engine has not acknowledged yet"):
        engine.lender.load = LOAD
    go_on.set()

    def is_whole() -> bool:
        lending.load()
        return not lending.out_blocks

    until(is_whole, "the second rank has given up, said so, and taken it back")
    assert absent_bytes(workers) == [0, 0]


def test_a_rank_that_dies_leaves_the_others_blocks_out_of_use(
    workers: Workers, engine: EngineRanks
) -> None:
    lending = lending_of(engine)
    lending.shrink(2 * SLAB)
    out = lending.out_blocks
    workers.services[1].close()
    with pytest.raises(TransportError, match="rank 1 of this engine lends no more"):
        lending.grow(2 * SLAB)
    assert absent_bytes(workers) == [0, 2 * SLAB]
    assert 0 < lending.out_blocks <= out
    assert lending.surrendered_bytes == 2 * SLAB, "it is asked for again"
    with pytest.raises(TransportError, match="rank 1 of this engine lends no more"):
        engine.lender.load = LOAD


def test_a_worker_that_is_not_there_is_named(workers: Workers) -> None:
    workers.services[1].close()
    with (
        pytest.raises(ConfigError, match="no worker of rank 1 is here") as refused,
        open_remote(workers.endpoints, "tiny", []),
    ):
        raise AssertionError("it opened")
    assert "--worker-cls aqualib.engines.vllm.LendingWorker" in str(refused.value.remedy)


def test_a_mask_of_any_size_fits_into_a_packet() -> None:
    mask = torch.rand(1 << 18, generator=torch.Generator().manual_seed(1)).numpy() > 0.5
    text = packed(mask)
    assert len(text) < 50_000
    assert (unpacked(text, len(mask)) == mask).all()
    with pytest.raises(ValueError, match="a mask of 8 granules"):
        unpacked(text, 8)


def test_steps_are_counted_by_the_schedulers_numbers() -> None:
    steps = StepCount()
    steps.begun(SimpleNamespace(**{STEP: 7}))
    assert not steps.wait_until_ended(7, 0.0)
    steps.begun(SimpleNamespace())
    assert steps.wait_until_ended(7, 0.0), "what comes after it has begun"
    steps.ended()
    assert steps.wait_until_ended(8, 0.0)
