"""Lending from an engine's KV cache: where its scheduler and the informer meet.

Two threads are at work. The scheduler's steps use blocks; the informer's looks ask for memory and
bring it back (`shrink` and `grow` of a `LoadSource`). One lock, the scheduler's own, is held for as
long as the block pool is looked at or changed, and never while memory moves:

    shrink:  limit down, free blocks out (lock) -> granules that are free, marked (lock)
             -> released on every rank              later steps: more blocks come free, are taken
    grow:    granules restored on every rank -> marked, their blocks given back (lock)

An engine of several ranks decides here for all of them (`rank_memory`): the same blocks are out on
all ranks, every rank gives up as many bytes, and all sizes are those of one rank. Where ranks hold
unequal parts of a block, as under an uneven pipeline, the one with the smallest parts says how many
blocks that takes.

Promises: a block in use has all of its memory on every rank; a block that is out is used by no
step, running or queued; at least `keep_blocks` blocks and, when an offer is made, the free ones
that the `BlockLimit` keeps stay, so the longest request fits and goes on. What is given up counts
in whole slabs.

When memory gets short while a shrink still waits for blocks, those that are out and whose memory is
still there go back in the next step, and the shrink is over.

Memory that moves may fail half-way. Then the memory itself says what has left; blocks over it stay
out, and what is gone beyond what was given up comes back at once or, if the device has not got it,
at a later look.

Blocks leave by number from the top, and blocks in use are waited for, not moved: requests end, and
a partial answer is a fine one. On an engine that is idle all of it happens at once.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqua_protocol import TransportError, format_bytes
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.rank_memory import (
    RankPart,
    blocks_without_memory,
    require_all,
)
from aqualib.producer.offer_rule import ObservedLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aqualib.engines.vllm.lending.rank_memory import Acknowledgement, RankMemory


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the scheduler counts.

    Attributes:
        waiting_count: Requests that the engine's last step left waiting.
        requests_per_s: Rate of arrivals lately.
        arrived_count: Requests that have ever arrived.
        swapped_bytes: KV of requests that wait, paged out.
        is_starved: That step could have taken up more requests, had it had the blocks.
    """

    waiting_count: int
    requests_per_s: float
    arrived_count: int = 0
    swapped_bytes: int = 0
    is_starved: bool = False


class KvLending:
    """An engine's KV cache as a `LoadSource`.

    Args:
        ranks: The cache's parts, by rank.
        limit: On its pool of blocks.
        slab_bytes: Unit of what each rank gives up.
        keep_blocks: Blocks that are never given up, from number 0 on.
        lock: The scheduler's.
        read_load: The engine's load now.

    Attributes:
        on_grown: Called when blocks are in use again, on the informer's thread.
        on_step: Called with the duration of each step in seconds and its kind, on the engine's
            thread; the informer's.
    """

    def __init__(
        self,
        ranks: Sequence[RankMemory],
        limit: BlockLimit,
        *,
        slab_bytes: int,
        keep_blocks: int,
        lock: threading.RLock,
        read_load: Callable[[], EngineLoad],
    ) -> None:
        self._limit = limit
        self._parts = [RankPart.of(rank) for rank in ranks]
        self._block_bytes = min(rank.block_bytes for rank in ranks)
        self._slab_bytes = slab_bytes
        self._keep_blocks = keep_blocks
        self._lock = lock
        self._read_load = read_load
        self.on_grown: Callable[[], None] | None = None
        self.on_step: Callable[[float, str], None] | None = None
        self._surrendered_bytes = 0
        # Blocks are out, or awaited, whose memory is still here.
        self._is_shrinking = False
        # Steps are numbered from 1 on; a step's blocks are in use until its output is there.
        self._begun_steps = 0
        self._ended_steps = 0

    def __repr__(self) -> str:
        return f"KvLending({format_bytes(self._surrendered_bytes)} given up, {self._limit!r})"

    # --- What can be seen -----------------------------------------------------------------

    @property
    def most_bytes(self) -> int:
        """Bytes that each rank of an idle engine could give up."""
        most = min(p.memory.granules.bytes_above(self._keep_blocks) for p in self._parts)
        return most - most % self._slab_bytes

    @property
    def surrendered_bytes(self) -> int:
        """Bytes that each rank has given up, in whole slabs."""
        return self._surrendered_bytes

    @property
    def out_blocks(self) -> int:
        """Blocks out of use."""
        return int(self._limit.out.sum())

    @property
    def total_bytes(self) -> int:
        """Size of a rank's part of the KV cache."""
        return self._limit.block_count * self._block_bytes

    # --- The scheduler's thread, under the lock -------------------------------------------

    def before_step(self, *, has_waiting: bool) -> None:
        """A step is about to be scheduled."""
        if not self._is_shrinking:
            return
        if has_waiting or self._limit.is_pool_short:
            self._give_back()
        else:
            self._limit.settle(self._begun_steps)

    def step_begun(self) -> int:
        """A step was scheduled; returns its number.

        One without requests counts: it may still page blocks out.
        """
        self._begun_steps += 1
        return self._begun_steps

    def step_ended(self) -> None:
        """The output of the oldest step under way is there."""
        self._ended_steps += 1

    # --- The informer's thread ------------------------------------------------------------

    def load(self) -> ObservedLoad:
        """The engine's load; blocks that are out count as used."""
        if any(self._lacks_too_much(part) for part in self._parts):
            with suppress(TransportError):
                self._take_back(self._surrendered_bytes)
        load = self._read_load()
        return ObservedLoad(
            queue_length=load.waiting_count,
            memory_used_bytes=self.total_bytes - self._limit.free_count * self._block_bytes,
            memory_total_bytes=self.total_bytes,
            requests_per_s=load.requests_per_s,
            arrived_count=load.arrived_count,
            swapped_bytes=load.swapped_bytes,
            is_starved=load.is_starved,
        )

    def shrink(self, nbytes: int) -> int:
        """Have each rank give up to `nbytes` to its device; returns how much, whole slabs."""
        before = self._surrendered_bytes
        wanted = min(before + nbytes, self.most_bytes)
        with self._lock:
            limit = min(part.memory.granules.limit_for(wanted) for part in self._parts)
            self._limit.lower(max(self._keep_blocks, limit), self._begun_steps)
            self._is_shrinking = True
            ended_steps = self._ended_steps
            unused = self._limit.out & (self._limit.since <= ended_steps)
            goal = min(wanted, *(part.reach(unused) for part in self._parts))
            goal -= goal % self._slab_bytes
            if goal <= before:
                return 0
            leaving = [part.leave(unused, goal) for part in self._parts]
            if goal == wanted:
                self._give_back()
        try:
            self._agree(
                part.memory.release(granules, ended_steps)
                for part, granules in zip(self._parts, leaving, strict=True)
            )
        except BaseException:
            with suppress(TransportError):
                self._take_back(before)
            raise
        self._surrendered_bytes = goal
        return goal - before

    def grow(self, nbytes: int) -> None:
        """`nbytes` given up before are free on each device: take them back into use.

        Raises:
            TransportError: Another process took them, or a rank has not said that it has them;
                `surrendered_bytes` has not changed.
        """
        self._take_back(max(0, self._surrendered_bytes - nbytes))
        if self.on_grown is not None:
            self.on_grown()

    def _take_back(self, goal: int) -> None:
        """Restore what is gone but `goal` bytes; use whatever memory is here then."""
        try:
            self._agree(part.memory.restore(part.returning(goal)) for part in self._parts)
            self._surrendered_bytes = goal
        finally:
            with self._lock:
                for part in self._parts:
                    part.settle()
                self._give_back()

    def _agree(self, told: Iterable[Acknowledgement]) -> None:
        """Tell every rank, then wait until all of them have done it."""
        require_all([*told])

    def _give_back(self) -> None:
        """Give back every block whose memory is here, on every rank."""
        self._is_shrinking = False
        lacking = blocks_without_memory(self._parts, self._limit.block_count)
        self._limit.give_back(~lacking)

    def _lacks_too_much(self, part: RankPart) -> bool:
        """Whether more is gone of a rank than was given up."""
        granule_bytes = part.memory.granules.granule_bytes
        return part.gone_bytes >= self._surrendered_bytes + granule_bytes
