"""The image service: requests arrive, wait, and are denoised together, as many as memory allows.

A U-Net's step costs little more for several images than for one, so throughput is a matter of how
many fit: each image in flight takes its workspace from the device's memory, the same memory that
the producer lends from. That is what makes the service want its memory back when requests pile up,
and what it gains when it gets it.

Clients send at random, independent of each other (a Poisson process), and do not wait for answers.
Time comes from outside, in seconds, so that a test can run a minute in a moment.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np
import torch

from aqua_demo.programs.unet import NoiseSchedule, UNet
from aqua_demo.scale import DemoScale
from aqualib.engines.torch_loop import CountedMemoryLimit

MAX_BATCH: Final = 8
"""Images at once, at most: a wider batch gains nothing on a CPU core. Doubled, a burst is given the
same rate in larger steps."""

CALIBRATION_S: Final = 0.4
"""Seconds, long enough that a moment on a busy machine does not look like its speed. Doubled, the
start, which measures twice, takes 0.8 s longer."""

RATE_WINDOW_S: Final = 2.0
"""Seconds over which the rate of requests is taken, at least. Doubled, the informer sees a burst
later."""

RATE_WINDOW_REQUESTS: Final = 60
"""Requests to expect in the window, at least: the rate then varies by an eighth, and twice the mean
stands out. Doubled, it varies by an eleventh and bursts are seen later."""


class Arrivals:
    """Requests that arrive at random, and the rate at which they were seen to."""

    def __init__(self, per_s: float, *, seed: int, now_s: float) -> None:
        self.per_s = per_s  # The mean; may be set at any time and holds for all later arrivals.
        self.seen_per_s = 0.0  # Over the last seconds, from zero at the start.
        self._random = np.random.default_rng(seed)
        self._counts = deque([(now_s, 0)])
        self._window_s = max(RATE_WINDOW_S, RATE_WINDOW_REQUESTS / per_s)

    def due(self, now_s: float) -> int:
        """Count the requests that have arrived since the last call."""
        count = int(self._random.poisson(self.per_s * (now_s - self._counts[-1][0])))
        self._counts.append((now_s, count))
        while self._counts[0][0] < now_s - self._window_s:
            self._counts.popleft()
        # A rate over a shorter time than the window says little: until then it starts from zero.
        self.seen_per_s = sum(each for _, each in self._counts) / self._window_s
        return count


class ImageService:
    """The service's loop, one denoising step at a time; counts images, and requests that wait."""

    def __init__(
        self, scale: DemoScale, memory: CountedMemoryLimit, device: torch.device, *, seed: int
    ) -> None:
        self._scale = scale
        self._memory = memory
        torch.manual_seed(seed)
        self._model = UNet(scale.unet_channels).eval().to(device)
        self._schedule = NoiseSchedule(scale.image_steps, device)
        self._noise = torch.Generator(device).manual_seed(seed)
        self._shape = (3, scale.image_side, scale.image_side)
        self._latents = torch.empty((0, *self._shape), device=device)
        self._at = torch.empty(0, dtype=torch.long, device=device)
        self.queue_length = 0
        self.most_waiting = 10_000  # Requests beyond are turned away; by default, minutes of them.
        self.images = 0
        self.weight_bytes: Final = sum(p.nbytes for p in self._model.parameters())
        assert memory.try_take(self.weight_bytes), f"{self.weight_bytes} bytes of weights"

    @property
    def batch(self) -> int:
        """The number of images being denoised."""
        return len(self._at)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a request arrives."""
        return not self.queue_length and not self.batch

    def request(self, count: int) -> None:
        """Take in new requests, as many as may wait."""
        self.queue_length = min(self.most_waiting, self.queue_length + count)

    def step(self) -> None:
        """Take up what fits, and denoise all images in flight by one step."""
        self._take_up()
        if not self.batch:
            return
        with torch.inference_mode():
            self._latents = self._denoise(self._latents, self._at)
        self._at = self._at + 1
        going_on = self._at < self._scale.image_steps
        finished = self.batch - int(going_on.sum())
        if finished:
            self._latents, self._at = self._latents[going_on], self._at[going_on]
            self._memory.give_back(finished * self._scale.image_bytes)
            self.images += finished

    def images_per_s(self, batch: int) -> float:
        """Measured capacity with `batch` images at once; leaves no trace."""
        latents = torch.randn(
            (batch, *self._shape), device=self._latents.device, generator=self._noise
        )
        at = torch.zeros(batch, dtype=torch.long, device=latents.device)
        with torch.inference_mode():
            for _ in range(10):  # What torch sets up once is not measured.
                self._denoise(latents, at)
            step_count = 0
            started_s = time.perf_counter()
            while (elapsed_s := time.perf_counter() - started_s) < CALIBRATION_S:
                float(self._denoise(latents, at).sum())  # On a GPU: wait for the step.
                step_count += 1
        return batch * step_count / (self._scale.image_steps * elapsed_s)

    def _denoise(self, latents: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        noise = self._model(latents, self._schedule.steps[at])
        return self._schedule.denoise(latents, noise, at)

    def _take_up(self) -> None:
        new = 0
        while self.queue_length and self.batch + new < MAX_BATCH:
            if not self._memory.try_take(self._scale.image_bytes):
                break  # Lent or in use: the request waits.
            self.queue_length -= 1
            new += 1
        if new:
            device = self._latents.device
            fresh = torch.randn((new, *self._shape), device=device, generator=self._noise)
            self._latents = torch.cat([self._latents, fresh])
            self._at = torch.cat([self._at, torch.zeros(new, dtype=torch.long, device=device)])
