"""GPUs and models that the simulator knows by name, each number with its source.

A GPU is its data sheet: peak dense FP16/BF16 rate, HBM size and bandwidth, link rates. What a
kernel reaches of them is the business of a fit, not of this table. A model is the shape of its
transformer; any Hugging Face `config.json` of the Llama family becomes one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aqua_protocol.errors import ConfigError

BYTES_PER_VALUE: Final = 2
"""FP16 and BF16: what every source here measured."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a tensor-parallel group seen as one.

    Attributes:
        flops_per_s: Dense FP16/BF16 tensor-core peak.
        hbm_bytes: Memory size, decimal as on the data sheet.
        hbm_bytes_per_s: Memory bandwidth.
        nvlink_bytes_per_s: To all peers together, one direction.
        pcie_bytes_per_s: To the host, one direction.
        source: Where the numbers come from.
    """

    name: str
    flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Attributes:
        kv_head_count: Heads of keys and values; equal to `head_count` without grouping.
        parameter_count: All weights; half of the floating-point operations of one token.
        source: Where the shape comes from.
    """

    name: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    mlp_size: int
    vocabulary_size: int
    parameter_count: int
    source: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.kv_head_count * self.head_size * self.layer_count * BYTES_PER_VALUE

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameter_count * BYTES_PER_VALUE


_NVIDIA: Final = "NVIDIA data sheet"

GPUS: Final[dict[str, Gpu]] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 312e12, 40 * 10**9, 1.555e12, 300e9, 32e9, f"{_NVIDIA} A100 SXM4 40GB"),
        # BlendServe's Figure 5 (densities 3.73 and 0.094) comes out with 2.0 TB/s, not 2.039.
        Gpu("A100-80GB", 312e12, 80 * 10**9, 2.0e12, 300e9, 32e9, f"{_NVIDIA} A100 SXM4 80GB"),
        Gpu("H100-80GB", 989e12, 80 * 10**9, 3.35e12, 450e9, 64e9, f"{_NVIDIA} H100 SXM5"),
        Gpu("H200", 989e12, 141 * 10**9, 4.8e12, 450e9, 64e9, f"{_NVIDIA} H200 SXM"),
        Gpu("RTX4090", 165e12, 24 * 10**9, 1.008e12, 0.0, 32e9, "NVIDIA Ada whitepaper, RTX 4090"),
    )
}


def _llama(name: str, shape: tuple[int, ...], source: str) -> Model:
    layers, hidden, heads, kv_heads, mlp, vocabulary = shape
    return _shaped(name, layers, hidden, heads, kv_heads, hidden // heads, mlp, vocabulary, source)


def _shaped(  # noqa: PLR0913, PLR0917 - the fields of a config, in its order
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    mlp: int,
    vocabulary: int,
    source: str,
    *,
    tied: bool = False,
) -> Model:
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    per_layer = attention + 3 * hidden * mlp + 2 * hidden
    embeddings = (1 if tied else 2) * vocabulary * hidden
    return Model(
        name=name,
        layer_count=layers,
        hidden_size=hidden,
        head_count=heads,
        kv_head_count=kv_heads,
        head_size=head_size,
        mlp_size=mlp,
        vocabulary_size=vocabulary,
        parameter_count=layers * per_layer + embeddings + hidden,
        source=source,
    )


_CONFIG: Final = "config.json of"

MODELS: Final[dict[str, Model]] = {
    model.name: model
    for model in (
        _llama(
            "Llama-2-7B", (32, 4096, 32, 32, 11008, 32000), f"{_CONFIG} meta-llama/Llama-2-7b-hf"
        ),
        _llama(
            "Llama-2-70B", (80, 8192, 64, 8, 28672, 32000), f"{_CONFIG} meta-llama/Llama-2-70b-hf"
        ),
        _llama(
            "Llama-3-8B", (32, 4096, 32, 8, 14336, 128256), f"{_CONFIG} meta-llama/Meta-Llama-3-8B"
        ),
        _llama(
            "Llama-3-70B",
            (80, 8192, 64, 8, 28672, 128256),
            f"{_CONFIG} meta-llama/Meta-Llama-3-70B",
        ),
        _llama(
            "Llama-3.1-8B", (32, 4096, 32, 8, 14336, 128256), f"{_CONFIG} meta-llama/Llama-3.1-8B"
        ),
        _llama(
            "Llama-3.1-70B", (80, 8192, 64, 8, 28672, 128256), f"{_CONFIG} meta-llama/Llama-3.1-70B"
        ),
        _llama(
            "Mistral-7B", (32, 4096, 32, 8, 14336, 32000), f"{_CONFIG} mistralai/Mistral-7B-v0.1"
        ),
        _llama("Qwen3-8B", (36, 4096, 32, 8, 12288, 151936), f"{_CONFIG} Qwen/Qwen3-8B"),
        _llama("Yi-34B", (60, 7168, 56, 8, 20480, 64000), f"{_CONFIG} 01-ai/Yi-34B"),
        _shaped("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, f"{_CONFIG} Qwen/Qwen3-32B"),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ConfigError: Unknown name.
    """
    if name not in GPUS:
        raise ConfigError(f"no GPU named {name!r}", remedy=f"Known: {', '.join(GPUS)}.")
    return GPUS[name]


def model_named(name: str) -> Model:
    """The model of that name, or of that Hugging Face folder or `config.json`.

    Raises:
        ConfigError: Neither a known name nor a readable configuration.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        remedy = f"Known: {', '.join(MODELS)}; or give a Hugging Face config.json."
        raise ConfigError(f"no model named {name!r}", remedy=remedy)
    return model_from_config(json.loads(path.read_text()), name=path.parent.name)


def model_from_config(config: dict[str, Any], *, name: str) -> Model:
    """A model from the keys of a Hugging Face `config.json`.

    Raises:
        ConfigError: A key that the shape needs is missing.
    """
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return _shaped(
            name,
            int(config["num_hidden_layers"]),
            hidden,
            heads,
            int(config.get("num_key_value_heads", heads)),
            int(config.get("head_dim") or hidden // heads),
            int(config["intermediate_size"]),
            int(config["vocab_size"]),
            f"{_CONFIG} {name}",
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        remedy = "Use the config.json of a Llama-like decoder (dense, gated MLP)."
        raise ConfigError(f"{name}: the configuration lacks {missing}", remedy=remedy) from missing


def as_group(gpu: Gpu, count: int) -> Gpu:
    """`count` GPUs that share every layer, seen as one: the paper's 8 x A100 of Figure 3."""
    return Gpu(
        name=f"{count}x{gpu.name}",
        flops_per_s=gpu.flops_per_s * count,
        hbm_bytes=gpu.hbm_bytes * count,
        hbm_bytes_per_s=gpu.hbm_bytes_per_s * count,
        nvlink_bytes_per_s=gpu.nvlink_bytes_per_s,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s,
        source=gpu.source,
    )
