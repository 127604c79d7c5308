"""A lender's steps over real sockets: what its consumers hear, and what they hold back."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from aqua_protocol import MIB, PROTOCOL_VERSION
from aqua_protocol.channel import CONSUMER_MESSAGES, PACED, Hello, Pace, Pong
from aqualib.channel import Channel
from aqualib.engines.torch_loop import CountedMemoryLimit, TorchLoop
from aqualib.engines.vllm.lending.engine_ranks import EngineRanks
from aqualib.engines.vllm.lending.kv_lending import EngineLoad
from aqualib.engines.vllm.lending.lending_service import LendingService
from aqualib.engines.vllm.lending.memory import HostKvMemory, lendable_cache
from aqualib.engines.vllm.lending.rank_memory import LocalMemory
from aqualib.engines.vllm.lending.step_meter import LentState
from aqualib.engines.vllm.options import LendingOptions
from aqualib.producer.copy_limit import FIRST_RATE
from aqualib.producer.device import EmulatedMemory
from aqualib.producer.informer import Informer
from aqualib.producer.profile import Profile
from aqualib.producer.server import MAX_UNANSWERED, LeaseServer, Peer, Stage
from aqualib.transports.host_pages import PAGE_BYTES
from harness.block_pool import PaperPool
from harness.bounds import until
from harness.consumers import consuming
from harness.loans import lend
from harness.producers import SLAB, lending
from harness.raw_consumer import RawConsumer, TokenIssuer

if TYPE_CHECKING:
    from aqualib.consumer import Aqua
    from aqualib.producer.producer import Producer

LONG_STEP_S = 10.0
"""Of which a pace lasts longer than any test."""


def told(aqua: Aqua) -> float | None:
    return aqua.attachments[0].pace.bytes_per_s


def test_copies_in_the_background_wait_for_a_lender_that_measures_its_steps(
    issuer: TokenIssuer, producer: Producer
) -> None:
    other_issuer = TokenIssuer()
    with consuming(writes_behind=True) as aqua, lending(other_issuer, 1) as other:
        lend(aqua, issuer, producer, 1)
        producer.step_ended(LONG_STEP_S)
        until(lambda: told(aqua) == 0.0, "asked to hold back")
        slowed = aqua.offload(torch.ones(SLAB, dtype=torch.uint8))
        lend(aqua, other_issuer, other, 1)
        free = aqua.offload(torch.ones(SLAB, dtype=torch.uint8))
        # It was written later, and goes before one that may go.
        until(lambda: aqua.stats().written_behind_bytes == SLAB, "copied from the other lender")
        for _ in range(7):
            producer.step_ended(LONG_STEP_S)
        until(lambda: told(aqua) == FIRST_RATE, "asked for a pace")
        until(lambda: aqua.stats().written_behind_bytes == 2 * SLAB, "copied from this one, too")
        assert bool(slowed.load().all() & free.load().all())


def test_a_loop_tells_its_steps_by_its_informer(
    aqua: Aqua, issuer: TokenIssuer, producer: Producer
) -> None:
    limit = CountedMemoryLimit(EmulatedMemory(MIB), least_bytes=MIB)
    loop = TorchLoop(limit, queue_length=lambda: 0)
    lend(aqua, issuer, producer, 1)
    with Informer(producer, loop, Profile(slab_bytes=SLAB)):
        loop.step_ended()
        loop.step_ended()
        until(lambda: told(aqua) == 0.0, "asked to hold back")
    assert loop.on_step is None


def test_an_engine_of_vllm_that_lends_tells_its_steps(aqua: Aqua, issuer: TokenIssuer) -> None:
    blocks = 64
    memory = HostKvMemory(PAGE_BYTES)
    cache = lendable_cache(memory, [memory.allocate(blocks * PAGE_BYTES).view(blocks, -1)], blocks)
    with contextlib.ExitStack() as opened:
        opened.callback(memory.close)
        producer = opened.enter_context(lending(issuer, 0, device=memory.account))
        service = LendingService(
            LendingOptions(bytes=SLAB, reserve_bytes=0, calm_s=0.0),
            contextlib.nullcontext(EngineRanks([LocalMemory(cache)], producer)),
            pool=PaperPool(blocks),
            keep_blocks=2,
            lock=threading.RLock(),
            read_load=lambda: EngineLoad(waiting_count=0, requests_per_s=0.0),
            still_read=tuple,
        )
        opened.callback(service.close)
        until(lambda: producer.offered_bytes == SLAB, "the engine offers")
        lend(aqua, issuer, producer, 1)

        service.metrics.steps.begun(1, LentState.HELD, 0.0)
        service.step_ended(1, LONG_STEP_S)
        until(lambda: told(aqua) == 0.0, "asked to hold back")


def test_a_consumer_whose_slabs_are_being_handed_out_hears_the_pace_after_them() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    woken = SimpleNamespace(wake=lambda: None)
    with theirs, contextlib.closing(Channel(ours, CONSUMER_MESSAGES)) as channel:
        peer = Peer(channel, cast("LeaseServer", woken))
        peer.knows(f"1.0{PACED}")
        peer.stage = Stage.HANDING
        peer.pace(Pace(bytes_per_s=1.0, lasts_s=60.0))
        peer.pace(Pace(bytes_per_s=0.0, lasts_s=60.0))
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1024)
        peer.handed_out()
        assert b'"bytes_per_s":0.0' in theirs.recv(1024)
        with pytest.raises(BlockingIOError):
            theirs.recv(1024)
        os.close(peer.pidfd)


def test_a_consumer_of_before_hears_nothing_that_it_does_not_know(
    issuer: TokenIssuer, producer: Producer
) -> None:
    with RawConsumer(producer.endpoint) as consumer:
        consumer.attach(issuer.token(SLAB))
        for _ in range(20):
            producer.step_ended(LONG_STEP_S)
        assert consumer.ping(7) == 7


def test_a_consumer_that_does_not_answer_is_told_a_few_times_only(
    issuer: TokenIssuer, producer: Producer
) -> None:
    """Its queue stays free for a reclaim."""

    def paces() -> int:
        for _ in range(200):
            producer.step_ended(LONG_STEP_S)
        count = 0
        while consumer.readable():
            message, _ = consumer.receive()
            assert isinstance(message, Pace), message
            count += 1
        return count

    with RawConsumer(producer.endpoint) as consumer:
        consumer.channel.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                aqualib_version="1" + PACED,
                consumer_id="consumer",
                token=issuer.token(SLAB),
            )
        )
        consumer.take()
        consumer.ping(1)  # The handout is over, on the producer's side as well.
        assert paces() == MAX_UNANSWERED
        assert not paces()
        consumer.channel.send(Pong(number=0))
        consumer.ping(2)
        assert paces() == MAX_UNANSWERED
