"""The two models: real architectures in small, random weights from a seed.

The image model is a U-Net that predicts the noise in an image (Ho, Jain and Abbeel, "Denoising
Diffusion Probabilistic Models", 2020), with its sampling loop; the language model is transformers'
own Llama. Weights are drawn wider than usual: at the customary deviation of 0.02 a random Llama
is nearly indifferent between tokens, and the demo wants one that is swayed by every cached value.

The prompt is the Declaration of Independence of 1776, in the spelling of the engrossed parchment,
one token a byte: such a vocabulary needs no download and no training, and makes a text of eight
thousand characters a prompt of eight thousand tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from typing import Final, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

WEIGHT_DEVIATION: Final = 0.1
"""Of the weights of the Llama, five times the customary 0.02. Doubled, its logits spread further,
and sampling depends on fewer of them."""

STEPS: Final = 1000
"""Steps from an image to noise, as in the paper. Doubled, each changes half as much."""


def compute_threads() -> int:
    """Count threads for each model: the two run side by side, and sums depend on their split."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


class ByteVocabulary:
    """Bytes as tokens: 0, 1 and 2 pad, begin and end a sequence; 3 + b is the byte b."""

    pad_token_id: Final = 0
    bos_token_id: Final = 1
    eos_token_id: Final = 2
    special: Final = (pad_token_id, bos_token_id, eos_token_id)
    size: Final = 3 + 256


def load_prompt(token_count: int) -> list[int]:
    """Read the first `token_count` tokens of the text, the one that begins a sequence included."""
    text = files("aqua_demo").joinpath("texts/declaration.txt").read_bytes()
    tokens = [ByteVocabulary.bos_token_id, *(3 + byte for byte in text)][:token_count]
    assert len(tokens) == token_count, f"the text has only {len(tokens)} tokens"
    return tokens


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


def build_llama(size: LlamaSize, *, max_tokens: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ByteVocabulary.size,
        hidden_size=size.heads * size.head_dim,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=max_tokens,
        initializer_range=WEIGHT_DEVIATION,
        pad_token_id=ByteVocabulary.pad_token_id,
        bos_token_id=ByteVocabulary.bos_token_id,
        eos_token_id=ByteVocabulary.eos_token_id,
    )
    return cast("LlamaForCausalLM", LlamaForCausalLM(config).eval())


class UNet(nn.Module):
    """Predicts the noise in images, shape (batch, 3, side, side), at given steps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        step_dim = 4 * channels
        self._embed_step = nn.Embedding(STEPS, step_dim)
        self._enter = nn.Conv2d(3, channels, 3, padding=1)
        self._down = ResidualBlock(channels, 2 * channels, step_dim)
        self._attend = nn.MultiheadAttention(2 * channels, 4, batch_first=True)
        self._up = ResidualBlock(4 * channels, channels, step_dim)
        self._leave = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Noise in `images` at `steps`, shape (batch,)."""
        step = self._embed_step(steps)
        outer = self._enter(images)
        inner = self._down(functional.avg_pool2d(outer, 2), step)
        flat = inner.flatten(2).transpose(1, 2)
        attended, _ = self._attend(flat, flat, flat, need_weights=False)
        middle = attended.transpose(1, 2).reshape_as(inner)
        up = self._up(torch.cat([middle, inner], dim=1), step)
        up = functional.interpolate(up, scale_factor=2.0)
        return cast("torch.Tensor", self._leave(torch.cat([up, outer], dim=1)))


class ResidualBlock(nn.Module):
    """Two convolutions around a shift by the step, and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, step_dim: int) -> None:
        super().__init__()
        self._norm1 = nn.GroupNorm(4, channels_in)
        self._conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self._shift = nn.Linear(step_dim, channels_out)
        self._norm2 = nn.GroupNorm(4, channels_out)
        self._conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self._shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, images: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Shape (batch, channels_in, h, w) to (batch, channels_out, h, w)."""
        hidden = self._conv1(functional.silu(self._norm1(images)))
        hidden = hidden + self._shift(step)[:, :, None, None]
        hidden = self._conv2(functional.silu(self._norm2(hidden)))
        return cast("torch.Tensor", hidden + self._shortcut(images))


class NoiseSchedule:
    """The variances of the diffusion, linear in the step, and the way back."""

    def __init__(self, step_count: int, device: torch.device) -> None:
        betas = torch.linspace(1e-4, 0.02, STEPS, device=device)
        kept = torch.cumprod(1 - betas, dim=0)
        # Evenly spaced steps of them all, the noisiest first.
        self.steps = torch.linspace(STEPS - 1, 0, step_count, device=device).long()
        self._kept = kept[self.steps]
        self._kept_before = torch.cat([self._kept[1:], torch.ones(1, device=device)])

    def denoise(self, images: torch.Tensor, noise: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """One deterministic step back (Song, Meng and Ermon, DDIM, 2021), at positions `at`."""
        kept = self._kept[at][:, None, None, None]
        before = self._kept_before[at][:, None, None, None]
        clean = ((images - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        return before.sqrt() * clean + (1 - before).sqrt() * noise
