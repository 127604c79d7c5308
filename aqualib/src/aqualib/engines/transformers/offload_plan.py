"""Which layers of a KV cache stay on the device, and which are paged.

Owns the arithmetic of `AquaCache`, and nothing else: no tensors, no threads.

A decoder visits its layers in the same order, over and over. For that pattern least-recently-used
is the worst policy there is: with room for all layers but one it evicts, every time, exactly the
layer that comes next. So the plan is fixed. Some layers are *resident* and never move; the others
are *offloaded* through two buffers, one being read by the attention of the present layer while the
next one fills. What moves per step is then the least that any policy can move, less one buffer.

Resident layers are spread evenly between the offloaded ones: while a resident layer computes, both
buffers can be filling, so the link keeps working.

Source: Aqua section 9.1, the FlexGen workload ("preempting the previous layer's context and loading
the next one"), which streams every layer; pinning is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from aqua_protocol import ConfigError, format_bytes

STREAM_BUFFERS: Final = 2
"""One that attention reads, one that fills. Doubled, copies run further ahead and
take the memory of two more layers."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values of one layer, at full length.

    `batch` counts sequences, beams included, `max_blocks` blocks of a sequence at full length;
    `head_dim` is the same for keys and values. A block, the unit of paging, has `block_tokens`.
    """

    batch: int
    heads: int
    head_dim: int
    element_bytes: int
    block_tokens: int
    max_blocks: int

    @property
    def rows(self) -> int:
        """Independent runs of tokens in one layer: keys and values of each head and sequence."""
        return 2 * self.batch * self.heads

    @property
    def max_tokens(self) -> int:
        """Capacity in tokens per sequence."""
        return self.max_blocks * self.block_tokens

    @property
    def block_bytes(self) -> int:
        """One block: `block_tokens` tokens of one head of the keys or values of one sequence."""
        return self.block_tokens * self.head_dim * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """One layer-sized buffer."""
        return self.rows * self.max_blocks * self.block_bytes

    @property
    def tail_bytes(self) -> int:
        """Room for the last, unfinished block of one offloaded layer."""
        return self.rows * self.block_bytes

    @property
    def scratch_bytes(self) -> int:
        """What reordering beams needs for a moment: one head of the keys or values."""
        return self.layer_bytes // (2 * self.heads)


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """A division of the layers, and what it costs on the device."""

    resident: tuple[int, ...]
    offloaded: tuple[int, ...]
    resident_bytes: int

    def upcoming(self, layer: int) -> Iterator[int]:
        """Streamed layers in the order they are needed after `layer`, once around."""
        later = [other for other in self.offloaded if other > layer]
        return iter(later + [other for other in self.offloaded if other <= layer])


def require_one_limit(budget_bytes: int | None, resident_layers: int | None) -> None:
    """Check that one of the two is given, before there is a shape to plan for.

    Raises:
        ConfigError: None or both are.
    """
    if (budget_bytes is None) == (resident_layers is None):
        raise ConfigError(
            "a cache needs exactly one limit", remedy="Pass budget_bytes or resident_layers."
        )


def plan_offload(
    layer_count: int,
    shape: LayerShape,
    *,
    budget_bytes: int | None = None,
    resident_layers: int | None = None,
) -> OffloadPlan:
    """Pin as many layers as the limit allows.

    Args:
        layer_count: Layers of the model.
        shape: Of every layer.
        budget_bytes: Bytes that keys and values may occupy on the device.
        resident_layers: Layer-sized buffers that may exist, the two for streaming included.

    Raises:
        ConfigError: Not exactly one limit, or one too small to stream at all; the message says
            how much is needed.
    """
    require_one_limit(budget_bytes, resident_layers)
    full = _resident_bytes(layer_count, 0, shape)
    least = _resident_bytes(STREAM_BUFFERS, layer_count, shape)
    if resident_layers is not None:
        if resident_layers < min(STREAM_BUFFERS, layer_count):
            raise ConfigError(
                f"resident_layers is {resident_layers}, streaming needs {STREAM_BUFFERS} buffers",
                remedy=f"Pass resident_layers={STREAM_BUFFERS} or more.",
            )
        fits = resident_layers >= layer_count
        resident_count = layer_count if fits else resident_layers - STREAM_BUFFERS
    else:
        assert budget_bytes is not None
        if budget_bytes < min(full, least):
            raise ConfigError(
                f"{format_bytes(budget_bytes)} cannot hold two layers of {shape.max_tokens} tokens"
                f" ({format_bytes(shape.layer_bytes)} each) and {layer_count} unfinished blocks",
                remedy=f"Pass budget_bytes={min(full, least)} or more, or lower max_tokens.",
                needed_bytes=min(full, least),
                budget_bytes=budget_bytes,
            )
        # Pinning a layer costs its bytes and saves its tail; below `full` there is room for at
        # most all layers but three, so two buffers always have at least three layers to carry.
        per_resident = shape.layer_bytes - shape.tail_bytes
        fits = budget_bytes >= full
        resident_count = layer_count if fits else (budget_bytes - least) // per_resident
    offloaded_count = layer_count - resident_count
    offloaded = tuple(index * layer_count // offloaded_count for index in range(offloaded_count))
    resident = tuple(layer for layer in range(layer_count) if layer not in set(offloaded))
    buffers = resident_count if not offloaded else resident_count + STREAM_BUFFERS
    return OffloadPlan(resident, offloaded, _resident_bytes(buffers, offloaded_count, shape))


def _resident_bytes(buffers: int, tails: int, shape: LayerShape) -> int:
    return buffers * shape.layer_bytes + tails * shape.tail_bytes + shape.scratch_bytes
