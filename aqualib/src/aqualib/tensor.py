"""AquaTensor: a tensor whose bytes live on a peer, in host memory, or both, and move by themselves.

    t = aqualib.offload(kv)           # bytes are on a peer if one lends, else in host memory
    t.load(out=kv)                    # and back, from wherever they are now
    with t.pinned() as view:          # a torch tensor in place; nothing moves meanwhile
        view[0] = 1

A tensor of up to one slab is one piece of memory, and `pinned` shows it in place. A larger one lies
in several slabs; `pinned` then works on a copy and writes it back at the end.

After the block the view is empty: Python keeps the name of a `with` alive, and a view that stays
usable would either be read where the bytes no longer are, or hold the producer's memory for ever.
Tensors and arrays derived from the view cannot be emptied. They keep the bytes in place until they
die, a warning says so, and a producer that wants its memory back acts by its policy meanwhile.
What was queued on a GPU inside the block, on any stream, is waited for before the bytes may move.

One tensor used by several threads is not synchronised, like any tensor.

Source: Aqua section 6, "Aqua Tensors". There the program must convert at iteration boundaries; here
bytes move in the background, and only `pinned` holds them.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch

from aqua_protocol import ChecksumMismatchError, DataLostError, TransportError, format_bytes
from aqualib.checksum import checksum
from aqualib.memory.frame import FrameState, still_alive
from aqualib.metrics import Direction
from aqualib.ranges import Range
from aqualib.transports.base import MappedSlab

if TYPE_CHECKING:
    from aqualib.memory.frame import Frame
    from aqualib.memory.frame_store import FrameStore
    from aqualib.memory.transfers import CopyStream, Transfer, Transfers

logger = logging.getLogger("aqualib")

_numbers = itertools.count()


class Location(StrEnum):
    """Where bytes are now."""

    PEER = "peer"
    HOST = "host"
    MIXED = "mixed"
    LOST = "lost"


def location_of(states: set[FrameState]) -> Location:
    """Where bytes in frames of these states are; nothing at all counts as in host memory."""
    if FrameState.LOST in states:
        return Location.LOST
    on_peer = {state in {FrameState.PEER, FrameState.DRAINING} for state in states}
    if len(on_peer) > 1:
        return Location.MIXED
    return Location.PEER if True in on_peer else Location.HOST


UNIT_BYTES: Final = 256
"""Bytes to which cudaMalloc aligns; the most that any dtype or copy engine asks for. Doubled, small
tensors waste twice as much."""


class Piece(NamedTuple):
    """Consecutive bytes of one frame; they start at a multiple of `UNIT_BYTES`."""

    frame: Frame
    run: Range


class TensorAllocator:
    """Room for tensors of any size in frames of one store; any thread may call it.

    A tensor of up to one frame lies in one piece, a larger one takes whole frames and a piece of
    another. Frames on peers are filled first, then others with room, then a new one is made; one
    that nothing is in any more is taken apart, and its slab serves the next.
    """

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
            assert found is not None, f"{frame!r} has no room for {nbytes} bytes"
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


class PinnedView(MappedSlab):
    """Bytes of a pinned slab; `close` ends it, or raises `BufferError` while somebody looks.

    All tensors over a slab share one storage, so torch's reference count cannot tell who still
    looks at one tensor's bytes. A view is a storage of its own over a part of the slab.

    Work that was queued on a GPU keeps no tensor alive. So closing waits for it: once no tensor is
    left, none can be added.

    Args:
        memory: The slab, which stays mapped for as long as the view is open.
        run: Which bytes of it.
        synchronize: Waits for what is queued on the device.
    """

    def __init__(self, memory: MappedSlab, run: Range, synchronize: Callable[[], None]) -> None:
        whole = memory.tensor
        undo = ExitStack()
        # A device that has failed runs nothing any more, so there is nothing to wait for.
        undo.enter_context(suppress(TransportError))
        undo.callback(synchronize)
        super().__init__(whole.data_ptr() + run.start, run.size, whole.device, undo)


class AquaTensor:
    """A tensor in the store. Made by `Aqua.empty` and `Aqua.offload`; a context manager.

    Raises:
        CapacityError: The store is full.
    """

    def __init__(
        self,
        transfers: Transfers,
        allocator: TensorAllocator,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.shape: Final = torch.Size(shape)
        self.dtype: Final = dtype
        self.nbytes: Final = math.prod(self.shape) * dtype.itemsize
        self._number = next(_numbers)
        self._transfers = transfers
        self._allocator = allocator
        self._pieces = tuple(allocator.take(self.nbytes))
        self._sum: int | None = None
        self._pin_count = 0
        self._views: list[MappedSlab] = []
        self._has_warned = False
        self._finalizer = weakref.finalize(
            self, _leave, transfers, allocator, self._pieces, self._views
        )
        # At the interpreter's end the whole store goes; see `Aqua.close`.
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = "x".join(map(str, self.shape)) or "scalar"
        state = self.location.value if self._finalizer.alive else "released"
        return f"<AquaTensor {self._number}: {dtype} {shape}, {format_bytes(self.nbytes)}, {state}>"

    @property
    def location(self) -> Location:
        """Where the bytes are at this moment; it may have changed when you look again."""
        return location_of(self._transfers.store.states_of(piece.frame for piece in self._pieces))

    def store(self, src: torch.Tensor) -> None:
        """Copy `src` in; done on return.

        Args:
            src: Same shape and dtype, on any device; a layout that is not contiguous costs a copy.

        Raises:
            ValueError: Another shape or dtype, or the tensor was released.
            DataLostError: A producer died and its memory cannot be reached; release the tensor.
            TransportError: The copy failed; the contents are undefined.
        """
        self._require_like(src)
        flat = _bytes_of(src.detach().resolve_conj().resolve_neg().contiguous())
        self._sum = None
        self._move(Direction.OUT, flat).wait()
        self._sum = self._sum_of(flat)

    def load(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the values out; done on return.

        Args:
            out: Where to, of the same shape and dtype, on any device. By default a new tensor on
                the transport's device.

        Raises:
            ValueError: Another shape or dtype, or the tensor was released.
            DataLostError: The bytes cannot be read any more; recompute them.
            ChecksumMismatchError: They are not what was stored; `out` must not be used.
            TransportError: The copy failed; `out` must not be used.
        """
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self._transfers.device)
        self._require_like(out)
        plain = out.detach()
        if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
            plain = torch.empty(self.shape, dtype=self.dtype, device=out.device)
        flat = _bytes_of(plain)

        def check() -> None:
            if not self._is_intact(flat):
                raise self._mismatch()

        self._move(Direction.IN, flat, check).wait()
        if plain.data_ptr() != out.data_ptr():
            out.detach().copy_(plain)
        return out

    @contextmanager
    def pinned(self, *, writes: bool = True) -> Iterator[torch.Tensor]:
        """The values as a torch tensor that stays where it is until the block ends.

        Waits while the bytes are moving, and at the end of the block for all that this process has
        queued on the device. The tensor is empty after the block. One that is larger than a slab is
        worked on as a copy, which is written back at the end.

        Args:
            writes: False promises to change nothing, which spares copies later.

        Raises:
            ValueError: The tensor was released.
            DataLostError: The bytes cannot be read any more.
            ChecksumMismatchError: They are not what was stored.
            TransportError: The device failed at what was queued.
        """
        self._require_held()
        self._pin_count += 1
        try:
            block = self._in_place if len(self._pieces) == 1 else self._on_a_copy
            with block(writes=writes) as view:
                try:
                    yield view
                finally:
                    # The name after `as` outlives the block.
                    with torch.no_grad():
                        view.set_()  # type: ignore[call-overload] # torch's stubs lack this form
        finally:
            self._pin_count -= 1

    def release(self) -> None:
        """Give the room back. Harmless when repeated.

        Raises:
            ValueError: Inside `pinned()`.
        """
        if self._pin_count:
            raise ValueError(f"{self!r} cannot be released inside pinned()")
        self._finalizer()
        self._transfers.store.sweep()

    # --- Inside ---------------------------------------------------------------------------

    def _move(
        self, direction: Direction, flat: torch.Tensor, check: Callable[[], None] | None = None
    ) -> Transfer:
        self._require_held()

        def copy(stream: CopyStream) -> None:
            copy_part = stream.write if direction is Direction.OUT else stream.read
            at = 0
            try:
                for piece in self._pieces:
                    copy_part(piece.frame, piece.run, flat, at)
                    at += piece.run.size
            except DataLostError as error:
                raise self._lost(error) from error

        return self._transfers.start(direction, self.nbytes, copy, check)

    @contextmanager
    def _in_place(self, *, writes: bool) -> Iterator[torch.Tensor]:
        (piece,) = self._pieces
        store = self._transfers.store
        try:
            memory = store.pin(piece.frame, piece.run if writes else None)
        except DataLostError as error:
            raise self._lost(error) from error
        borrowed = PinnedView(memory, piece.run, self._transfers.synchronize)
        if not self._is_intact(borrowed.tensor):
            self._end_view(piece, borrowed)
            raise self._mismatch()
        try:
            # Detached, or autograd would keep the tensor that it is a view of, and so the memory.
            yield borrowed.tensor.view(self.dtype).view(self.shape).detach()
            self._transfers.synchronize()
            if writes:
                self._sum = self._sum_of(borrowed.tensor)
        finally:
            self._end_view(piece, borrowed)

    @contextmanager
    def _on_a_copy(self, *, writes: bool) -> Iterator[torch.Tensor]:
        copy = self.load()
        # The caller's view is emptied at the end of the block; this one is not.
        yield copy.view(self.shape)
        if writes:
            self.store(copy)

    def _end_view(self, piece: Piece, borrowed: PinnedView) -> None:
        try:
            borrowed.close()
        except BufferError:
            self._views.append(borrowed)
            self._transfers.store.linger(piece.frame, borrowed)
            # The bytes may change behind our back now.
            self._sum = None
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a tensor or array made from the view of %r has outlived pinned(); it keeps "
                    "the bytes in place until it dies: drop it, or clone() inside the block",
                    self,
                )
        else:
            self._transfers.store.unpin(piece.frame)

    def _sum_of(self, flat: torch.Tensor) -> int | None:
        """What to compare with later; None where surviving views may change the bytes."""
        self._views[:] = still_alive(self._views)
        return checksum(flat) if self._transfers.is_checking and not self._views else None

    def _is_intact(self, flat: torch.Tensor) -> bool:
        return self._sum is None or checksum(flat) == self._sum

    def _mismatch(self) -> ChecksumMismatchError:
        return ChecksumMismatchError(
            f"{self!r} holds other bytes than were stored",
            remedy="Store the values again; until then no access gives them out.",
            tensor=self._number,
        )

    def _lost(self, error: DataLostError) -> DataLostError:
        return DataLostError(
            f"{self!r} is lost: {error.message}",
            remedy="Release the tensor and recompute its values.",
            tensor=self._number,
        )

    def _require_held(self) -> None:
        if not self._finalizer.alive:
            raise ValueError(f"{self!r} was released")

    def _require_like(self, other: torch.Tensor) -> None:
        if other.shape != self.shape or other.dtype != self.dtype:
            raise ValueError(
                f"{self!r} cannot exchange values with {other.dtype} of {tuple(other.shape)}"
            )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, shape (nbytes,)."""
    return tensor.view(-1).view(torch.uint8)


def _leave(
    transfers: Transfers,
    allocator: TensorAllocator,
    pieces: Sequence[Piece],
    views: list[MappedSlab],
) -> None:
    """Finalizer of a tensor: free its room once no view of it is alive."""

    def free() -> bool:
        if still_alive(views):
            return False
        allocator.give_back(pieces)
        return True

    transfers.store.leave(free)
