"""The image model: a U-Net that predicts the noise in an image, and its sampling loop.

Source: Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020. The architecture is
real, in small; weights are random.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import nn
from torch.nn import functional

STEPS: Final = 1000
"""Steps from an image to noise, as in the paper. Doubled, each changes half as much."""


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
