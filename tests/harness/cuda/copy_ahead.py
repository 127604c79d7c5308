"""Copies that may meet a writer: write-behind reads what an engine may be about to write.

The product takes a frame's marks away, copies, and looks whether they have come back; who writes
pins the frame and marks it first. What was written meanwhile was copied in vain and is copied
again, so nothing orders the two. That is a race by CUDA's rules, and harmless as long as the part
does not count as copied; so races of such a copy stay in doubt until the product has answered.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest import mock

from aqualib.memory.frame import PARTS_PER_FRAME
from aqualib.memory.frame_table import FrameTable
from aqualib.memory.migration_policy import Effect, Migration, WriteBehind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness.cuda.machine import Machine
    from harness.cuda.violations import Violation

    Stretches = list[tuple[int, int]]


class CopyAhead:
    """One copy, and what was found against it; used under the machine's lock.

    Attributes:
        is_open: Whether the product has still to say what became of it.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._doubts: list[tuple[Stretches, Violation]] = []

    def doubt(self, stretches: Stretches, found: Violation) -> None:
        """Keep what counts only if these bytes of the slab count as copied."""
        self._doubts.append((stretches, found))

    def settle(self, is_copied: Callable[[int, int], bool]) -> list[Violation]:
        """What is left of the doubts."""
        self.is_open = False
        return [
            found
            for stretches, found in self._doubts
            if any(is_copied(start, end) for start, end in stretches)
        ]


@contextlib.contextmanager
def copies_ahead_in_doubt(machine: Machine) -> Iterator[None]:
    """Have the product's write-behind be looked at like this."""
    apply, written_behind = FrameTable.apply, FrameTable.written_behind

    def begin(table: FrameTable, effect: Effect) -> Migration | None:
        """On the thread that copies, and next."""
        move = apply(table, effect)
        if isinstance(move, WriteBehind):
            machine.thread.ahead = CopyAhead()
        return move

    def answer(table: FrameTable, move: WriteBehind, failure: str, now_s: float) -> None:
        written_behind(table, move, failure, now_s)
        part_bytes = -(-move.frame.nbytes // PARTS_PER_FRAME)
        copied = move.parts & ~move.frame.written

        def is_copied(start: int, end: int) -> bool:
            parts = range(start // part_bytes, (end - 1) // part_bytes + 1)
            return any(copied >> part & 1 for part in parts)

        ahead, machine.thread.ahead = machine.thread.ahead, None
        if ahead is not None:
            with machine.lock:
                machine.violations += ahead.settle(is_copied)

    with (
        mock.patch.object(FrameTable, "apply", begin),
        mock.patch.object(FrameTable, "written_behind", answer),
    ):
        yield
