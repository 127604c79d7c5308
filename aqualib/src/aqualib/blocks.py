"""BlockStore: fixed-size blocks for engines, paged out and in by the batch.

    store = aqua.block_store(block_bytes=2 << 20, capacity_blocks=4096)
    slots, transfer = store.page_out(kv_cache, blocks)      # gather rows, compact, to the store
    transfer.wait()
    store.page_in(slots, kv_cache, fresh_blocks).wait()     # and scatter them back
    store.free(slots)

A row of the engine's tensor is a block; blocks paged out together lie next to each other in the
store, however scattered the rows were. So a batch is a few long runs on the link, and the gather
happens where the engine's memory is. Paging in takes any slots in any order and finds the runs that
are there.

Room for `capacity_blocks` is reserved, and its host memory faulted in, when the store is made;
paging never waits for memory. Slots on peers are filled first.

A block is lost (`DataLostError`) or wrong (`ChecksumMismatchError`) by itself: the error names the
slots, the engine recomputes those. Calls from several threads are safe as long as no slot is freed
while another thread uses it.

Source: Aqua section 7, "Efficient context switching"; we gather straight into the peer's memory
instead of into a temporary tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import torch

from aqua_protocol import (
    CapacityError,
    ChecksumMismatchError,
    ConfigError,
    DataLostError,
    format_bytes,
)
from aqualib.checksum import matches, row_checksums
from aqualib.memory.frame_state import FrameState
from aqualib.metrics import Direction
from aqualib.ranges import Range
from aqualib.segments import segments, stretches
from aqualib.tensor import Location, location_of
from aqualib.transports.rows import are_ascending, are_neighbours, lie_within

if TYPE_CHECKING:
    import numpy.typing as npt

    from aqualib.memory.copy_stream import CopyStream, Transfer
    from aqualib.memory.frame import Frame
    from aqualib.memory.transfers import Transfers

    Index = npt.NDArray[np.int64]

MAX_NAMED_SLOTS: Final = 256
"""Slots that an error names; the rest are only counted."""


class PagedOut(NamedTuple):
    """Where blocks went, and the transfer that brings them there.

    Attributes:
        slots: One per row in the order given, int64, shape (n,), on the CPU.
        transfer: Wait for it before the rows change.
    """

    slots: torch.Tensor
    transfer: Transfer


class BlockStore:
    """Blocks of one size. Made by `Aqua.block_store`; a context manager.

    Args:
        transfers: Moves the bytes.
        block_bytes: Size of a block; at most a slab.
        capacity_blocks: How many there may be.

    Attributes:
        block_bytes: Size of a block.
        capacity_blocks: How many there may be.

    Raises:
        ConfigError: A block does not fit into a slab, or there would be none.
        CapacityError: The host memory that the blocks would need is not free.
    """

    def __init__(self, transfers: Transfers, *, block_bytes: int, capacity_blocks: int) -> None:
        if not 0 < block_bytes <= transfers.store.slab_bytes:
            raise ConfigError(
                f"a block of {block_bytes} bytes does not fit into a slab of "
                f"{transfers.store.slab_bytes}",
                remedy="Choose smaller blocks, or larger slabs on both sides.",
            )
        if capacity_blocks < 1:
            raise ConfigError(f"a block store needs room for a block, not {capacity_blocks}")
        self.block_bytes: Final = block_bytes
        self.capacity_blocks: Final = capacity_blocks
        self._transfers = transfers
        self._per_frame = transfers.store.slab_bytes // block_bytes
        self._frames: list[Frame] = []
        self._finalizer = weakref.finalize(self, _leave, transfers, self._frames)
        self._finalizer.atexit = False
        try:
            for _ in range(-(-capacity_blocks // self._per_frame)):
                self._frames.append(transfers.store.claim(block_bytes))
        except BaseException:
            self.close()
            raise
        self._ordinals = {frame.number: index for index, frame in enumerate(self._frames)}
        self._lock = threading.Lock()
        self._taken = np.zeros(len(self._frames) * self._per_frame, dtype=np.bool_)
        self._sums = np.zeros(len(self._taken), dtype=np.uint64) if transfers.is_checking else None
        self._used_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return (
            f"<BlockStore {self._used_count}/{self.capacity_blocks} blocks of "
            f"{format_bytes(self.block_bytes)}{state}>"
        )

    @property
    def used_count(self) -> int:
        """Blocks in the store."""
        return self._used_count

    @property
    def free_count(self) -> int:
        """Blocks that could be paged out now."""
        return self.capacity_blocks - self._used_count

    def location(self, slots: torch.Tensor | None = None) -> Location:
        """Where these blocks are at this moment, by default all room of the store.

        An engine may choose its policy by it: time slices are cheap on a peer and dear in DRAM.
        """
        frames: Sequence[Frame] = self._frames
        if slots is not None:
            numbers = np.unique(self._checked_slots(slots) // self._per_frame)
            frames = [self._frames[number] for number in numbers]
        return location_of(self._transfers.store.states_of(frames))

    # --- Paging ---------------------------------------------------------------------------

    def page_out(self, src: torch.Tensor, index: torch.Tensor | None = None) -> PagedOut:
        """Copy rows of `src` into the store; asynchronous until the transfer is waited for.

        Args:
            src: Shape (num_rows, ...), each row dense and `block_bytes` large, on any device.
            index: Which rows, int64, shape (n,), on the CPU; by default all.

        Returns:
            Slots and transfer, also as a pair to unpack.

        Raises:
            ValueError: Rows of another size, or an index that does not fit; nothing was stored.
            CapacityError: Fewer than n blocks are free; nothing was stored.
            DataLostError: Some of the room cannot be written; nothing was stored.
            TransportError: A copy failed; nothing was stored.
        """
        rows = self._rows(src)
        chosen = _checked_index(index, rows.shape[0])
        runs, slots = self._take((rows if chosen is None else chosen).shape[0])

        def copy(stream: CopyStream) -> None:
            at = 0
            for frame, run in runs:
                some = slice(at, at + run.size)
                if chosen is None:
                    self._copy(stream, Direction.OUT, frame, run, rows[some], None)
                else:
                    self._copy(stream, Direction.OUT, frame, run, rows, chosen[some])
                at += run.size

        try:
            nbytes = slots.shape[0] * self.block_bytes
            transfer = self._transfers.transfer(Direction.OUT, nbytes, copy)
            if self._sums is not None:
                self._sums[slots.numpy()] = row_checksums(rows, chosen)
        except BaseException:
            self._give_back(slots.numpy())
            raise
        return PagedOut(slots, transfer)

    def page_in(
        self, slots: torch.Tensor, dst: torch.Tensor, index: torch.Tensor | None = None
    ) -> Transfer:
        """Copy blocks into rows of `dst`; asynchronous until the transfer is waited for.

        Args:
            slots: From `page_out`, in any order, shape (n,), on the CPU.
            dst: Shape (num_rows, ...), each row dense and `block_bytes` large, on any device.
            index: Which rows, int64, shape (n,), distinct, on the CPU; by default the first n.

        Raises:
            ValueError: A slot that is not in use, rows of another size, or an index that does not
                fit; nothing was copied.
            DataLostError: Some blocks cannot be read any more; `details["slots"]` names them. Rows
                of `dst` may have been overwritten.
            ChecksumMismatchError: Raised by `wait`: some blocks are not what was stored.
            TransportError: A copy failed.
        """
        wanted = self._checked_slots(slots)
        rows = self._rows(dst)
        chosen = _checked_index(index, rows.shape[0])
        if (rows if chosen is None else chosen).shape[0] < len(wanted):
            raise ValueError(f"{len(wanted)} blocks do not fit into the rows given")
        rows = rows[: len(wanted)] if chosen is None else rows

        def copy(stream: CopyStream) -> None:
            try:
                if chosen is None:
                    self._page_in_order(stream, wanted, rows)
                else:
                    self._page_in_scattered(stream, wanted, rows, chosen)
            except DataLostError as error:
                raise self._lost(wanted, error) from error

        def check() -> None:
            self._check(wanted, rows, chosen)

        nbytes = len(wanted) * self.block_bytes
        is_checking = self._sums is not None
        return self._transfers.transfer(Direction.IN, nbytes, copy, check if is_checking else None)

    def free(self, slots: torch.Tensor) -> None:
        """Give blocks up; their slots may come back from the next `page_out`.

        Raises:
            ValueError: A slot that is not in use, or named twice; nothing was freed.
        """
        wanted = self._checked_slots(slots)
        if not are_ascending(wanted):
            wanted = np.sort(wanted)
            if not are_ascending(wanted):
                raise ValueError("a slot may be freed only once")
        with self._lock:
            if not self._taken[wanted].all():
                raise ValueError("a slot was freed by another thread meanwhile")
            self._taken[wanted] = False
            self._used_count -= len(wanted)
        self._give_back_room(wanted)

    def close(self) -> None:
        """Drop every block and give the room back. Harmless when repeated."""
        self._finalizer()
        self._transfers.sweep()

    # --- Inside: room ---------------------------------------------------------------------

    def _take(self, count: int) -> tuple[list[tuple[Frame, Range]], torch.Tensor]:
        """Take `count` slots, in runs as long as possible."""
        self._require_open()
        with self._lock:
            if count > self.capacity_blocks - self._used_count:
                raise CapacityError(
                    f"{self!r} has no room for {count} more blocks",
                    remedy="Free blocks, or make the store with a larger capacity_blocks.",
                    free_blocks=self.free_count,
                )
            self._used_count += count
        runs = self._transfers.store.take_runs(self._frames, count) if count else []
        if runs is None:
            with self._lock:
                self._used_count -= count
            raise DataLostError(
                f"parts of {self!r} are lost and have not been freed, so {count} blocks do not fit",
                remedy="Free the blocks that page_in reports as lost.",
            )
        starts = [self._ordinals[frame.number] * self._per_frame + run.start for frame, run in runs]
        ranges = [
            np.arange(start, start + run.size) for start, (_, run) in zip(starts, runs, strict=True)
        ]
        if len(ranges) == 1:
            slots = ranges[0]
        else:
            slots = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        self._taken[slots] = True
        return runs, torch.from_numpy(slots)

    def _give_back(self, slots: Index) -> None:
        with self._lock:
            self._taken[slots] = False
            self._used_count -= len(slots)
        self._give_back_room(np.sort(slots))

    def _give_back_room(self, ascending: Index) -> None:
        self._transfers.store.give_back(
            (self._frames[segment.ordinal], Range(segment.start, segment.size))
            for segment in segments(ascending, self._per_frame)
        )

    # --- Inside: copies -------------------------------------------------------------------

    def _page_in_order(self, stream: CopyStream, slots: Index, rows: torch.Tensor) -> None:
        """Fill consecutive rows: each stretch within one frame is one copy or one gather."""
        for first, last in stretches(slots // self._per_frame):
            frame = self._frames[slots[first] // self._per_frame]
            within = slots[first:last] % self._per_frame
            low, high = int(within.min()), int(within.max())
            part = rows[first:last]
            if are_neighbours(within):
                self._copy(stream, Direction.IN, frame, Range(low, len(within)), part, None)
            else:
                offsets = torch.from_numpy(within - low)
                _gather(stream, frame, self._bytes_of(Range(low, high - low + 1)), part, offsets)

    def _page_in_scattered(
        self, stream: CopyStream, slots: Index, rows: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Fill rows anywhere: in the order of slots, where the runs are longest."""
        if not are_ascending(slots):
            order = np.argsort(slots, kind="stable")
            slots, index = slots[order], index[torch.from_numpy(order)]
        for segment in segments(slots, self._per_frame):
            self._copy(
                stream,
                Direction.IN,
                self._frames[segment.ordinal],
                Range(segment.start, segment.size),
                rows,
                index[segment.at : segment.at + segment.size],
            )

    def _copy(
        self,
        stream: CopyStream,
        direction: Direction,
        frame: Frame,
        run: Range,
        rows: torch.Tensor,
        index: torch.Tensor | None,
    ) -> None:
        """Copy between a run of slots and rows; its view of the frame dies with the call.

        Args:
            index: Which rows; None for all of them, in order.
        """
        writes = direction is Direction.OUT
        table = stream.tensor(frame, self._bytes_of(run), writes=writes).view(run.size, -1)
        match direction, index:
            case Direction.OUT, None:
                stream.copier.copy(table, rows)
            case Direction.IN, None:
                stream.copier.copy(rows, table)
            case Direction.OUT, torch.Tensor():
                stream.copier.gather(table, rows, index)
            case Direction.IN, torch.Tensor():
                stream.copier.scatter(rows, table, index)

    def _bytes_of(self, run: Range) -> Range:
        return Range(run.start * self.block_bytes, run.size * self.block_bytes)

    # --- Inside: checks -------------------------------------------------------------------

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        """The engine's tensor as bytes, shape (num_rows, block_bytes); a view, or itself."""
        if not table.dim():
            raise ValueError("a single number has no rows")
        count = table.shape[0]
        if not count:
            return table.new_empty((0, self.block_bytes), dtype=torch.uint8)
        # Only the views that are needed: each costs some 10 us right after a copy, which has
        # emptied the caches.
        rows = table.detach() if table.requires_grad else table
        try:
            rows = rows if rows.dim() == 2 else rows.view(count, -1)  # noqa: PLR2004 - rows of elements
            rows = rows if rows.dtype is torch.uint8 else rows.view(torch.uint8)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the rows of {tuple(table.shape)} are not dense: {error}") from error
        if rows.stride(1) != 1:
            raise ValueError(f"the rows of {tuple(table.shape)} are not dense: {table.stride()}")
        if rows.shape[1] != self.block_bytes:
            raise ValueError(
                f"rows of {tuple(table.shape)} {table.dtype} have {rows.shape[1]} bytes, a block "
                f"has {self.block_bytes}"
            )
        return rows

    def _checked_slots(self, slots: torch.Tensor) -> Index:
        self._require_open()
        wanted = _checked_index(slots, len(self._taken))
        assert wanted is not None, "slots are given"
        numbers: Index = wanted.numpy()
        if not self._taken[numbers].all():
            raise ValueError(f"slots {_some(numbers[~self._taken[numbers]])} are not in use")
        return numbers

    def _check(self, slots: Index, rows: torch.Tensor, index: torch.Tensor | None) -> None:
        """Compare the blocks that have arrived in `rows[index]`, first ones first."""
        assert self._sums is not None, "nothing to compare with"
        at = range(len(slots)) if index is None else index.tolist()
        some = None if index is None else index[: len(slots)]
        wrong = [
            position
            for position, (row, found, expected) in enumerate(
                zip(at, row_checksums(rows, some), self._sums[slots].tolist(), strict=False)
            )
            # Another formula gives another sum: only `matches` has the last word.
            if found != expected and not matches(rows[row], expected)
        ]
        if wrong:
            raise ChecksumMismatchError(
                f"{len(wrong)} of {len(slots)} blocks are not what was stored",
                slots=_some(slots[wrong]),
            )

    def _lost(self, wanted: Index, error: DataLostError) -> DataLostError:
        states = self._transfers.store.states_of
        frames = {
            int(number)
            for number in np.unique(wanted // self._per_frame)
            if FrameState.LOST in states([self._frames[number]])
        }
        lost = wanted[np.isin(wanted // self._per_frame, list(frames))]
        return DataLostError(
            f"{len(lost)} of {len(wanted)} blocks are lost: {error.message}",
            remedy="Free the named slots and recompute what was in them.",
            slots=_some(lost),
        )

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError(f"{self!r} is closed")


def _gather(
    stream: CopyStream, frame: Frame, run: Range, rows: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Collect scattered slots of a frame into rows; its view of the frame dies with the call."""
    table = stream.tensor(frame, run, writes=False).view(-1, rows.shape[1])
    stream.copier.gather(rows, table, offsets)


def _checked_index(index: torch.Tensor | None, limit: int) -> torch.Tensor | None:
    """`index` itself, if it names positions below `limit`."""
    if index is None:
        return None
    if index.dtype != torch.int64 or index.dim() != 1 or not index.is_cpu:
        raise ValueError(
            f"an index is int64, one-dimensional and on the CPU, not {index.dtype} of "
            f"{tuple(index.shape)} on {index.device}"
        )
    if not lie_within(index.numpy(), limit):
        raise ValueError(f"an index must lie within 0 and {limit - 1}")
    return index


def _some(slots: Index) -> list[int]:
    """The first few, as JSON takes them."""
    return [int(slot) for slot in slots[:MAX_NAMED_SLOTS]]


def _leave(transfers: Transfers, frames: list[Frame]) -> None:
    """Finalizer of a block store: take its frames apart."""

    def dissolve() -> bool:
        while frames:
            transfers.store.dissolve(frames.pop())
        return True

    transfers.leave(dissolve)
