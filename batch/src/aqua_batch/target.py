"""The engine that a plan is made for: GPU, model, memory.

A plan needs ratios more than absolute times, so data-sheet numbers are good enough to order a
file; a measured engine can be described by its own numbers on the command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve import ModelShape, ResourceCost


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of a data sheet.

    Attributes:
        flops_per_s: Dense FP16/BF16.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-80GB", 312e12, 2.0e12, 80 * 10**9),
        Gpu("H100-80GB", 989e12, 3.35e12, 80 * 10**9),
        Gpu("H200", 989e12, 4.8e12, 141 * 10**9),
        # A server core or two, by order of magnitude: for trying things out.
        Gpu("CPU", 5e10, 1e10, 4 * 10**9),
    )
}

LLAMA_8B: Final = ModelShape("Llama-3.1-8B", 8_030_261_248, 32, 4096, 1024)
"""Where no model is named: the paper's, so that its numbers come out."""

RESERVED_BYTES: Final = 4 * 10**9
"""Activations and buffers beside weights and KV cache. With an 8B model this leaves 60 GB of an
A100 for the cache, as in the paper's Figure 5."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What a plan is made for.

    Attributes:
        capacity_tokens: KV tokens that fit in memory.
        longest_tokens: Prompt and output that the model can hold; None where unknown.
    """

    gpu: Gpu
    model: ModelShape
    cost: ResourceCost
    capacity_tokens: int
    longest_tokens: int | None


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
    gpu = GPUS.get(gpu_name)
    if gpu is None:
        raise ConfigError(f"no GPU named {gpu_name!r}", remedy=f"Known: {', '.join(GPUS)}.")
    model = LLAMA_8B
    if model_folder is not None:
        path = model_folder / "config.json" if model_folder.is_dir() else model_folder
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"{path} is no readable model configuration: {error}",
                remedy="Give a Hugging Face model folder or its config.json.",
            ) from error
        model = ModelShape.from_config(config, name=path.parent.name)
        longest_tokens = longest_tokens or config.get("max_position_embeddings")
    if capacity_tokens is None:
        weights = model.parameter_count * 2
        free = gpu.memory_bytes - weights - RESERVED_BYTES
        capacity_tokens = free // model.kv_bytes_per_token
        if capacity_tokens < 1:
            raise ConfigError(
                f"{model.name} leaves no memory for a KV cache on one {gpu.name}",
                remedy="Choose a larger GPU, or say --kv-tokens.",
            )
    cost = model.cost_on(gpu.flops_per_s, gpu.bytes_per_s)
    return PlanTarget(gpu, model, cost, int(capacity_tokens), longest_tokens)
