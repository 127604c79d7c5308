"""The shapes of the decoder-only transformers that planners and simulators know by name.

A shape says how many weights a model has and how many bytes of keys and values a token leaves
behind; cost formulas need no more. Any Hugging Face `config.json` of the Llama family (dense,
gated MLP) becomes one. Not modelled: mixtures of experts, quantised weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aqua_protocol.errors import ConfigError

BYTES_PER_VALUE: Final = 2
"""FP16 and BF16, for weights, keys and values: what every source of our numbers measured. Doubled
(FP32), weights and KV cache take twice the memory and the bandwidth."""


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Attributes:
        kv_head_count: Heads of keys and values; equal to `head_count` without grouping.
        ties_embeddings: Whether the output layer is the input embedding.
    """

    name: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    mlp_size: int
    vocabulary_size: int
    ties_embeddings: bool = False

    @property
    def parameter_count(self) -> int:
        """All weights; half of the floating-point operations of one token."""
        attention = self.hidden_size * self.head_size * 2 * (self.head_count + self.kv_head_count)
        per_layer = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        embedding_count = 1 if self.ties_embeddings else 2
        embeddings = embedding_count * self.vocabulary_size * self.hidden_size
        return self.layer_count * per_layer + embeddings + self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.kv_head_count * self.head_size * self.layer_count * BYTES_PER_VALUE

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameter_count * BYTES_PER_VALUE

    @classmethod
    def from_config(cls, config: dict[str, Any], *, name: str) -> DecoderModel:
        """The shape behind the keys of a Hugging Face `config.json`.

        Raises:
            ConfigError: A key that the shape needs is missing.
        """
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                name,
                int(config["num_hidden_layers"]),
                hidden,
                heads,
                int(config.get("num_key_value_heads", heads)),
                int(config.get("head_dim") or hidden // heads),
                int(config["intermediate_size"]),
                int(config["vocab_size"]),
                ties_embeddings=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as missing:
            raise ConfigError(
                f"{name}: the model configuration lacks {missing}",
                remedy="Use the config.json of a Llama-like decoder (dense, gated MLP), or name a "
                "known model.",
            ) from missing


DECODERS: Final[dict[str, DecoderModel]] = {
    model.name: model
    for model in (
        # Layers, hidden size, heads, KV heads, head size, MLP size, vocabulary: each from the
        # `config.json` of that name's repository at Hugging Face (Mistral's is v0.1).
        DecoderModel("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
        DecoderModel("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
        DecoderModel("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        DecoderModel("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        DecoderModel("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        DecoderModel("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        DecoderModel("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000),
        DecoderModel("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
        DecoderModel("Yi-34B", 60, 7168, 56, 8, 128, 20480, 64000),
        DecoderModel("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    )
}


def read_config(path: Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder, or that file itself.

    Raises:
        ConfigError: There is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")  # noqa: TRY301, TRY004 - told like the others
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no readable model configuration: {error}",
            remedy="Give a Hugging Face model folder or its config.json.",
        ) from error
    return config


def decoder_named(name: str) -> DecoderModel:
    """The model of that name, or of that Hugging Face folder or `config.json`.

    Raises:
        ConfigError: Neither a known name nor a readable configuration.
    """
    if name in DECODERS:
        return DECODERS[name]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        remedy = f"Known: {', '.join(DECODERS)}; or give a Hugging Face config.json."
        raise ConfigError(f"no model named {name!r}", remedy=remedy)
    return DecoderModel.from_config(read_config(file), name=file.parent.name)
