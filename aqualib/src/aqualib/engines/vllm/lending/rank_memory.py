"""Each rank's part of an engine's KV cache, and how all of them give and take the same blocks.

An engine that is tensor or pipeline parallel has several workers, and a block has a piece on each
of their devices. It can be lent only if every rank gives its piece, and used again only when every
rank has its piece back. So the scheduler's half decides once, in blocks; every rank is told, and
what is decided counts when every rank has acknowledged it.

A rank's `absent` may claim too much and never too little: from the moment that it is told to
release until it says what became of it, the pieces count as gone. So a rank that is slow, refuses,
or dies costs the engine some blocks for a while, and never a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from aqua_protocol import TransportError

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import BlockMask, GranuleMap, GranuleMask
    from aqualib.engines.vllm.lending.memory import LendableCache

Acknowledgement: TypeAlias = Callable[[], object]
"""Waits until a rank has done what it was told; raises `TransportError` if it has not."""


class RankMemory(Protocol):
    """One rank's part of a KV cache, beside the scheduler or in another process."""

    @property
    def granules(self) -> GranuleMap:
        """Where blocks lie in this rank's memory."""

    @property
    def block_bytes(self) -> int:
        """Size of a block's piece here."""

    @property
    def absent(self) -> GranuleMask:
        """Granules that may have no memory."""

    def release(self, granules: GranuleMask, after_step: int) -> Acknowledgement:
        """Tell the rank to give these up, once its own part of step `after_step` has ended."""

    def restore(self, granules: GranuleMask) -> Acknowledgement:
        """Tell the rank to put memory behind these again."""


class LocalMemory:
    """The part of a rank that is in the scheduler's own process.

    Its steps have ended when the scheduler says so.
    """

    def __init__(self, cache: LendableCache) -> None:
        self._memory = cache.memory
        self.granules = cache.granules
        self.block_bytes = cache.block_bytes

    @property
    def absent(self) -> GranuleMask:
        """See `RankMemory.absent`."""
        return self._memory.absent

    def release(self, granules: GranuleMask, after_step: int) -> Acknowledgement:
        """See `RankMemory.release`; done when the acknowledgement is asked for."""
        del after_step
        return partial(self._memory.release, granules)

    def restore(self, granules: GranuleMask) -> Acknowledgement:
        """See `RankMemory.restore`; done when the acknowledgement is asked for."""
        return partial(self._memory.restore, granules)


@dataclass(slots=True, eq=False)
class RankPart:
    """A rank's part as the decision sees it; `gone` has no memory, or is about to lose it."""

    memory: RankMemory
    gone: GranuleMask

    @classmethod
    def of(cls, memory: RankMemory) -> RankPart:
        """A part that is whole."""
        return cls(memory, np.zeros(memory.granules.count, np.bool_))

    @property
    def gone_bytes(self) -> int:
        """Bytes without memory here."""
        return int(self.gone.sum()) * self.memory.granules.granule_bytes

    def reach(self, unused: BlockMask) -> int:
        """Bytes that would be gone if everything of unused blocks were."""
        free = self.memory.granules.free(unused) & ~self.gone
        return self.gone_bytes + int(free.sum()) * self.memory.granules.granule_bytes

    def leave(self, unused: BlockMask, goal: int) -> GranuleMask:
        """Mark, and return, what has to leave so that `goal` bytes are gone."""
        granules = self.memory.granules
        count = -(-goal // granules.granule_bytes) - int(self.gone.sum())
        leaving = granules.highest(granules.free(unused) & ~self.gone, max(0, count))
        self.gone |= leaving
        return leaving

    def returning(self, goal: int) -> GranuleMask:
        """What has to return so that no more than `goal` bytes are gone."""
        absent = self.memory.absent
        granules = self.memory.granules
        staying = granules.highest(absent, -(-goal // granules.granule_bytes))
        returning: GranuleMask = absent & ~staying
        return returning

    def settle(self) -> None:
        """Go by what the rank says is gone."""
        self.gone = self.memory.absent.copy()


def require_all(acknowledged: Iterable[Acknowledgement]) -> None:
    """Wait for every rank.

    Raises:
        TransportError: One of them has not done it, the first of them by number.
    """
    refused: TransportError | None = None
    for wait in acknowledged:
        try:
            wait()
        except TransportError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def blocks_without_memory(parts: Sequence[RankPart], block_count: int) -> BlockMask:
    """Blocks of which any rank lacks a piece."""
    lacking = np.zeros(block_count, np.bool_)
    for part in parts:
        lacking |= part.memory.granules.blocks_of(part.gone)
    return lacking
