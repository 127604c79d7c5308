"""Checkpoints of offline requests: which blocks have a copy, and how many to copy in a step.

Keys and values never change once computed, so a block is copied once, when it is full, leading
blocks first: what a request has *saved* is always a prefix of its context, which a later load can
use. `CheckpointLedger` is the table of it:

    computed --copy--> copying --acknowledge--> saved

A block counts as saved only when the workers have acknowledged its copy. A request may leave memory
at any time; its blocks come free at once, but for those whose copy is under way: these are *pinned*
until the acknowledgement, because the copy still reads them. A request with pinned blocks does not
come back before that.

How many blocks to copy is `CheckpointRamp`'s answer: none while memory is free, then more and more,
never more than the link moves during the step. What is not saved when memory is needed is discarded
and computed again: online requests wait for no copy. Where an engine pages out beside its steps it
is copied instead (`ConserveSettings.swaps`), and an arrival that needs the memory waits for it.

Source: ConServe section 4.4, "Incremental Checkpointing" and "Adaptive Checkpointing Policy". The
paper names a threshold of 50 % and random early detection (RED); that the ramp ends at full memory
and follows an average of the usage is RED's, not the paper's. "50 %" of available and of used
memory are the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

USAGE_SHARE: Final = 0.2
"""Share of a new step in the average usage (RED's weight, larger because steps are rarer than
packets). Doubled, the ramp follows memory twice as fast."""


@dataclass(slots=True)
class Checkpoint:
    """Copies of one request's leading blocks.

    Attributes:
        saved: Acknowledged.
        copying: Behind them, under way.
        pinned: Of `copying`, those that the request no longer holds.
        is_finished: The request is gone; what is acknowledged now is of no use.
    """

    saved: int = 0
    copying: int = 0
    pinned: int = 0
    is_finished: bool = False


NO_CHECKPOINT: Final = Checkpoint()


class CheckpointLedger:
    """Checkpoints by request.

    Attributes:
        stored_blocks: Blocks of the store in use or promised to copies under way.
    """

    def __init__(self) -> None:
        self._checkpoints: dict[str, Checkpoint] = {}
        self.stored_blocks = 0

    def of(self, request_id: str) -> Checkpoint:
        """The present state, to be read only."""
        return self._checkpoints.get(request_id, NO_CHECKPOINT)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that no request holds and that are not free yet."""
        return sum(one.pinned for one in self._checkpoints.values())

    def copy(self, request_id: str, count: int) -> None:
        """Start to copy the next blocks of a request in memory."""
        one = self._checkpoints.setdefault(request_id, Checkpoint())
        assert count > 0, count
        assert not one.pinned, request_id
        one.copying += count
        self.stored_blocks += count

    def acknowledge(self, request_id: str, count: int) -> int:
        """Book copies that all workers have finished; returns the pinned blocks that come free."""
        one = self._checkpoints[request_id]
        assert count <= one.copying, (request_id, count, one.copying)
        one.copying -= count
        freed = min(one.pinned, count)
        one.pinned -= freed
        if not one.is_finished:
            one.saved += count
        else:
            self.stored_blocks -= count
            if not one.copying:
                del self._checkpoints[request_id]
        return freed

    def leave(self, request_id: str) -> int:
        """A request gives its blocks up; returns how many of them stay pinned."""
        one = self._checkpoints.get(request_id)
        if one is None:
            return 0
        one.pinned = one.copying
        return one.pinned

    def finish(self, request_id: str) -> int:
        """A request ended, its checkpoint goes; returns how many blocks stay pinned."""
        one = self._checkpoints.get(request_id)
        if one is None:
            return 0
        self.stored_blocks -= one.saved
        one.saved, one.is_finished, one.pinned = 0, True, one.copying
        if not one.copying:
            del self._checkpoints[request_id]
        return one.pinned

    def lose(self, request_id: str) -> None:
        """The store lost the saved copies: leading blocks have to be copied again, if ever."""
        one = self._checkpoints.get(request_id)
        if one is not None:
            self.stored_blocks -= one.saved
            one.saved = 0


class CheckpointRamp:
    """How many offline requests take part in checkpointing, by memory usage.

    Args:
        start: Usage up to which none does.
        full: Usage from which all do.
    """

    def __init__(self, start: float, full: float) -> None:
        self._start = start
        self._full = full
        self._usage = 0.0

    def request_count(self, usage: float, offline_count: int) -> int:
        """Requests to checkpoint in this step; usage is the share of blocks held, 0 to 1."""
        self._usage += USAGE_SHARE * (usage - self._usage)
        share = (self._usage - self._start) / (self._full - self._start)
        return ceil(min(1.0, max(0.0, share)) * offline_count)


class CopyBudget:
    """Blocks that one direction of the link moves: a token bucket, filled by time.

    It never holds more than two steps' worth, or a block: what was not used in a calm minute does
    not come as a burst.
    """

    def __init__(self) -> None:
        self._blocks = 0.0

    def refill(self, step_s: float, blocks_per_s: float) -> int:
        """Add a step's worth; returns the whole blocks at hand."""
        worth = step_s * blocks_per_s
        self._blocks = min(self._blocks + worth, max(1.0, 2.0 * worth))
        return int(self._blocks)

    def spend(self, blocks: int) -> None:
        """Take blocks out."""
        self._blocks -= blocks
