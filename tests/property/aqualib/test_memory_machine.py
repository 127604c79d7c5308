"""A consumer beside a dictionary of bytes, while producers lend, reclaim and hang up at will.

Everything is real: two producers with their sockets and threads, the mover, the event thread. Only
the machine decides when what happens, and nothing waits for anything to finish unless a rule says
so; that is the point.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from aqua_protocol import CapacityError, TransportKind
from aqualib.blocks import BlockStore
from aqualib.producer.producer import Producer
from aqualib.tensor import AquaTensor
from aqualib.transports import select
from harness.bounds import HANG_S
from harness.consumers import LateTransport, await_rest, consuming, grant
from harness.producers import SLAB, lending
from harness.raw_consumer import TokenIssuer
from harness.slices import examples

BLOCK = SLAB // 4
PRODUCERS = 2
SLABS = 6
MAX_TENSORS = 12
HOST_SLABS = 80  # More than all of it can ever take: a full store is another test.

sizes = st.one_of(
    st.integers(0, 3 * SLAB), st.sampled_from([1, 255, 256, SLAB - 1, SLAB, SLAB + 1])
)
seeds = st.integers(0, 2**32 - 1)


def content(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


class ConsumerAgainstADict(RuleBasedStateMachine):
    """The model: what each tensor and each slot must give back."""

    tensors = Bundle("tensors")
    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = contextlib.ExitStack()
        self.issuers = [TokenIssuer() for _ in range(PRODUCERS)]
        self.producers: list[Producer] = [
            self.cleanup.enter_context(lending(issuer, SLABS)) for issuer in self.issuers
        ]
        self.values: dict[AquaTensor, torch.Tensor] = {}
        self.blocks: dict[int, torch.Tensor] = {}
        self.views: list[tuple[AquaTensor, torch.Tensor]] = []
        self.has_broken_channels = False

    @initialize(is_checking=st.booleans(), is_late=st.booleans(), writes_behind=st.booleans())
    def connect(self, is_checking: bool, is_late: bool, writes_behind: bool) -> None:
        made = consuming(
            HOST_SLABS,
            is_checking=is_checking,
            transport=LateTransport() if is_late else select(TransportKind.MEMFD),
            writes_behind=writes_behind,
        )
        self.aqua = self.cleanup.enter_context(made)
        self.store: BlockStore = self.aqua.block_store(BLOCK, 18)

    def teardown(self) -> None:
        self.views.clear()
        await_rest(self.aqua)
        self.everything_is_right()
        for producer in self.producers:
            if producer.offered_bytes:
                producer.reclaim(producer.offered_bytes)
        await_rest(self.aqua)
        self.everything_is_right()
        self.cleanup.close()

    def everything_is_right(self) -> None:
        for tensor, value in self.values.items():
            assert torch.equal(tensor.load(), value)
        if self.blocks:
            slots = torch.tensor(list(self.blocks))
            dst = torch.zeros(len(slots), BLOCK, dtype=torch.uint8)
            self.store.page_in(slots, dst).wait()
            assert torch.equal(dst, torch.stack(list(self.blocks.values())))

    # --- The engine -----------------------------------------------------------------------

    @precondition(lambda self: len(self.values) < MAX_TENSORS)
    @rule(target=tensors, nbytes=sizes, seed=seeds)
    def offload(self, nbytes: int, seed: int) -> AquaTensor:
        value = content(nbytes, seed)
        tensor = self.aqua.offload(value)
        self.values[tensor] = value
        return tensor

    @rule(tensor=tensors, seed=seeds)
    def store_anew(self, tensor: AquaTensor, seed: int) -> None:
        self.values[tensor] = content(tensor.nbytes, seed)
        tensor.store(self.values[tensor])

    @rule(tensor=tensors)
    def load(self, tensor: AquaTensor) -> None:
        assert torch.equal(tensor.load(), self.values[tensor])

    @precondition(lambda self: self.views)
    @rule(seed=seeds)
    def write_to_the_views(self, seed: int) -> None:
        for tensor, view in self.views:
            if tensor in self.values and 0 < tensor.nbytes <= SLAB:  # Larger ones are copies.
                self.values[tensor] = content(tensor.nbytes, seed)
                view.copy_(self.values[tensor])

    @rule(tensor=tensors, seed=seeds)
    def write_in_place(self, tensor: AquaTensor, seed: int) -> None:
        value = self.values[tensor]
        with tensor.pinned() as view:
            assert torch.equal(view, value)
            half = content(tensor.nbytes // 2, seed)
            view[: len(half)] = half
        self.values[tensor] = torch.cat((half, value[len(half) :]))

    @precondition(lambda self: len(self.views) < 3)
    @rule(tensor=tensors)
    def leak_a_view(self, tensor: AquaTensor) -> None:
        with tensor.pinned() as view:
            self.views.append((tensor, view[:]))

    @precondition(lambda self: self.views)
    @rule()
    def drop_the_views(self) -> None:
        self.views.clear()

    @rule(tensor=consumes(tensors))
    def release(self, tensor: AquaTensor) -> None:
        tensor.release()
        tensor.release()
        del self.values[tensor]

    @rule(tensor=consumes(tensors))
    def forget(self, tensor: AquaTensor) -> None:
        del self.values[tensor], tensor
        gc.collect()

    # --- Blocks ---------------------------------------------------------------------------

    @rule(target=slots, seed=seeds, index=st.lists(st.integers(0, 9), max_size=9, unique=True))
    def page_out(self, seed: int, index: list[int]) -> Any:  # noqa: ANN401 - several slots
        src = content(10 * BLOCK, seed).view(10, BLOCK)
        if len(index) > self.store.free_count:
            with pytest.raises(CapacityError):
                self.store.page_out(src, torch.tensor(index))
            return multiple()
        slots, transfer = self.store.page_out(src, torch.tensor(index, dtype=torch.int64))
        transfer.wait()
        for slot, row in zip(slots.tolist(), index, strict=True):
            assert slot not in self.blocks
            self.blocks[slot] = src[row]
        return multiple(*slots.tolist())

    @rule(data=st.data(), is_indexed=st.booleans())
    def page_in(self, data: st.DataObject, is_indexed: bool) -> None:
        if not self.blocks:
            return
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), max_size=12))
        dst = torch.zeros(14, BLOCK, dtype=torch.uint8)
        rows = data.draw(st.permutations(range(14)))[: len(wanted)] if is_indexed else None
        index = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        self.store.page_in(torch.tensor(wanted, dtype=torch.int64), dst, index).wait()
        for slot, row in zip(wanted, rows or range(len(wanted)), strict=True):
            assert torch.equal(dst[row], self.blocks[slot])

    @rule(slot=consumes(slots))
    def free(self, slot: int) -> None:
        self.store.free(torch.tensor([slot]))
        del self.blocks[slot]

    # --- Producers ------------------------------------------------------------------------

    @rule(which=st.integers(0, PRODUCERS - 1), count=st.integers(1, SLABS))
    def lend(self, which: int, count: int) -> None:
        producer = self.producers[which]
        producer.offer(SLABS * SLAB)
        if producer.free_bytes:
            self.aqua.attach(grant(self.issuers[which], producer.endpoint, count))

    @rule(which=st.integers(0, PRODUCERS - 1), count=st.integers(1, SLABS), waits=st.booleans())
    def reclaim(self, which: int, count: int, waits: bool) -> None:
        reclaim = self.producers[which].reclaim(count * SLAB)
        if waits and not self.views and not self.has_broken_channels:
            assert reclaim.wait(HANG_S), (reclaim, self.aqua)

    # Which leases there are is a matter of time, and what Hypothesis draws must not be.
    @rule(which=st.integers(0, 5))
    def a_channel_breaks(self, which: int) -> None:
        # Its producer locks the slabs away for as long as this process lives.
        self.has_broken_channels = True
        for attachment in self.aqua.attachments[which : which + 1]:
            attachment.channel.shutdown()

    @rule(which=st.integers(0, 5))
    def a_lease_ends(self, which: int) -> None:
        for attachment in self.aqua.attachments[which : which + 1]:
            self.aqua._store.ask_back(attachment.end())

    @precondition(lambda self: not self.views)
    @rule()
    def all_comes_to_rest(self) -> None:
        await_rest(self.aqua)

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "aqua"):
            self.aqua.audit()
            assert self.store.used_count == len(self.blocks)


TestConsumer = ConsumerAgainstADict.TestCase
TestConsumer.settings = settings(
    max_examples=examples(10, whole=40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
