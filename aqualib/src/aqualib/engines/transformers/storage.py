"""Keys and values of all layers within one budget: resident ones here, the others offloaded.

Owns the device memory of a cache. It is allocated once, when the first keys arrive and say what
shape they have, and does not grow: that is how the budget holds. `DynamicCache` concatenates, so
for a moment it holds a layer twice; here new tokens are written behind the old ones in place.

The tensors handed out are views of that memory: the first tokens of each head, rows contiguous, in
the layout of `DynamicCache` but for the distance between heads. Attention kernels therefore run the
same arithmetic in the same order, and logits come out bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from aqua_protocol import ConfigError
from aqualib.engines.transformers.layer_stream import LayerStream, new_buffer, reorder_sequences
from aqualib.engines.transformers.offload_plan import LayerShape, OffloadPlan

if TYPE_CHECKING:
    from aqualib.blocks import BlockStore

NewStore: TypeAlias = "Callable[[int, int], BlockStore]"
"""Makes a block store from the size of a block in bytes and the number of blocks."""


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
        self.shape = shape
        self.offload_plan = plan
        self._dtype = like.dtype
        self._device = like.device
        self._resident = {layer: new_buffer(shape, like) for layer in plan.resident}
        self._resident_lengths = dict.fromkeys(plan.resident, 0)
        self.stream: LayerStream | None = None
        if plan.offloaded:
            blocks = len(plan.offloaded) * shape.rows * shape.max_blocks
            self.stream = LayerStream(new_store(shape.block_bytes, blocks), shape, plan, like)
        self.peak_bytes = self.nbytes

    @property
    def nbytes(self) -> int:
        """Device memory held now, measured from the tensors."""
        offloaded = self.stream.nbytes if self.stream is not None else 0
        return offloaded + sum(buffer.nbytes for buffer in self._resident.values())

    def length(self, layer: int) -> int:
        """Tokens that `layer` holds."""
        if layer in self._resident:
            return self._resident_lengths[layer]
        assert self.stream is not None, f"layer {layer} is neither resident nor offloaded"
        return self.stream.length(layer)

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
        before = self.length(layer)
        after = before + keys.shape[-2]
        self._require_fit(layer, keys, values, after)
        if layer in self._resident:
            buffer = self._resident[layer]
            self._resident_lengths[layer] = after
        else:
            assert self.stream is not None
            buffer = self.stream.enter(layer)
        buffer[0, :, :, before:after] = keys
        buffer[1, :, :, before:after] = values
        if self.stream is not None:
            if layer not in self._resident:
                self.stream.commit(layer, after)
            self.stream.prefetch_after(layer)
        return buffer[0, :, :, :after], buffer[1, :, :, :after]

    def reorder(self, beams: torch.Tensor) -> None:
        """Sequence `i` becomes what sequence `beams[i]` was."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self.shape.scratch_bytes)
        for layer, buffer in self._resident.items():
            reorder_sequences(buffer, beams, self._resident_lengths[layer])
        if self.stream is not None:
            self.stream.reorder(beams)

    def crop(self, layer: int, length: int) -> None:
        """Forget all but the first `length` tokens of `layer`."""
        if layer in self._resident:
            self._resident_lengths[layer] = length
        else:
            assert self.stream is not None
            self.stream.crop(layer, length)

    def clear(self) -> None:
        """Forget every token; the memory stays for the next prompt."""
        self._resident_lengths = dict.fromkeys(self._resident, 0)
        if self.stream is not None:
            self.stream.clear()

    def close(self) -> None:
        """Give back what is in the store. Harmless when repeated."""
        if self.stream is not None:
            self.stream.close()

    def _require_fit(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, after: int
    ) -> None:
        shape = self.shape
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
