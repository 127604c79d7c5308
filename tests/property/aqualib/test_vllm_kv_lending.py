"""An engine that lends, by any history: no block lost, none used without memory, all come back.

It has up to three ranks with unequal parts; any one of them may refuse or stop half-way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aqua_protocol import TransportError
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.engines.vllm.lending.kv_lending import EngineLoad, KvLending
from aqualib.engines.vllm.lending.memory import LendableCache
from aqualib.engines.vllm.lending.rank_memory import LocalMemory
from aqualib.ranges import Range
from harness.block_pool import PaperBlock, PaperPool

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import GranuleMask
    from aqualib.producer.device import EmulatedMemory

GRANULE = 64
SLAB = 4 * GRANULE
BASE = 1 << 20


class PaperMemory:
    """KV memory that remembers what is present; satisfies `KvMemory`."""

    granule_bytes = GRANULE

    def __init__(self, count: int) -> None:
        self.present: GranuleMask = np.ones(count, np.bool_)
        self.is_refusing = False
        self.tears_after: int | None = None

    @property
    def account(self) -> EmulatedMemory:
        raise NotImplementedError

    @property
    def absent(self) -> GranuleMask:
        return ~self.present

    @property
    def regions(self) -> list[Range]:
        return [Range(BASE, len(self.present) * GRANULE)]

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def release(self, granules: GranuleMask) -> None:
        self._require()
        assert self.present[granules].all()
        if self.tears_after is not None:
            self.present[np.flatnonzero(granules)[: self.tears_after]] = False
            raise TransportError("half-way")
        self.present &= ~granules

    def restore(self, granules: GranuleMask) -> None:
        self._require()
        assert not self.present[granules].any()
        if self.tears_after is not None:
            self.present[np.flatnonzero(granules)[: self.tears_after]] = True
            raise TransportError("half-way")
        self.present |= granules

    def close(self) -> None:
        raise NotImplementedError

    def _require(self) -> None:
        if self.is_refusing:
            raise TransportError("out of device memory")


class LendingEngine(RuleBasedStateMachine):
    """Requests come and go in steps that may overlap; the informer asks whatever it likes."""

    @initialize(
        blocks=st.integers(8, 60),
        layer_count=st.integers(1, 3),
        pieces=st.lists(st.sampled_from([24, 32, 64, 96, 200]), min_size=1, max_size=3),
        keep=st.integers(1, 8),
        keep_free=st.integers(0, 5),
    )
    def start(
        self, blocks: int, layer_count: int, pieces: list[int], keep: int, keep_free: int
    ) -> None:
        self.pool = PaperPool(blocks)
        self.ranks = [self._rank(blocks, layer_count, piece) for piece in pieces]
        self.limit = BlockLimit(self.pool, keep_free)
        self.keep, self.keep_free = keep, keep_free
        self.lending = KvLending(
            [LocalMemory(rank) for rank in self.ranks],
            self.limit,
            slab_bytes=SLAB,
            keep_blocks=keep,
            lock=threading.RLock(),
            read_load=lambda: EngineLoad(waiting_count=0, requests_per_s=0.0),
        )
        self.requests: list[list[PaperBlock]] = []
        self.steps: list[set[int]] = []  # Blocks that each step under way uses, oldest first.
        self.given_bytes = 0
        self.is_torn = False

    def _rank(self, blocks: int, layer_count: int, piece: int) -> LendableCache:
        row_bytes = blocks * piece
        whole = -(-layer_count * row_bytes // GRANULE) * GRANULE
        rows = [Range(BASE + at * row_bytes, row_bytes) for at in range(layer_count)]
        granules = GranuleMap([Range(BASE, whole)], rows, block_count=blocks, granule_bytes=GRANULE)
        return LendableCache(
            PaperMemory(granules.count), granules, layer_count * piece, torch.device("cpu")
        )

    def _memories(self) -> list[PaperMemory]:
        found = [rank.memory for rank in self.ranks]
        return [memory for memory in found if isinstance(memory, PaperMemory)]

    # --- The engine -----------------------------------------------------------------------

    @rule(count=st.integers(1, 12), is_hashed=st.booleans())
    def admit(self, count: int, is_hashed: bool) -> None:
        count = min(count, self.pool.get_num_free_blocks())
        if count:
            blocks = self.pool.get_new_blocks(count)
            if is_hashed:
                for block in blocks:
                    block.block_hash = f"prefix {block.block_id}"
            self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.free_blocks(reversed(self.requests.pop(index)))

    @precondition(lambda self: len(self.steps) < 2)
    @rule(has_waiting=st.booleans())
    def begin_step(self, has_waiting: bool) -> None:
        self.lending.before_step(has_waiting=has_waiting)
        if self.requests:
            self.lending.step_begun()
            self.steps.append({block.block_id for blocks in self.requests for block in blocks})

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        self.steps.pop(0)
        self.lending.step_ended()

    # --- The informer ---------------------------------------------------------------------

    @rule(slabs=st.integers(1, 6))
    def shrink(self, slabs: int) -> None:
        given = self.lending.shrink(slabs * SLAB)
        assert 0 <= given <= slabs * SLAB
        assert given % SLAB == 0
        self.given_bytes += given

    @precondition(lambda self: self.given_bytes)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slabs = data.draw(st.integers(1, self.given_bytes // SLAB))
        self.lending.grow(slabs * SLAB)
        self.given_bytes -= slabs * SLAB

    @rule(slabs=st.integers(1, 6), which=st.integers(0, 2))
    def shrink_or_grow_on_a_device_that_refuses(self, slabs: int, which: int) -> None:
        memory = self._memories()[which % len(self.ranks)]
        memory.is_refusing = True
        for ask in (self.lending.shrink, self.lending.grow):
            try:
                given = ask(slabs * SLAB)
            except TransportError:
                self.is_torn |= len(self.ranks) > 1
                continue
            assert not given, "nothing moved, so nothing was given"
            # A rank that has nothing to move agrees, whatever its device says.
            assert not self.given_bytes or ask == self.lending.shrink
        memory.is_refusing = False

    @rule(
        slabs=st.integers(1, 6),
        done_count=st.integers(0, 9),
        is_shrink=st.booleans(),
        which=st.integers(0, 2),
    )
    def shrink_or_grow_half_way(
        self, slabs: int, done_count: int, is_shrink: bool, which: int
    ) -> None:
        memory = self._memories()[which % len(self.ranks)]
        memory.tears_after = done_count
        try:
            given = (self.lending.shrink if is_shrink else self.lending.grow)(slabs * SLAB)
        except TransportError:
            self.is_torn = True
        else:
            assert not given, "nothing moved, so nothing was given"
        memory.tears_after = None

    @precondition(lambda self: self.is_torn)
    @rule()
    def look_on_a_device_that_works_again(self) -> None:
        self.lending.load()
        absent = [int(memory.absent.sum()) for memory in self._memories()]
        needed = -(-self.given_bytes // GRANULE)
        assert max(absent) <= needed, "all that left in vain is back"
        self.is_torn = min(absent) < needed

    # --- What always holds ----------------------------------------------------------------

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        free = {block.block_id for block in self.pool.free}
        used = {block.block_id for blocks in self.requests for block in blocks}
        out = set(np.flatnonzero(self.limit.out))
        assert len(free) + len(used) + len(out) + 1 == len(self.pool.blocks)
        assert free | used | out | {0} == set(range(len(self.pool.blocks)))
        assert self.pool.num_gpu_blocks == len(self.pool.blocks) - len(out)

    @invariant()
    def blocks_in_use_have_their_memory(self) -> None:
        used = {block.block_id for blocks in self.requests for block in blocks}.union(*self.steps)
        free = {block.block_id for block in self.pool.free}
        for rank in self.ranks:
            touched = rank.granules.blocks_of(rank.memory.absent)
            assert not touched[list(used | free)].any()
            assert not touched[: self.keep].any()

    @invariant()
    def what_was_given_up_is_really_gone(self) -> None:
        assert self.lending.surrendered_bytes == self.given_bytes
        if self.is_torn:
            return
        for memory in self._memories():
            gone = int(memory.absent.sum()) * GRANULE
            assert self.given_bytes <= gone < self.given_bytes + GRANULE + (not self.given_bytes)

    @invariant()
    def blocks_that_are_out_answer_no_prefix(self) -> None:
        assert all(self.pool.blocks[i].block_hash is None for i in np.flatnonzero(self.limit.out))

    def teardown(self) -> None:
        if not hasattr(self, "lending"):
            return
        while self.requests:
            self.pool.free_blocks(self.requests.pop())
        if self.given_bytes:
            self.lending.grow(self.given_bytes)
        self.lending.load()
        self.lending.before_step(has_waiting=True)
        assert all(memory.present.all() for memory in self._memories())
        assert len(self.pool.free) == len(self.pool.blocks) - 1
        assert self.pool.get_usage() == 0


TestLendingEngine = LendingEngine.TestCase
TestLendingEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
