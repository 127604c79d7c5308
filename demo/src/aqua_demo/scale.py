"""How large the demo is, in two sizes: one to watch, one to test with.

The full size takes about a minute and a half on two cores. What is fixed here are the proportions
that make the story true on any machine: the keys and values exceed the budget several times, the
offer holds all of them even when the image service keeps room for two images (a profile finds its
peak at one or at two at once, whichever the machine made a little faster that day), and one image's
workspace is what an idle image service spares.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

from aqua_protocol import MIB

WEIGHT_BYTES: Final = 1 * MIB
"""Room for the image model's weights. Doubled, a MiB less can be lent."""


def compute_threads() -> int:
    """Count threads for each model: the two run side by side, and sums depend on their split."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """Dimensions of the language model; float32, as many key/value heads as heads."""

    layers: int
    heads: int
    head_dim: int
    feed_forward: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DemoScale:
    """Sizes of one run."""

    llama: LlamaSize
    prompt_tokens: int  # Of the text that every request is about.
    answer_tokens: int  # New tokens for each request.
    budget_bytes: int  # What keys and values may occupy on the model's own device.
    slab_bytes: int  # Unit of lending and of reclaim; GPUs map memory in multiples of 2 MiB.
    memory_bytes: int  # The image service's device, emulated where there is no GPU.
    image_bytes: int  # Workspace of one image in flight on that device.
    harvest_tokens: int  # New tokens to see with the spare memory in use, before the burst.
    burst_tokens: int  # New tokens to see in host memory.
    again_tokens: int  # New tokens to see after the memory is back.
    spare_images: int = 1  # For which the service keeps room while it lends the rest.
    unet_channels: int = 8  # Width of the image model.
    image_side: int = 16  # Pixels.
    image_steps: int = 12  # Denoising steps of one image.
    quiet_load: float = 0.4  # Asked for at first, of the capacity left when all is lent.

    @property
    def max_tokens(self) -> int:
        """Tokens of text and answer together."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def kv_bytes(self) -> int:
        """Keys and values at the end of an answer."""
        return self.max_tokens * self.llama.kv_bytes_per_token

    @property
    def page_bytes(self) -> int:
        """What the cache takes of its store: the pages of every layer, in whole slabs.

        The budget pays for the two buffers through which layers are offloaded and leaves no room to
        keep one, so the store holds all keys and values, not only those beyond the budget.
        """
        # Here, because it imports transformers, which most of the demo's processes do without.
        from aqualib.engines.transformers.cache import DEFAULT_BLOCK_TOKENS

        llama = self.llama
        block_bytes = DEFAULT_BLOCK_TOKENS * 4 * llama.head_dim
        blocks = 2 * llama.layers * llama.heads * -(-self.max_tokens // DEFAULT_BLOCK_TOKENS)
        return -(-blocks // (self.slab_bytes // block_bytes)) * self.slab_bytes

    @property
    def offer_bytes(self) -> int:
        """What the image service can lend: all but its weights and room for `spare_images`."""
        spare = self.memory_bytes - WEIGHT_BYTES - self.spare_images * self.image_bytes
        return max(0, spare) // self.slab_bytes * self.slab_bytes


FULL: Final = DemoScale(
    llama=LlamaSize(layers=8, heads=8, head_dim=64, feed_forward=1024),
    prompt_tokens=3340,
    answer_tokens=500,
    budget_bytes=40 * MIB,
    slab_bytes=8 * MIB,
    memory_bytes=168 * MIB,
    image_bytes=20 * MIB,
    harvest_tokens=100,
    burst_tokens=80,
    again_tokens=80,
)

QUICK: Final = replace(
    FULL,
    llama=LlamaSize(layers=6, heads=4, head_dim=32, feed_forward=256),
    prompt_tokens=1360,
    answer_tokens=300,
    budget_bytes=5 * MIB,
    slab_bytes=2 * MIB,
    memory_bytes=16 * MIB,
    image_bytes=2 * MIB,
    harvest_tokens=60,
    burst_tokens=60,
    again_tokens=60,
)

SCALES: Final = {"full": FULL, "quick": QUICK}
