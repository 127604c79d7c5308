"""An engine of several ranks on paper: each rank runs its steps, and does as told, in its own time.

`History` draws all of it from a seed: requests, overlapping steps, ranks that lag behind, orders
that are carried out late, half-way or not at all, a rank that dies. While the lending half waits
for an acknowledgement, the engine goes on. After every event it is checked that no rank lacks
memory of a block that anything may touch there.

Two controls show what that is worth. With `is_acknowledged` off, what a rank was told counts as
done; with `waits_for_steps` off, a rank does as told before its own steps have ended.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_protocol import TransportError
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.engines.vllm.lending.kv_lending import EngineLoad, KvLending
from aqualib.ranges import Range
from harness.block_pool import PaperBlock, PaperPool

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import GranuleMask
    from aqualib.engines.vllm.lending.rank_memory import Acknowledgement

GRANULE: Final = 64
SLAB: Final = 2 * GRANULE
BLOCKS: Final = 40
KEEP: Final = 6

PROMPTNESS: Final = 0.85
"""How likely a rank does at once, and whole, what it is told: less, and little is ever lent."""


class LaggingRank:
    """One rank; satisfies `RankMemory`. `present` is the truth, `absent` what it has said."""

    def __init__(self, history: History, piece_bytes: int) -> None:
        self._history = history
        row_bytes = BLOCKS * piece_bytes
        whole = -(-row_bytes // GRANULE) * GRANULE
        rows = [Range(0, row_bytes)]
        self.granules = GranuleMap(
            [Range(0, whole)], rows, block_count=BLOCKS, granule_bytes=GRANULE
        )
        self.block_bytes = piece_bytes
        self.present: GranuleMask = np.ones(self.granules.count, np.bool_)
        self.absent: GranuleMask = np.zeros(self.granules.count, np.bool_)
        self.steps: deque[tuple[int, set[int]]] = deque()
        self.is_dead = False
        self._order: tuple[bool, GranuleMask, int] | None = None

    def release(self, granules: GranuleMask, after_step: int) -> Acknowledgement:
        return self._told(True, granules, after_step)

    def restore(self, granules: GranuleMask) -> Acknowledgement:
        return self._told(False, granules, 0)

    def end_step(self) -> None:
        """End the oldest step here, wherever the other ranks are."""
        if self.steps:
            self.steps.popleft()

    def carry_out(self) -> bool:
        """Do as told, or a part of it, or nothing; False while the steps do not allow it."""
        if self._order is None or self.is_dead:
            return False
        is_release, granules, after_step = self._order
        in_the_way = [number for number, _ in self.steps if number <= after_step]
        if is_release and in_the_way and self._history.waits_for_steps:
            return False
        draw = self._history.draw
        moved = np.flatnonzero(granules)
        share = 1.0 if draw.random() < PROMPTNESS else draw.choice([draw.random(), 0.0])
        if not is_release and share < 1.0:
            share = 0.0  # All or none.
        self.present[moved[: int(len(moved) * share)]] = not is_release
        self._order = None
        if self._history.is_acknowledged:
            self.absent = ~self.present
        return share == 1.0

    def _told(self, is_release: bool, granules: GranuleMask, after_step: int) -> Acknowledgement:
        if self.is_dead or self._order is not None:
            return self._refuse
        if is_release or not self._history.is_acknowledged:
            self.absent = (self.absent | granules) if is_release else (self.absent & ~granules)
        self._order = is_release, granules, after_step
        return self._wait

    def _wait(self) -> None:
        self._history.meanwhile()
        is_done = self._history.draw.random() < PROMPTNESS and self.carry_out()
        if not is_done and self._history.is_acknowledged:
            self._refuse()

    def _refuse(self) -> None:
        raise TransportError("this rank has not acknowledged")


class History:
    """Everything that happens to one engine, drawn from a seed."""

    def __init__(
        self, seed: int, *, is_acknowledged: bool = True, waits_for_steps: bool = True
    ) -> None:
        self.draw = random.Random(seed)
        self.is_acknowledged = is_acknowledged
        self.waits_for_steps = waits_for_steps
        self.pool = PaperPool(BLOCKS)
        count = self.draw.randint(2, 3)
        self.ranks = [LaggingRank(self, self.draw.choice([32, 64, 64, 96])) for _ in range(count)]
        self.lending = KvLending(
            self.ranks,
            BlockLimit(self.pool, self.draw.randint(0, 4)),
            slab_bytes=SLAB,
            keep_blocks=KEEP,
            lock=threading.RLock(),
            read_load=lambda: EngineLoad(waiting_count=0, requests_per_s=0.0),
        )
        self.requests: list[list[PaperBlock]] = []
        self.under_way: deque[int] = deque()
        self.is_at_rest = False
        self.given_bytes = 0
        self.lent_count = 0
        self.late_count = 0

    def run(self, events: int) -> None:
        """Let so many things happen, then let everybody finish, and see that all is whole."""
        for _ in range(events):
            self.draw.choice([*self._engine_events(), *3 * [self._shrink], self._grow])()
            self.check()
        if any(rank.is_dead for rank in self.ranks):
            return
        self._come_to_rest()

    def meanwhile(self) -> None:
        """The engine goes on while somebody waits for a rank."""
        for _ in range(0 if self.is_at_rest else self.draw.randint(0, 3)):
            self.draw.choice(self._engine_events())()
            self.check()

    def check(self) -> None:
        """No rank lacks memory of a block that is in use there, or may be taken at any moment."""
        usable = {block.block_id for blocks in self.requests for block in blocks}
        usable |= {block.block_id for block in self.pool.free}
        for rank in self.ranks:
            lacking = rank.granules.blocks_of(~rank.present)
            touched = usable.union(*(blocks for _, blocks in rank.steps))
            assert not lacking[list(touched)].any(), "a block is used whose memory is not there"

    def kill(self) -> None:
        """A rank dies: it says nothing any more, and moves nothing."""
        self.draw.choice(self.ranks).is_dead = True

    def _engine_events(self) -> list[Callable[[], None]]:
        return [
            self._admit,
            self.finish,
            self.finish,
            self._begin_step,
            self._end_step,
            self._lag,
            self._lag,
        ]

    def _admit(self) -> None:
        count = min(self.draw.randint(1, 5), self.pool.get_num_free_blocks())
        if count:
            self.requests.append(self.pool.get_new_blocks(count))

    def finish(self) -> None:
        if self.requests:
            self.pool.free_blocks(self.requests.pop(self.draw.randrange(len(self.requests))))

    def _begin_step(self) -> None:
        if len(self.under_way) == 2 or not self.requests:
            return
        self.lending.before_step(has_waiting=self.draw.random() < 0.1)
        number = self.lending.step_begun()
        used = {block.block_id for blocks in self.requests for block in blocks}
        for rank in self.ranks:
            rank.steps.append((number, used))
        self.under_way.append(number)

    def _end_step(self) -> None:
        """The output of the oldest step is there: the first rank has ended it, others may lag."""
        if self.under_way:
            number = self.under_way.popleft()
            first = self.ranks[0]
            while first.steps and first.steps[0][0] <= number:
                first.end_step()
            self.lending.step_ended()

    def _lag(self) -> None:
        """Any other rank gets a little further, with its steps or with its orders."""
        rank = self.draw.choice(self.ranks[1:])
        if rank.steps and (not self.under_way or rank.steps[0][0] < self.under_way[0]):
            rank.end_step()
        elif self.draw.random() < 0.5:
            self.late_count += rank.carry_out()

    def _shrink(self) -> None:
        try:
            given = self.lending.shrink(self.draw.randint(1, 6) * SLAB)
        except TransportError:
            return
        self.given_bytes += given
        self.lent_count += given > 0

    def _grow(self) -> None:
        nbytes = self.draw.randint(0, self.given_bytes // SLAB) * SLAB
        try:
            self.lending.grow(nbytes)
        except TransportError:
            return
        self.given_bytes -= nbytes

    def _come_to_rest(self) -> None:
        self.is_at_rest = True
        while self.under_way:
            self._end_step()
        while self.requests:
            self.finish()
        for _ in range(200):
            for rank in self.ranks:
                rank.steps.clear()
                rank.carry_out()
            self.lending.load()
            try:
                self.lending.grow(self.given_bytes)
            except TransportError:
                continue
            self.given_bytes = 0
            if all(rank.present.all() for rank in self.ranks):
                break
        self.lending.before_step(has_waiting=True)
        self.check()
        assert all(rank.present.all() for rank in self.ranks)
        assert len(self.pool.free) == BLOCKS - 1, "a block is lost"
        assert not self.lending.out_blocks
        assert self.lending.surrendered_bytes == 0
