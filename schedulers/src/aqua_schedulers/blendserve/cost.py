"""Compute and memory time of a request, and their ratio: the compute density.

Two straight lines and a square, as in the paper: linear layers cost the same for every token,
prefill attention grows with the square of the prompt, decode attention reads the context once per
generated token. What one engine step really takes (floors, interference, host time) is the
simulator's or the engine's business; to *order* requests these three coefficients suffice.

Source: BlendServe section 2.3. With Llama-3.1-8B, 312 TFLOPS and 2.0 TB/s they give the densities
3.7 and 0.094 of Figure 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqua_protocol.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BYTES_PER_VALUE = 2
"""FP16 and BF16, for weights and for keys and values."""


@dataclass(frozen=True, slots=True)
class ResourceCost:
    """Seconds of compute-bound and of memory-bound operators.

    Attributes:
        linear_s_per_token: Linear layers, per token, prompt or output.
        prefill_s_per_square_token: Prefill attention of a prompt of p tokens is this x p^2.
        decode_s_per_kv_token: Decode attention, per token of context and generated token.
        linear_floor_s: What a step costs however few tokens it computes: reading the weights. Not
            part of the paper's densities; policies use it to avoid steps that waste it.
    """

    linear_s_per_token: float
    prefill_s_per_square_token: float
    decode_s_per_kv_token: float
    linear_floor_s: float = 0.0

    def __post_init__(self) -> None:
        if self.linear_s_per_token <= 0 or self.decode_s_per_kv_token <= 0:
            raise ConfigError("linear and decode coefficients must be positive")
        if self.prefill_s_per_square_token < 0 or self.linear_floor_s < 0:
            raise ConfigError("prefill_s_per_square_token and linear_floor_s must not be negative")

    def compute_s(self, prompt_tokens: Ints | float, output_tokens: Floats | float) -> Floats:
        """Comp(r), nothing shared; works element by element."""
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        linear = self.linear_s_per_token * (prompt + output_tokens)
        return np.asarray(linear + self.prefill_s_per_square_token * prompt * prompt)

    def memory_s(self, prompt_tokens: Ints | float, output_tokens: Floats | float) -> Floats:
        """Mem(r); works element by element.

        The paper drops the `d/2` of the sum 1..d; we keep it, so that one output token reads
        `p + 1` and no request has zero memory time.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        output = np.asarray(output_tokens, dtype=np.float64)
        return np.asarray(
            self.decode_s_per_kv_token * (prompt * output + output * (output + 1) / 2)
        )

    def density(self, prompt_tokens: Ints | float, output_tokens: Floats | float) -> Floats:
        """rho(r) = Comp(r) / Mem(r); above 1 a request is compute-bound."""
        return np.asarray(
            self.compute_s(prompt_tokens, output_tokens)
            / self.memory_s(prompt_tokens, output_tokens)
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost formulas need to know of a decoder.

    Attributes:
        parameter_count: All weights.
        kv_size: Width of the keys of one token and layer: KV heads x head size (H_kv).
    """

    name: str
    parameter_count: int
    layer_count: int
    hidden_size: int
    kv_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.kv_size * self.layer_count * BYTES_PER_VALUE

    @classmethod
    def from_config(cls, config: dict[str, Any], *, name: str) -> ModelShape:
        """The shape behind a Hugging Face `config.json` of a dense decoder with a gated MLP.

        Raises:
            ConfigError: A key that the shape needs is missing.
        """
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            layers, mlp = int(config["num_hidden_layers"]), int(config["intermediate_size"])
            vocabulary = int(config["vocab_size"])
        except KeyError as missing:
            raise ConfigError(
                f"{name}: the model configuration lacks {missing}",
                remedy="Use the config.json of a Llama-like decoder, or name a known model.",
            ) from missing
        head_size = int(config.get("head_dim") or hidden // heads)
        kv_size = int(config.get("num_key_value_heads", heads)) * head_size
        attention = 2 * hidden * (heads * head_size + kv_size)
        embeddings = (1 if config.get("tie_word_embeddings") else 2) * vocabulary * hidden
        weights = layers * (attention + 3 * hidden * mlp) + embeddings
        return cls(name, weights, layers, hidden, kv_size)

    def cost_on(self, flops_per_s: float, bytes_per_s: float) -> ResourceCost:
        """The coefficients on a GPU of that peak rate and memory bandwidth."""
        return ResourceCost(
            linear_s_per_token=2.0 * self.parameter_count / flops_per_s,
            prefill_s_per_square_token=4.0 * self.hidden_size * self.layer_count / flops_per_s,
            decode_s_per_kv_token=self.kv_bytes_per_token / bytes_per_s,
        )
