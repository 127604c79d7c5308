"""The tensor allocator: room for tensors of any size, in frames that come and go.

A tensor of up to one frame lies in one piece. A larger one takes whole frames and a piece of
another; to see it in one piece is to copy it (see `AquaTensor.pinned`). Pieces
start at multiples of `UNIT_BYTES`, so every dtype is aligned and GPUs copy at full width.

Frames on peers are filled first, then other frames with room, then a new frame is made. A frame
that nothing is in any more is taken apart at once, and its slab serves the next one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqua_protocol import CapacityError
from aqualib.ranges import Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqualib.memory.frame import Frame
    from aqualib.memory.frame_store import FrameStore

UNIT_BYTES: Final = 256
"""Bytes to which cudaMalloc aligns; the most that any dtype or copy engine asks for. Doubled, small
tensors waste twice as much."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes in one frame.

    Attributes:
        frame: Where.
        run: Bytes of the frame; its start is a multiple of `UNIT_BYTES`.
    """

    frame: Frame
    run: Range


class TensorAllocator:
    """Pieces of a store's frames; every method may be called from any thread."""

    def __init__(self, store: FrameStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._frames: dict[int, Frame] = {}

    def take(self, nbytes: int) -> list[Piece]:
        """Room for `nbytes`, in order: whole frames, then a rest.

        Raises:
            CapacityError: The store is full; nothing was taken.
            TransportError: Memory ran out; nothing was taken.
        """
        pieces: list[Piece] = []
        with self._lock:
            try:
                while nbytes:
                    piece = self._take_piece(min(nbytes, self._store.slab_bytes))
                    pieces.append(piece)
                    nbytes -= piece.run.size
            except BaseException:
                self._give_back(pieces)
                raise
        return pieces

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Free the pieces."""
        with self._lock:
            self._give_back(pieces)

    def _take_piece(self, nbytes: int) -> Piece:
        units = -(-nbytes // UNIT_BYTES)
        found = self._store.take(self._frames.values(), units)
        if found is None:
            frame = self._store.claim(UNIT_BYTES)
            self._frames[frame.number] = frame
            found = self._store.take([frame], units)
            if found is None:
                raise CapacityError(f"a frame of {frame.nbytes} bytes has no room for {nbytes}")
        frame, start = found
        return Piece(frame=frame, run=Range(start * UNIT_BYTES, nbytes))

    def _give_back(self, pieces: Sequence[Piece]) -> None:
        self._store.give_back(
            (piece.frame, Range(piece.run.start // UNIT_BYTES, -(-piece.run.size // UNIT_BYTES)))
            for piece in pieces
        )
        for piece in pieces:
            if not piece.frame.room.taken and piece.frame.number in self._frames:
                del self._frames[piece.frame.number]
                self._store.dissolve(piece.frame)
