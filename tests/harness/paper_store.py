"""A store on paper: the frame table and the few moves that tests of the migration policy need."""

from __future__ import annotations

from typing import Final, cast

from aqualib.memory.frame import Frame, FrameState, PeerSlab
from aqualib.memory.frame_table import FrameTable
from aqualib.memory.migration_policy import Migration, decide
from harness.memory import PaperLender, PaperSlab

SLAB_BYTES: Final = 1 << 20
UNIT_BYTES: Final = 256
NOW_S: Final = 100.0


class PaperView:
    """A view that is alive until told otherwise."""

    def __init__(self) -> None:
        self.is_alive = True

    def close(self) -> None:
        if self.is_alive:
            raise BufferError


class PaperStore:
    """FrameTable with the few moves that tests need."""

    def __init__(self) -> None:
        self.table = FrameTable(SLAB_BYTES)
        self._slab_ids = iter(range(1000))

    def lend(self, count: int, lender: PaperLender | None = None) -> list[PeerSlab]:
        lender = lender or PaperLender()
        slabs = [
            PeerSlab(next(self._slab_ids), 1, PaperSlab(SLAB_BYTES), lender) for _ in range(count)
        ]
        self.table.spare_peers |= dict.fromkeys(slabs)
        return slabs

    def frame(self, used_units: int = 1) -> Frame:
        self.table.host_count += 1
        frame = self.table.add_frame(PaperSlab(SLAB_BYTES), UNIT_BYTES)
        if used_units:
            frame.room.take(used_units)
            self.table.note_taken(frame, used_units)
        return frame

    def peer_frame(self, used_units: int = 1, lender: PaperLender | None = None) -> Frame:
        self.lend(1, lender)
        frame = self.frame(used_units)
        assert frame.state is FrameState.PEER
        return frame

    def ask(self, *frames: Frame) -> None:
        self.table.ask_back([cast("PeerSlab", frame.peer) for frame in frames], NOW_S)

    def pick(self, now_s: float = NOW_S) -> Migration | None:
        """Let the policy decide until a migration starts, as the store does."""
        self.table.sweep()
        while (effect := decide(self.table, now_s)) is not None:
            move = self.table.apply(effect)
            self.table.audit()
            if move is not None:
                return move
        return None
