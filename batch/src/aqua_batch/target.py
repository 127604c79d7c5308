"""The engine that a plan is made for: GPU, model, memory.

A plan needs ratios more than absolute times, so data-sheet numbers are good enough to order a
file; a measured engine can be described by its own numbers on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aqua_protocol.decoders import DECODERS, DecoderModel, read_config
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GpuModel, gpu_named
from aqua_schedulers.blendserve import ResourceCost

DEFAULT_MODEL: Final = DECODERS["Llama-3.1-8B"]
"""Fixed: the model of a plan that names none, the paper's, so that its numbers come out."""

RESERVED_BYTES: Final = 4 * 10**9
"""Activations and buffers beside weights and KV cache. With an 8B model this leaves 60 GB of an
A100 for the cache, as in the paper's Figure 5. Doubled, plans are made for 7 % less cache there."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What a plan is made for.

    Attributes:
        capacity_tokens: KV tokens that fit in memory.
        longest_tokens: Prompt and output that the model can hold; None where unknown.
    """

    gpu: GpuModel
    model: DecoderModel
    capacity_tokens: int
    longest_tokens: int | None

    @property
    def cost(self) -> ResourceCost:
        """Compute and memory coefficients by the data sheet."""
        return ResourceCost.of(self.model, self.gpu)


def describe(
    gpu_name: str,
    model_folder: Path | None,
    *,
    capacity_tokens: int | None = None,
    longest_tokens: int | None = None,
) -> PlanTarget:
    """The target of that GPU and model.

    Args:
        model_folder: A Hugging Face folder or config.json; None for Llama-3.1-8B.
        capacity_tokens: KV tokens, where they are known better than GPU minus weights.

    Raises:
        ConfigError: Unknown GPU, unreadable model, or a model that leaves no memory.
    """
    gpu, model = gpu_named(gpu_name), DEFAULT_MODEL
    if model_folder is not None:
        config = read_config(model_folder)
        folder = model_folder if model_folder.is_dir() else model_folder.parent
        model = DecoderModel.from_config(config, name=folder.name)
        longest_tokens = longest_tokens or config.get("max_position_embeddings")
    if capacity_tokens is None:
        free_bytes = gpu.hbm_bytes - model.weight_bytes - RESERVED_BYTES
        capacity_tokens = free_bytes // model.kv_bytes_per_token
        if capacity_tokens < 1:
            raise ConfigError(
                f"{model.name} leaves no memory for a KV cache on one {gpu.name}",
                remedy="Choose a larger GPU, or say --kv-tokens.",
            )
    return PlanTarget(gpu, model, capacity_tokens, longest_tokens)
