"""Page-outs beside the model; the scheduler's half of what all of them share.

A page-out of blocks that are full, or that no step writes any more, need not stall a step. The
blocks are *held* in the KV cache, so that they are not overwritten whatever becomes of their
request, and read by a thread of each worker while the model runs. Once every worker has
acknowledged them they are let go, and their places can be found in the table. It is the same for

- *swaps*: the request is preempted, and its memory waited for. They are urgent: workers do them
  before others, and they are done whatever is on its way. The request that was preempted holds the
  places, and comes back once they are filled.
- *what may be needed later*: prefixes of finished requests, checkpoints of running ones. No request
  waits for them, and memory that they hold is not there for others, so it is bounded. What does not
  fit is left out, for a cache may forget. A checkpoint becomes urgent when its request is preempted
  before it is acknowledged.

Blocks go in *parts*, the unit of acknowledgement: those of a step, up to a staging buffer of them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.plan import PagingPlan


@dataclass(slots=True)
class _Part:
    number: int
    is_urgent: bool
    places: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    acknowledged: int = 0


class AsyncPageOut:
    """Begins parts and ends them as they are acknowledged.

    Args:
        table: Where saved blocks are found.
        pool: The KV cache's, with vLLM's `blocks`, `touch` and `free_blocks`.
        max_blocks: So many that no request waits for may be on their way at once.

    Attributes:
        part_blocks: Most blocks of a part.
    """

    def __init__(self, table: BlockTable, pool: Any, max_blocks: int) -> None:
        self.part_blocks = max_blocks
        self._table = table
        self._pool = pool
        self._max_blocks = max_blocks
        self._parts: dict[int, _Part] = {}
        self._part_of: dict[int, int] = {}
        # The parts that the next step's plan has room in, by whether they are urgent.
        self._open: dict[bool, _Part] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Whether any part is not acknowledged yet."""
        return bool(self._parts)

    @property
    def freeing_blocks(self) -> int:
        """Blocks that come free once what is urgent is acknowledged: nothing else holds them."""
        if not self._parts:
            return 0
        blocks = self._pool.blocks
        urgent = [part.blocks for part in self._parts.values() if part.is_urgent]
        return sum([[blocks[block_id].ref_cnt for block_id in part].count(1) for part in urgent])

    def save(
        self, keys: Sequence[Hashable], block_ids: Sequence[int], plan: PagingPlan
    ) -> tuple[int, int]:
        """Have full blocks paged out that no request waits for, as many as there is room for.

        Returns how many, from the first, are there or on their way now, and how many of them were
        not before.
        """
        table = self._table
        lazy = [len(part.blocks) for part in self._parts.values() if not part.is_urgent]
        room = self._max_blocks - sum(lazy)
        present = table.present(keys)
        # Used now, as far as their age counts; and not what others are given room by.
        table.hold(present)
        kept = 0
        places: list[int] = []
        blocks: list[int] = []
        for key, block_id in zip(keys, block_ids, strict=False):
            if not table.is_known(key):
                place = table.begin(key) if len(places) < room else None
                if place is None:
                    break
                places.append(place)
                blocks.append(block_id)
            kept += 1
        table.release(present)
        self._begin(places, blocks, plan, is_urgent=False)
        return kept, len(places)

    def swap(
        self, keys: Sequence[Hashable], block_ids: Sequence[int], full: int, plan: PagingPlan
    ) -> tuple[list[int], set[int], int]:
        """Have blocks of a request paged out that is about to lose them.

        Args:
            keys: Of its blocks in a group, from the first that it needs on.
            block_ids: The blocks.
            full: So many are full; what is beyond is the request's alone.
            plan: The next step's.

        Returns:
            The places of as many as there is room for, held; the parts to be acknowledged before
            they are filled; and how many of them were neither there nor on their way.
        """
        found, begun = self._table.hold_or_begin(keys, full)
        part_of = self._part_of
        awaited: set[int] = set()
        if len(begun) < len(found):
            awaited = {part_of[place] for place in found if place in part_of}
            for number in awaited:
                part = self._parts[number]
                if not part.is_urgent:
                    part.is_urgent = True
                    plan.urgent_saves.append(number)
        if begun:
            places, blocks = [found[at] for at in begun], [block_ids[at] for at in begun]
            awaited |= self._begin(places, blocks, plan, is_urgent=True)
        return found, awaited, len(begun)

    def is_done(self, parts: Collection[int]) -> bool:
        """Whether these are acknowledged."""
        return self._parts.keys().isdisjoint(parts)

    def acknowledged(self, number: int, count: int, worker_count: int) -> None:
        """So many more of the workers have read the blocks of a part."""
        part = self._parts[number]
        part.acknowledged += count
        if part.acknowledged < worker_count:
            return
        del self._parts[number]
        self._release(part)
        for place in part.places:
            del self._part_of[place]
            self._table.filled(place)

    def plan_taken(self) -> None:
        """What begins from now on is in another plan."""
        self._open.clear()

    def let_go(self) -> None:
        """Release all blocks at once: what is being read is of no use any more."""
        self._open.clear()
        for part in self._parts.values():
            self._release(part)

    def _begin(
        self, places: list[int], blocks: list[int], plan: PagingPlan, *, is_urgent: bool
    ) -> set[int]:
        """Distribute blocks to parts of the plan, and hold them; the parts."""
        if not blocks:
            return set()
        # A block with another holder is not reused, whatever else frees it.
        self._pool.touch([self._pool.blocks[block_id] for block_id in blocks])
        numbers: set[int] = set()
        at = 0
        while at < len(places):
            part = self._open.get(is_urgent)
            if part is None or len(part.blocks) >= self.part_blocks:
                part = self._open_part(plan, is_urgent=is_urgent)
            end = at + self.part_blocks - len(part.blocks)
            part.places += places[at:end]
            part.blocks += blocks[at:end]
            for place in places[at:end]:
                self._part_of[place] = part.number
            numbers.add(part.number)
            at = end
        return numbers

    def _open_part(self, plan: PagingPlan, *, is_urgent: bool) -> _Part:
        self._count += 1
        part = self._parts[self._count] = self._open[is_urgent] = _Part(self._count, is_urgent)
        plan.async_saves[part.number] = (part.places, part.blocks)
        if is_urgent:
            plan.urgent_saves.append(part.number)
        return part

    def _release(self, part: _Part) -> None:
        # Of a chain the last goes first when memory is short, for it is of use only with the rest.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(part.blocks)])
        part.blocks = []
