"""Streams the layers that do not stay: their books, their buffers, and the lane that fills them.

A offloaded layer lives in three pieces. Its full *blocks* are in the block store, wherever that
keeps them at the moment (a peer's memory or the host's). Its *tail*, the last unfinished block, is
on the device, so that a decoded token moves nothing: blocks are paged out once, when they are full,
and never again, since a full block cannot change. While attention reads the layer, all of it is
also in one of the *buffers*, in the very place and order that attention wants it; pages are copied
straight to that place, without a staging copy.

Copies run on one background thread, the *lane*, in the order they were asked for. That order is
what makes the rest simple: a page-out of a layer precedes the next page-in of the same layer, and a
buffer is filled again only after what was read out of it. Only the lane touches a layer's slot
table; the caller's thread reads it after `drain`.

On GPUs attention runs behind the caller's thread. The caller records an event at the moment from
which a buffer is free or full, and the lane waits for that event before it touches the buffer. The
other direction needs none: a transfer is complete when its wait returns.

Not thread-safe: one model, one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aqualib.engines.transformers.offload_plan import STREAM_BUFFERS, LayerShape, OffloadPlan

if TYPE_CHECKING:
    from aqualib.blocks import BlockStore

NO_SLOT: Final = -1
"""The entry of a slot table for a block that is not in the store. Fixed: no slot has it."""


class LayerStream:
    """The offloaded layers of one cache.

    Args:
        store: Holds the full blocks; owned by the stream from now on.
        shape: Of every layer.
        plan: Which layers are offloaded, and in which order.
        like: A tensor of the cache's dtype, on its device.
    """

    def __init__(
        self, store: BlockStore, shape: LayerShape, plan: OffloadPlan, like: torch.Tensor
    ) -> None:
        self._store = store
        self._shape = shape
        self._plan = plan
        self._device = like.device
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aqua-cache-lane")
        self._buffers = [new_buffer(shape, like) for _ in range(STREAM_BUFFERS)]
        tail_shape = (2, shape.batch, shape.heads, shape.block_tokens, shape.head_dim)
        self._tails = {layer: like.new_empty(tail_shape) for layer in plan.offloaded}
        self._slots = {
            layer: torch.full((shape.rows, shape.max_blocks), NO_SLOT) for layer in plan.offloaded
        }
        self._lengths = dict.fromkeys(plan.offloaded, 0)
        # Which buffer a layer occupies, and the copy that has to finish before it may be read.
        self._holder: dict[int, int] = {}
        self._filling: dict[int, Future[None]] = {}
        self._reading: int | None = None
        self._page_outs: list[Future[None]] = []
        self.paged_out_bytes = 0
        self.paged_in_bytes = 0
        self.stall_s = 0.0

    @property
    def nbytes(self) -> int:
        """Device memory of buffers and tails."""
        return sum(tensor.nbytes for tensor in (*self._buffers, *self._tails.values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks in the store, once every transfer asked for is done."""
        blocks = sum(length // self._shape.block_tokens for length in self._lengths.values())
        return blocks * self._shape.rows * self._shape.block_bytes

    def length(self, layer: int) -> int:
        """Tokens that `layer` holds."""
        return self._lengths[layer]

    # --- One visit of a layer ----------------------------------------------------------

    def enter(self, layer: int) -> torch.Tensor:
        """All of `layer` in a buffer, shape (2, batch, heads, max_tokens, head_dim).

        The first `length(layer)` tokens are valid; the caller may append behind them. The buffer
        is this layer's until another layer is entered or left.
        """
        if self._reading not in (None, layer):
            self._let_go()
        if layer not in self._holder:
            self._fill(layer)
        started_s = time.perf_counter()
        wait([self._filling[layer]])
        self.stall_s += time.perf_counter() - started_s
        # A page-out that failed comes first: it is the reason why a later page-in fails.
        while self._page_outs and self._page_outs[0].done():
            self._page_outs.pop(0).result()
        self._filling[layer].result()
        self._reading = layer
        buffer = self._buffers[self._holder[layer]]
        length, done = self._lengths[layer], self._paged_tokens(layer)
        buffer[..., done:length, :].copy_(self._tails[layer][..., : length - done, :])
        return buffer

    def commit(self, layer: int, length: int) -> None:
        """The caller has appended up to `length` tokens: page out the blocks that are now full."""
        buffer, tail = self._buffers[self._holder[layer]], self._tails[layer]
        size = self._shape.block_tokens
        first, last = self._lengths[layer] // size, length // size
        if last > first:
            ready = mark(self._device)
            self._page_outs.append(
                self._lane.submit(self._page_out, layer, buffer, first, last, ready)
            )
        # Tokens of the tail that were there before need no second copy.
        since = last * size if last > first else self._lengths[layer]
        tail[..., since - last * size : length - last * size, :].copy_(buffer[..., since:length, :])
        self._lengths[layer] = length

    def prefetch_after(self, layer: int) -> None:
        """Fill the free buffers with the offloaded layers that come next after `layer`."""
        if self._reading not in (None, layer):
            self._let_go()
        for upcoming in self._plan.upcoming(layer):
            if len(self._holder) == STREAM_BUFFERS:
                return
            if upcoming not in self._holder:
                self._fill(upcoming)

    # --- Changes to what is stored -----------------------------------------------------

    def reorder(self, beams: torch.Tensor) -> None:
        """Sequence `i` becomes what sequence `beams[i]` was; blocks are shared, not copied."""
        self.drain()
        on_host = beams.cpu()
        for layer, table in self._slots.items():
            by_sequence = table.view(2, self._shape.batch, self._shape.heads, -1)
            after = by_sequence.index_select(1, on_host)
            self._free(table, keep=after)
            by_sequence.copy_(after)
            reorder_sequences(self._tails[layer], beams, self._shape.block_tokens)
        for layer, buffer in self._holder.items():
            reorder_sequences(self._buffers[buffer], beams, self._lengths[layer])

    def crop(self, layer: int, length: int) -> None:
        """Forget all but the first `length` tokens of `layer`."""
        self.drain()
        size, table = self._shape.block_tokens, self._slots[layer]
        last = length // size
        if length % size and last < self._lengths[layer] // size:
            # The last block is unfinished again.
            self._lane.submit(self._page_in_tail, layer, last, mark(self._device)).result()
        self._free(table[:, last:], keep=table[:, :last])
        table[:, last:] = NO_SLOT
        self._lengths[layer] = length

    def clear(self) -> None:
        """Forget every token, and every copy that failed."""
        wait([*self._filling.values(), *self._page_outs])
        self._page_outs.clear()
        self._filling.clear()
        self._holder.clear()
        self._reading = None
        for layer in self._plan.offloaded:
            self.crop(layer, 0)

    def drain(self) -> None:
        """Wait for every copy that was asked for; afterwards the books are the caller's.

        Raises:
            AquaError: A copy failed.
        """
        while self._page_outs:
            self._page_outs.pop(0).result()
        for filling in self._filling.values():
            filling.result()

    def close(self) -> None:
        """Give all blocks back and end the lane. Harmless when repeated."""
        self._lane.shutdown(wait=True)
        self._store.close()

    # --- Buffers -----------------------------------------------------------------------

    def _fill(self, layer: int) -> None:
        index = next(i for i in range(STREAM_BUFFERS) if i not in self._holder.values())
        self._holder[layer] = index
        free = mark(self._device)
        self._filling[layer] = self._lane.submit(self._page_in, layer, self._buffers[index], free)

    def _let_go(self) -> None:
        assert self._reading is not None
        del self._holder[self._reading], self._filling[self._reading]
        self._reading = None

    def _paged_tokens(self, layer: int) -> int:
        return self._lengths[layer] // self._shape.block_tokens * self._shape.block_tokens

    # --- On the lane -------------------------------------------------------------------

    def _page_out(
        self, layer: int, buffer: torch.Tensor, first: int, last: int, ready: Callable[[], None]
    ) -> None:
        ready()
        rows, index = self._rows(buffer, first, last)
        slots, transfer = self._store.page_out(rows, index)
        transfer.wait()
        self._slots[layer][:, first:last] = slots.view(self._shape.rows, last - first)
        self.paged_out_bytes += len(index) * self._shape.block_bytes

    def _page_in(self, layer: int, buffer: torch.Tensor, free: Callable[[], None]) -> None:
        free()
        blocks = self._lengths[layer] // self._shape.block_tokens
        if not blocks:
            return
        rows, index = self._rows(buffer, 0, blocks)
        self._store.page_in(self._slots[layer][:, :blocks].reshape(-1), rows, index).wait()
        self.paged_in_bytes += len(index) * self._shape.block_bytes

    def _page_in_tail(self, layer: int, block: int, free: Callable[[], None]) -> None:
        free()
        rows = self._tails[layer].view(self._shape.rows, -1)
        slots = self._slots[layer][:, block]
        self._store.page_in(slots, rows, torch.arange(self._shape.rows)).wait()
        self.paged_in_bytes += self._shape.tail_bytes

    def _free(self, slots: torch.Tensor, *, keep: torch.Tensor) -> None:
        """Give blocks back to the store, but those that other sequences still refer to."""
        unused = np.setdiff1d(slots.numpy(), np.append(keep.numpy(), NO_SLOT))
        if len(unused):
            self._lane.submit(self._store.free, torch.from_numpy(unused)).result()

    def _rows(
        self, buffer: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer as rows of one block each, and the rows of blocks `first` to `last`."""
        starts = torch.arange(self._shape.rows) * self._shape.max_blocks
        index = (starts[:, None] + torch.arange(first, last)).reshape(-1)
        return buffer.view(self._shape.rows * self._shape.max_blocks, -1), index


def new_buffer(shape: LayerShape, like: torch.Tensor) -> torch.Tensor:
    """Room for one layer, shape (2, batch, heads, max_tokens, head_dim): keys, then values."""
    return like.new_empty((2, shape.batch, shape.heads, shape.max_tokens, shape.head_dim))


def reorder_sequences(layer: torch.Tensor, beams: torch.Tensor, length: int) -> None:
    """Reorder a layer's sequences in place, one head at a time to bound the memory it takes."""
    beams = beams.to(layer.device)
    for states in layer[..., :length, :]:
        for head in states.unbind(1):
            head.copy_(head.index_select(0, beams))


def mark(device: torch.device) -> Callable[[], None]:
    """A wait for all that this thread has asked of the device so far; free on CPUs."""
    if device.type != "cuda":
        return _no_wait
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it open
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _no_wait() -> None:
    return
