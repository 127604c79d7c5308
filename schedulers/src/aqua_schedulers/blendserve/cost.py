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

import numpy as np
from jaxtyping import Float64, Int64

from aqua_protocol.decoders import DecoderModel
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GpuModel


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

    @classmethod
    def of(cls, model: DecoderModel, gpu: GpuModel) -> ResourceCost:
        """The paper's coefficients for a model on a GPU of that peak rate and memory bandwidth."""
        return cls(
            linear_s_per_token=2.0 * model.parameter_count / gpu.flops_per_s,
            prefill_s_per_square_token=4.0
            * model.hidden_size
            * model.layer_count
            / gpu.flops_per_s,
            decode_s_per_kv_token=model.kv_bytes_per_token / gpu.hbm_bytes_per_s,
        )

    def compute_s(
        self,
        prompt_tokens: Int64[np.ndarray, " requests"] | float,
        output_tokens: Float64[np.ndarray, " requests"] | float,
    ) -> Float64[np.ndarray, " requests"]:
        """Comp(r), nothing shared; works element by element."""
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        linear = self.linear_s_per_token * (prompt + output_tokens)
        return np.asarray(linear + self.prefill_s_per_square_token * prompt * prompt)

    def memory_s(
        self,
        prompt_tokens: Int64[np.ndarray, " requests"] | float,
        output_tokens: Float64[np.ndarray, " requests"] | float,
    ) -> Float64[np.ndarray, " requests"]:
        """Mem(r); works element by element.

        The paper drops the `d/2` of the sum 1..d; we keep it, so that one output token reads
        `p + 1` and no request has zero memory time.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        output = np.asarray(output_tokens, dtype=np.float64)
        return np.asarray(
            self.decode_s_per_kv_token * (prompt * output + output * (output + 1) / 2)
        )

    def density(
        self,
        prompt_tokens: Int64[np.ndarray, " requests"] | float,
        output_tokens: Float64[np.ndarray, " requests"] | float,
    ) -> Float64[np.ndarray, " requests"]:
        """rho(r) = Comp(r) / Mem(r); above 1 a request is compute-bound."""
        return np.asarray(
            self.compute_s(prompt_tokens, output_tokens)
            / self.memory_s(prompt_tokens, output_tokens)
        )
