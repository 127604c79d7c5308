"""Time of one engine iteration: linear operators, attention, communication, host.

An iteration processes `T` tokens at once, one per decoding request and chunks of prompts, in

    layers x (linear(T) + prefill attention + decode attention + 2 all-reduces) + embedding, head

and one host overhead, the only number that is calibrated on a real run. Three ways to the parts,
best first:

- `from_kernels`: one model's own tables (LLMServingSim): operators, mixed attention, head.
- `from_operators`: a profiled model's linear operators (Vidur) with a GPU's attention surfaces and
  all-reduce curves (aiconfigurator).
- `from_shapes`: any model, its matrices looked up in the GPU's GEMM surface.

Without any profile, `from_data_sheet` gives a roofline, far less exact.

What is not modelled: pipeline parallelism, mixture of experts, quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from aqua_protocol.decoders import BYTES_PER_VALUE, DecoderModel
from aqua_protocol.hardware import GpuModel
from aqua_simulator.timing.fit import Fit

LINEAR_OPERATORS: Final = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj"),
    *("add", "add"),
)
"""Vidur's operators of one layer; the residual is added twice."""

KERNEL_OPERATORS: Final = (
    *("layernorm", "qkv_proj", "rotary_emb", "o_proj"),
    *("layernorm", "gate_up_proj", "act_fn", "down_proj"),
)
"""LLMServingSim's operators of one layer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt in a step: `tokens` new ones after `context` cached ones."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What a step computes.

    Attributes:
        decoding_count: Requests that generate one token each.
        decode_context_tokens: Their contexts together.
        sampled_count: Requests that get a token in this step (decoding ones, finished prompts).
    """

    chunks: Sequence[Chunk]
    decoding_count: int
    decode_context_tokens: int
    sampled_count: int

    @property
    def tokens(self) -> int:
        """Tokens that pass the linear operators."""
        return self.decoding_count + sum(chunk.tokens for chunk in self.chunks)

    @property
    def token_pairs(self) -> float:
        """Pairs of tokens that attend in prompts."""
        pairs = (chunk.tokens * (chunk.context + chunk.tokens / 2) for chunk in self.chunks)
        return sum(pairs, 0.0)


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Seconds of a step, from parts that are each a function.

    Attributes:
        linear: Tokens -> seconds of all layers' linear operators and collectives.
        attention: ScheduledBatch -> seconds of all layers' attention.
        head: Sampled requests -> seconds of head and sampler.
        overhead_s: Host time per step that nothing hides.
    """

    name: str
    linear: Callable[[int], float]
    attention: Callable[[ScheduledBatch], float]
    head: Callable[[int], float]
    overhead_s: float = 0.0

    def __call__(self, batch: ScheduledBatch) -> float:
        """Time of the whole step."""
        gpu_s = self.linear(batch.tokens) + self.attention(batch) + self.head(batch.sampled_count)
        return gpu_s + self.overhead_s


def from_kernels(fit: Fit, gpu: str, model_key: str, model: DecoderModel) -> IterationTime:
    """Take the times from one model's own kernel tables, on one GPU.

    Raises:
        ConfigError: The fit lacks one of them.
    """
    prefix = f"{gpu}/{model_key}/tp1"
    operators = [fit[f"{prefix}/{name}"] for name in KERNEL_OPERATORS]
    once = [fit[f"{prefix}/{name}"] for name in ("embedding", "final_layernorm")]
    per_sequence = [fit[f"{prefix}/{name}"] for name in ("lm_head", "sampler")]
    mixed = fit[f"{prefix}/mixed_attention"]

    @lru_cache(maxsize=1 << 16)
    def linear(tokens: int) -> float:
        layer = sum(operator.at(tokens) for operator in operators)
        return model.layer_count * layer + sum(operator.at(tokens) for operator in once)

    @lru_cache(maxsize=1 << 16)
    def head(sampled: int) -> float:
        return sum(operator.at(sampled) for operator in per_sequence) if sampled else 0.0

    def attention(batch: ScheduledBatch) -> float:
        new = sum(chunk.tokens for chunk in batch.chunks)
        # One kernel call for all chunks: tokens add up, and so do the token pairs they attend to.
        pairs = sum(chunk.tokens * chunk.context for chunk in batch.chunks)
        decoding = batch.decoding_count
        mean = batch.decode_context_tokens / decoding if decoding else 0.0
        if not new and not decoding:
            return 0.0
        # On a grid of 2 %: far below the tables' error, and steps repeat.
        point = (new, _rounded(pairs / new if new else 0.0), decoding, _rounded(mean))
        return model.layer_count * mixed.at(*point)

    return IterationTime(f"{model.name} on {gpu}", linear, attention, head)


def _rounded(tokens: float) -> float:
    """Three significant binary digits after the first six: a grid of about 2 %."""
    if tokens < 64:  # noqa: PLR2004 - exact below
        return float(round(tokens))
    step = 1 << (int(tokens).bit_length() - 6)
    return float(round(tokens / step) * step)


def from_operators(
    fit: Fit, gpu: str, model_key: str, model: DecoderModel, *, width: int = 1
) -> IterationTime:
    """Take the times from a profiled model's operators and a GPU's attention and all-reduce.

    Args:
        gpu, model_key: As in the file names, for example `a100` and `Meta-Llama-3-8B`.
        width: Tensor-parallel GPUs; one of those profiled.

    Raises:
        ConfigError: The fit lacks one of them.
    """
    prefix = f"{gpu}/{model_key}/tp{width}"
    operators = [fit[f"{prefix}/{name}"] for name in LINEAR_OPERATORS]
    embedding = fit[f"{prefix}/emb"]

    @lru_cache(maxsize=1 << 16)
    def linear(tokens: int) -> float:
        layer = sum(operator.at(tokens) for operator in operators)
        layer += _all_reduce_s(fit, gpu, model, width, tokens)
        return model.layer_count * layer + embedding.at(tokens)

    def head(_sampled: int) -> float:
        # Vidur profiles no head: its weights once per step, at the rate of the largest matrix.
        share = model.vocabulary_size / (2.0 * model.mlp_size)
        return share * fit[f"{prefix}/mlp_up_proj"].at(max(1, _sampled))

    attention = _split_attention(fit, gpu, model, width)
    return IterationTime(f"{model.name} on {width} x {gpu}", linear, attention, head)


def from_shapes(fit: Fit, gpu: str, model: DecoderModel, *, width: int = 1) -> IterationTime:
    """Look an unprofiled model's matrices up in the GPU's GEMM surface.

    Element-wise operators are not in the tables; they are left out, about a tenth at small batches.

    Raises:
        ConfigError: The fit has no GEMM or attention surface of the GPU.
    """
    gemm = fit[f"{gpu}/gemm"]
    heads, kv_heads = model.head_count // width, max(1, model.kv_head_count // width)
    matrices = (
        ((heads + 2 * kv_heads) * model.head_size, model.hidden_size),
        (model.hidden_size, heads * model.head_size),
        (2 * model.mlp_size // width, model.hidden_size),
        (model.hidden_size, model.mlp_size // width),
    )

    @lru_cache(maxsize=1 << 16)
    def linear(tokens: int) -> float:
        layer = sum(gemm.at(tokens, out, into) for out, into in matrices)
        return model.layer_count * (layer + _all_reduce_s(fit, gpu, model, width, tokens))

    @lru_cache(maxsize=1 << 16)
    def head(sampled: int) -> float:
        vocabulary = model.vocabulary_size // width
        return gemm.at(sampled, vocabulary, model.hidden_size) if sampled else 0.0

    attention = _split_attention(fit, gpu, model, width)
    return IterationTime(f"{model.name} on {width} x {gpu}", linear, attention, head)


COMPUTE_SHARE: Final = 0.65
"""Of the data sheet's peak that linear layers reach: 198 to 206 of 312 TFLOPS (Vidur, A100). It
cannot be doubled: no kernel is faster than the sheet."""

BANDWIDTH_SHARE: Final = 0.77
"""Of the data sheet's bandwidth: the layers of Llama-3-8B take 9.1 ms for one token on an A100, 7.0
ms by the sheet (Vidur). It cannot be doubled."""

ROOFLINE_EXPONENT: Final = 1.5
"""How sharp the bend of the roofline is: between the two exponents fitted to Vidur's A100 tables,
1.28 and 1.76. Doubled, steps at the bend come out a fifth faster."""


def from_data_sheet(gpu: GpuModel, model: DecoderModel, *, width: int = 1) -> IterationTime:
    """Assume a roofline of the data sheet with the shares above, without any profile.

    Good for "does it fit, roughly how fast": linear layers are within a few percent where the
    shares were measured, attention is a quarter off, and other GPUs reach other shares.
    """
    bytes_per_s = width * gpu.hbm_bytes_per_s * BANDWIDTH_SHARE
    flops_per_s = width * gpu.flops_per_s * COMPUTE_SHARE
    head_parameters = model.vocabulary_size * model.hidden_size
    layer_parameters = model.parameter_count - 2 * head_parameters
    floor_s = layer_parameters * BYTES_PER_VALUE / bytes_per_s
    per_token_s = 2.0 * layer_parameters / flops_per_s
    pair_s = 4.0 * model.head_count * model.head_size * model.layer_count / flops_per_s

    def linear(tokens: int) -> float:
        power = ROOFLINE_EXPONENT
        return float((floor_s**power + (per_token_s * tokens) ** power) ** (1.0 / power))

    def attention(batch: ScheduledBatch) -> float:
        read = batch.decode_context_tokens + sum(chunk.context for chunk in batch.chunks)
        return read * model.kv_bytes_per_token / bytes_per_s + batch.token_pairs * pair_s

    def head(sampled: int) -> float:
        return head_parameters * BYTES_PER_VALUE / bytes_per_s if sampled else 0.0

    return IterationTime(
        f"{model.name} on {width} x {gpu.name}, data sheet", linear, attention, head
    )


def _all_reduce_s(fit: Fit, gpu: str, model: DecoderModel, width: int, tokens: int) -> float:
    """Two all-reduces of a layer's output, one after attention and one after the MLP."""
    if width == 1:
        return 0.0
    message = float(tokens * model.hidden_size * BYTES_PER_VALUE)
    return 2.0 * fit[f"{gpu}/vllm_graph_all_reduce/{width}"].at(message)


def _split_attention(
    fit: Fit, gpu: str, model: DecoderModel, width: int
) -> Callable[[ScheduledBatch], float]:
    """Prefill and decode attention from surfaces that were measured apart."""
    prefill, decode = fit[f"{gpu}/prefill_attention"], fit[f"{gpu}/decode_attention"]
    heads, kv_heads = model.head_count / width, max(1.0, model.kv_head_count / width)

    def attention(batch: ScheduledBatch) -> float:
        seconds = 0.0
        for chunk in batch.chunks:
            end = _rounded(chunk.context + chunk.tokens)
            whole = prefill.at(1.0, end, heads, kv_heads)
            # Measured on whole prompts: a chunk is its share of the token pairs.
            share = (end**2 - chunk.context**2) / end**2 if chunk.context else 1.0
            seconds += whole * max(0.0, share)
        if batch.decoding_count:
            mean = _rounded(batch.decode_context_tokens / batch.decoding_count)
            seconds += decode.at(batch.decoding_count, mean, heads, kv_heads)
        return model.layer_count * seconds

    return attention
