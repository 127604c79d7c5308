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
from array import array
from collections.abc import Sequence
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
from aqualib.checksum import row_checksums
from aqualib.memory.frame import FrameState
from aqualib.metrics import Direction
from aqualib.ranges import Range, are_ascending, are_neighbours, frame_runs, lie_within, slot_runs
from aqualib.tensor import Location, location_of

if TYPE_CHECKING:
    from jaxtyping import Int64

    from aqualib.memory.frame import Frame
    from aqualib.memory.transfers import CopyStream, Transfer, Transfers

MAX_NAMED_SLOTS: Final = 256
"""Slots that an error names; the rest are only counted. A few kilobytes of text; doubled, an error
of a large batch is twice as long."""


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
        block_bytes: Size of a block; at most a slab.
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
        frame_count = -(-capacity_blocks // self._per_frame)
        try:
            transfers.store.reserve(transfers.store.counts()[0] + frame_count)
            for _ in range(frame_count):
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return (
            f"<BlockStore {self._used_count}/{self.capacity_blocks} blocks of "
            f"{format_bytes(self.block_bytes)}{state}>"
        )

    @property
    def is_checking(self) -> bool:
        """Whether what comes back is compared with checksums, which whole blocks have."""
        return self._sums is not None

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
        first, count = self._chosen(src, index)
        runs, slots = self._take(count)

        def copy(stream: CopyStream) -> None:
            if first is not None and len(runs) == 1:
                frame, run = runs[0]
                stream.write(frame, run.times(self.block_bytes), src, first * self.block_bytes)
            else:
                with stream.copier.batched():
                    self._page_out_scattered(stream, runs, self._rows(src), index)

        try:
            # Sums first: slots are given back below, which no copy may still be writing to.
            if self._sums is not None:
                self._sums[slots.numpy()] = row_checksums(src, index)
            transfer = self._transfers.start(Direction.OUT, count * self.block_bytes, copy)
        except BaseException:
            self.free(slots)
            raise
        return PagedOut(slots, transfer)

    def page_in(
        self,
        slots: torch.Tensor,
        dst: torch.Tensor,
        index: torch.Tensor | None = None,
        *,
        columns: Range | None = None,
    ) -> Transfer:
        """Copy blocks into rows of `dst`; asynchronous until the transfer is waited for.

        Args:
            slots: From `page_out`, in any order, shape (n,), on the CPU.
            dst: Shape (num_rows, ...), each row dense and `block_bytes` large, on any device.
            index: Which rows, int64, shape (n,), distinct, on the CPU; by default the first n.
            columns: These bytes of each block alone, into `dst` of uint8, contiguous, shape
                (n, columns.size), without an index. They have no checksum.

        Raises:
            ValueError: A slot that is not in use, rows of another size, an index that does not fit,
                or columns where checksums are compared; nothing was copied.
            DataLostError: Some blocks cannot be read any more; `details["slots"]` names them. Rows
                of `dst` may have been overwritten.
            ChecksumMismatchError: Raised by `wait`: some blocks are not what was stored.
            TransportError: A copy failed.
        """
        wanted = self._checked_slots(slots)
        first = None
        if columns is None:
            first, count = self._chosen(dst, index)
            if count < len(wanted):
                raise ValueError(f"{len(wanted)} blocks do not fit into the rows given")
        elif self.is_checking or dst.shape != (len(wanted), columns.size):
            raise ValueError(f"{columns} of {len(wanted)} blocks do not go into {tuple(dst.shape)}")

        def copy(stream: CopyStream) -> None:
            try:
                if first is not None and (run := self._slot_run(wanted)) is not None:
                    frame, part = run
                    stream.read(frame, part, dst, first * self.block_bytes)
                    return
                with stream.copier.batched():  # One submission, in however many frames they are.
                    if columns is not None:
                        self._page_in_order(stream, wanted, dst, columns)
                    elif index is None:
                        rows = self._rows(dst)[: len(wanted)]
                        self._page_in_order(stream, wanted, rows, Range(0, self.block_bytes))
                    else:
                        self._page_in_scattered(stream, wanted, self._rows(dst), index)
            except DataLostError as error:
                raise self._lost(wanted, error) from error

        def check() -> None:
            self._check(wanted, dst[: len(wanted)] if index is None else dst, index)

        nbytes = len(wanted) * (self.block_bytes if columns is None else columns.size)
        return self._transfers.start(
            Direction.IN, nbytes, copy, check if self.is_checking else None
        )

    def free(self, slots: torch.Tensor) -> None:
        """Give blocks up; their slots may come back from the next `page_out`.

        Raises:
            ValueError: A slot that is not in use, or named twice; nothing was freed.
        """
        wanted = np.sort(self._checked_slots(slots))
        if not are_ascending(wanted):
            raise ValueError("a slot may be freed only once")
        with self._lock:
            if not self._taken[wanted].all():
                raise ValueError("a slot was freed by another thread meanwhile")
            self._taken[wanted] = False
        # Counted as used until the room is back: what is counted as free can be had.
        self._transfers.store.give_back(
            (self._frames[run.ordinal], run.slots) for run in slot_runs(wanted, self._per_frame)
        )
        with self._lock:
            self._used_count -= len(wanted)

    def close(self) -> None:
        """Drop every block and give the room back. Harmless when repeated."""
        self._finalizer()
        self._transfers.store.sweep()

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
            spread = self._transfers.spread(count * self.block_bytes)
            take = self._transfers.store.take_runs
            runs = take(self._frames, count, lender_count=spread) if count else []
            if runs is None:
                raise DataLostError(
                    f"parts of {self!r} are lost and have not been freed, so {count} blocks do not "
                    "fit",
                    remedy="Free the blocks that page_in reports as lost.",
                )
            self._used_count += count
        ranges = []
        for frame, run in runs:
            start = self._ordinals[frame.number] * self._per_frame + run.start
            self._taken[start : start + run.size] = True
            if count == 1:  # The cheapest way to a tensor, where a page's other costs are few.
                return runs, torch.frombuffer(array("q", (start,)), dtype=torch.int64)
            ranges.append(np.arange(start, start + run.size))
        slots = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        return runs, torch.from_numpy(slots)

    # --- Inside: copies -------------------------------------------------------------------

    def _slot_run(self, slots: Int64[np.ndarray, " n"]) -> tuple[Frame, Range] | None:
        """Where the blocks are, if they lie next to each other in one frame, in order."""
        if not len(slots) or not are_neighbours(slots):
            return None
        ordinal, start = divmod(int(slots[0]), self._per_frame)
        if start + len(slots) > self._per_frame:
            return None
        return self._frames[ordinal], Range(start, len(slots)).times(self.block_bytes)

    def _page_out_scattered(
        self,
        stream: CopyStream,
        runs: list[tuple[Frame, Range]],
        rows: torch.Tensor,
        index: torch.Tensor | None,
    ) -> None:
        at = 0
        for frame, run in runs:
            some = slice(at, at + run.size)
            table = self._table(stream, frame, run, writes=True)
            if index is None:
                stream.copier.copy(table, rows[some])
            else:
                stream.copier.gather(table, rows, index[some])
            del table
            at += run.size

    def _page_in_order(
        self,
        stream: CopyStream,
        slots: Int64[np.ndarray, " n"],
        rows: torch.Tensor,
        columns: Range,
    ) -> None:
        """Fill consecutive rows: each stretch within one frame is one copy or one gather."""
        runs = list(frame_runs(slots // self._per_frame))
        if self._transfers.spread(rows.nbytes) > 1:  # Each lane then reads from its own lender.
            runs.sort(key=lambda run: self._frames[slots[run[0]] // self._per_frame].lender_id)
        for first, last in runs:
            frame = self._frames[slots[first] // self._per_frame]
            within = slots[first:last] % self._per_frame
            low, high = int(within.min()), int(within.max())
            table = self._table(stream, frame, Range(low, high - low + 1), writes=False)
            table = table[:, columns.start : columns.end]
            stream.copier.gather(rows[first:last], table, torch.from_numpy(within - low))
            del table

    def _page_in_scattered(
        self,
        stream: CopyStream,
        slots: Int64[np.ndarray, " n"],
        rows: torch.Tensor,
        index: torch.Tensor,
    ) -> None:
        """Fill rows anywhere: in the order of slots, where the runs are longest."""
        if not are_ascending(slots):
            order = np.argsort(slots, kind="stable")
            slots, index = slots[order], index[torch.from_numpy(order)]
        for run in slot_runs(slots, self._per_frame):
            table = self._table(stream, self._frames[run.ordinal], run.slots, writes=False)
            stream.copier.scatter(rows, table, index[run.at : run.at + run.slots.size])
            del table

    def _table(
        self, stream: CopyStream, frame: Frame, slots: Range, *, writes: bool
    ) -> torch.Tensor:
        """Slots of a frame, shape (slots.size, block_bytes); dropped before the next is taken."""
        view = stream.view(frame, slots.times(self.block_bytes), writes=writes)
        return view.view(slots.size, self.block_bytes)

    # --- Inside: checks -------------------------------------------------------------------

    def _chosen(self, table: torch.Tensor, index: torch.Tensor | None) -> tuple[int | None, int]:
        """Which rows are meant, once all are known to be blocks.

        Returns:
            The first of them if they lie next to each other in memory, in order, else None; and
            how many there are.
        """
        is_packed = self._is_packed(table)
        row_count = table.shape[0] if is_packed else self._rows(table).shape[0]
        if index is None:
            return 0 if is_packed else None, row_count
        numbers = _checked_index(index, row_count)
        is_run = is_packed and len(numbers) > 0 and are_neighbours(numbers)
        return int(numbers[0]) if is_run else None, len(numbers)

    def _is_packed(self, table: torch.Tensor) -> bool:
        """Whether the tensor's bytes are its rows, one block after the other."""
        return (
            table.dim() > 0
            and table.nbytes == table.shape[0] * self.block_bytes
            and table.is_contiguous()
            and not (table.is_conj() or table.is_neg())
        )

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        """The engine's tensor as bytes, shape (num_rows, block_bytes); a view.

        Raises:
            ValueError: Its rows are not dense, or not as large as a block.
        """
        if not table.dim():
            raise ValueError("a single number has no rows")
        count = table.shape[0]
        if not count:
            return table.new_empty((0, self.block_bytes), dtype=torch.uint8)
        try:
            rows = table.detach()
            rows = rows if rows.dim() == 2 else rows.view(count, -1)  # noqa: PLR2004 - rows of elements
            rows = rows.view(torch.uint8)
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

    def _checked_slots(self, slots: torch.Tensor) -> Int64[np.ndarray, " n"]:
        self._require_open()
        numbers = _checked_index(slots, len(self._taken))
        in_use = self._taken[numbers[0]] if len(numbers) == 1 else self._taken[numbers].all()
        if not in_use:
            raise ValueError(f"slots {_some(numbers[~self._taken[numbers]])} are not in use")
        return numbers

    def _check(
        self, slots: Int64[np.ndarray, " n"], rows: torch.Tensor, index: torch.Tensor | None
    ) -> None:
        """Compare the blocks that have arrived in `rows[index]`, first ones first."""
        assert self._sums is not None, "nothing to compare with"
        found = row_checksums(rows, None if index is None else index[: len(slots)])
        wrong = np.flatnonzero(self._sums[slots] != np.array(found, dtype=np.uint64))
        if len(wrong):
            raise ChecksumMismatchError(
                f"{len(wrong)} of {len(slots)} blocks are not what was stored",
                slots=_some(slots[wrong]),
            )

    def _lost(self, wanted: Int64[np.ndarray, " n"], error: DataLostError) -> DataLostError:
        is_lost = np.array([frame.state is FrameState.LOST for frame in self._frames])
        lost = wanted[is_lost[wanted // self._per_frame]]
        return DataLostError(
            f"{len(lost)} of {len(wanted)} blocks are lost: {error.message}",
            remedy="Free the named slots and recompute what was in them.",
            slots=_some(lost),
        )

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError(f"{self!r} is closed")


def _checked_index(index: torch.Tensor, limit: int) -> Int64[np.ndarray, " n"]:
    """The numbers of `index`, which are positions below `limit`."""
    if index.dtype != torch.int64 or index.dim() != 1 or not index.is_cpu:
        raise ValueError(
            f"an index is int64, one-dimensional and on the CPU, not {index.dtype} of "
            f"{tuple(index.shape)} on {index.device}"
        )
    # A single number by the way that is cheapest right after a copy has emptied the caches.
    numbers = np.array(index.tolist()) if index.shape[0] == 1 else index.numpy()
    if not lie_within(numbers, limit):
        raise ValueError(f"an index must lie within 0 and {limit - 1}")
    return numbers


def _some(slots: Int64[np.ndarray, " n"]) -> list[int]:
    """The first few, as JSON takes them."""
    return [int(slot) for slot in slots[:MAX_NAMED_SLOTS]]


def _leave(transfers: Transfers, frames: list[Frame]) -> None:
    """Finalizer of a block store: take its frames apart."""

    def dissolve() -> bool:
        while frames:
            transfers.store.dissolve(frames.pop())
        return True

    transfers.store.leave(dissolve)
