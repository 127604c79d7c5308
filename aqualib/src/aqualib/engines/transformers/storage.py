"""Keys and values of all layers within one budget: resident ones here, the others streamed.

Owns the device memory of a cache. It is allocated once, when the first keys arrive and say what
shape they have, and does not grow: that is how the budget holds. `DynamicCache` concatenates, so
for a moment it holds a layer twice; here new tokens are written behind the old ones in place. The
tensors handed out are views of that memory, in the layout of `DynamicCache` but for the distance
between heads: attention runs the same arithmetic in the same order, and logits come out bit for
bit the same.

An offloaded layer lives in three pieces. Its full *blocks* are in the block store, wherever that
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
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch

from aqua_protocol import ConfigError
from aqua_protocol.supervision import SerialExecutor
from aqualib.engines.transformers.offload_plan import STREAM_BUFFERS, LayerShape, OffloadPlan

if TYPE_CHECKING:
    from aqualib.blocks import BlockStore

NewStore: TypeAlias = "Callable[[int, int], BlockStore]"
"""Makes a block store from the size of a block in bytes and the number of blocks."""

NO_SLOT: Final = -1
"""The entry of a slot table for a block that is not in the store. Fixed: no slot has it."""


class LayerStorage:
    """The layers of one cache, once their shape is known.

    Args:
        shape: Of every layer.
        plan: Which layers are resident and which are offloaded.
        new_store: Called if anything is offloaded.
        like: A tensor of the cache's dtype, on its device.
    """

    def __init__(
        self, shape: LayerShape, plan: OffloadPlan, new_store: NewStore, like: torch.Tensor
    ) -> None:
        self._shape = shape
        self.offload_plan: Final = plan
        self._dtype = like.dtype
        self._device = like.device
        self._lengths = dict.fromkeys((*plan.resident, *plan.offloaded), 0)
        self._resident = {layer: new_buffer(shape, like) for layer in plan.resident}
        if plan.offloaded:
            blocks = len(plan.offloaded) * shape.rows * shape.max_blocks
            self._store = new_store(shape.block_bytes, blocks)
        self._lane = SerialExecutor("aqua-cache-lane")
        self._buffers = [new_buffer(shape, like) for _ in range(STREAM_BUFFERS) if plan.offloaded]
        tail_shape = (2, shape.batch, shape.heads, shape.block_tokens, shape.head_dim)
        self._tails = {layer: like.new_empty(tail_shape) for layer in plan.offloaded}
        self._slots = {
            layer: torch.full((shape.rows, shape.max_blocks), NO_SLOT) for layer in plan.offloaded
        }
        # Which buffer a layer occupies, and the copy that has to finish before it may be read.
        self._holder: dict[int, int] = {}
        self._filling: dict[int, Future[None]] = {}
        self._reading: int | None = None
        self._page_outs: list[Future[None]] = []
        self.paged_out_bytes = 0
        self.paged_in_bytes = 0
        self.stall_s = 0.0
        self.peak_bytes = self.nbytes

    @property
    def nbytes(self) -> int:
        """Device memory held now, measured from the tensors."""
        tensors = (*self._resident.values(), *self._buffers, *self._tails.values())
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks in the store, once every transfer asked for is done."""
        blocks = sum(self._lengths[layer] // self._shape.block_tokens for layer in self._slots)
        return blocks * self._shape.rows * self._shape.block_bytes

    def length(self, layer: int) -> int:
        """Tokens that `layer` holds."""
        return self._lengths[layer]

    # --- One visit of a layer ----------------------------------------------------------

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return all keys and values of `layer`, valid until the next call.

        Args:
            keys: Shape (batch, heads, new tokens, head_dim).
            values: Same shape.

        Raises:
            ConfigError: They do not fit the cache; nothing was appended.
        """
        before = self._lengths[layer]
        after = before + keys.shape[-2]
        self._require_fit(layer, keys, values, after)
        is_resident = layer in self._resident
        buffer = self._resident[layer] if is_resident else self._enter(layer)
        buffer[0, :, :, before:after] = keys
        buffer[1, :, :, before:after] = values
        if not is_resident:
            self._page_out_full(layer, after)
        self._lengths[layer] = after
        self._prefetch_after(layer)
        return buffer[0, :, :, :after], buffer[1, :, :, :after]

    def _enter(self, layer: int) -> torch.Tensor:
        """All of `layer` in a buffer, shape (2, batch, heads, max_tokens, head_dim).

        The first `length(layer)` tokens are valid, and others may be appended behind them. The
        buffer is this layer's until another layer is entered or left.
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
        length, size = self._lengths[layer], self._shape.block_tokens
        done = length // size * size  # In whole blocks; the rest is in the tail.
        buffer[..., done:length, :].copy_(self._tails[layer][..., : length - done, :])
        return buffer

    def _page_out_full(self, layer: int, length: int) -> None:
        """Up to `length` tokens are in the buffer: page out the blocks that are now full."""
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

    def _prefetch_after(self, layer: int) -> None:
        """Fill the free buffers with the offloaded layers that come next after `layer`."""
        if self._reading not in (None, layer):
            self._let_go()
        for upcoming in self.offload_plan.upcoming(layer):
            if len(self._holder) == STREAM_BUFFERS:
                return
            if upcoming not in self._holder:
                self._fill(upcoming)

    # --- Changes to what is stored -----------------------------------------------------

    def reorder(self, beams: torch.Tensor) -> None:
        """Sequence `i` becomes what sequence `beams[i]` was; blocks are shared, not copied."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self._shape.scratch_bytes)
        self.drain()
        on_host = beams.cpu()
        for layer, table in self._slots.items():
            by_sequence = table.view(2, self._shape.batch, self._shape.heads, -1)
            after = by_sequence.index_select(1, on_host)
            self._free(table, keep=after)
            by_sequence.copy_(after)
            reorder_sequences(self._tails[layer], beams, self._shape.block_tokens)
        held = {layer: self._buffers[index] for layer, index in self._holder.items()}
        for layer, buffer in (self._resident | held).items():
            reorder_sequences(buffer, beams, self._lengths[layer])

    def crop(self, layer: int, length: int) -> None:
        """Forget all but the first `length` tokens of `layer`."""
        if layer in self._slots:
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
        """Forget every token, and every copy that failed; the memory stays for the next prompt."""
        wait([*self._filling.values(), *self._page_outs])
        self._page_outs.clear()
        self._filling.clear()
        self._holder.clear()
        self._reading = None
        for layer in self._lengths:
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
        """Give back what is in the store and end the lane. Harmless when repeated."""
        self._lane.shutdown()
        if self._slots:
            self._store.close()

    def _require_fit(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, after: int
    ) -> None:
        shape = self._shape
        expected = (shape.batch, shape.heads, keys.shape[-2], shape.head_dim)
        for name, states in (("keys", keys), ("values", values)):
            if tuple(states.shape) != expected:
                raise ConfigError(
                    f"{name} of layer {layer} have the shape {tuple(states.shape)}, the cache was"
                    f" made for {expected}",
                    remedy="Use one cache per batch, with a model whose layers are alike.",
                )
            if states.dtype != self._dtype or states.device != self._device:
                raise ConfigError(
                    f"{name} of layer {layer} are {states.dtype} on {states.device}, the cache"
                    f" holds {self._dtype} on {self._device}",
                    remedy="Load the model in one dtype and on one device.",
                )
        if after > shape.max_tokens:
            raise ConfigError(
                f"{after} tokens exceed the {shape.max_tokens} that the cache was made for",
                remedy="Pass max_tokens of at least the prompt and the new tokens together.",
                needed_tokens=after,
                max_tokens=shape.max_tokens,
            )

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
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it open
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
