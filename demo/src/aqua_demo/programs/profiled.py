"""The demo's two programs as `aqua-profile` runs them, without anything lent.

    aqua-profile run batch --program aqua_demo.programs.profiled:images_quick --model images ...
    aqua-profile run context --program aqua_demo.programs.profiled:llm_quick --model llm ...

The image service makes batches on its emulated device; the LLM reads prompts and says how large its
keys and values are. Both are the code that the demo runs.
"""

from __future__ import annotations

from functools import partial

import torch

from aqua_demo.programs.images import ImageService
from aqua_demo.scale import SCALES, DemoScale, compute_threads
from aqualib.engines.torch_loop import CountedMemoryLimit
from aqualib.producer.device import EmulatedMemory


class Images:
    """The image service, batch by batch."""

    def __init__(self, scale: DemoScale) -> None:
        torch.set_num_threads(compute_threads())
        self._scale = scale
        self._memory = EmulatedMemory(scale.memory_bytes)
        allowance = CountedMemoryLimit(self._memory, least_bytes=scale.memory_bytes)
        self._service = ImageService(scale, allowance, torch.device("cpu"), seed=0)
        self.total_bytes = scale.memory_bytes
        self.used_bytes = self._memory.used_bytes  # Highest use during the last batch.

    def run(self, size: int) -> None:
        """Make `size` images at once.

        Raises:
            MemoryError: Their workspaces do not fit the device.
        """
        if size * self._scale.image_bytes > self.total_bytes - self._memory.used_bytes:
            raise MemoryError(f"{size} images do not fit {self.total_bytes} bytes")
        self._service.request(size)
        self.used_bytes = 0
        while not self._service.is_idle:
            self._service.step()
            self.used_bytes = max(self.used_bytes, self._memory.used_bytes)


class Llm:
    """The LLM, prompt by prompt."""

    def __init__(self, scale: DemoScale) -> None:
        # Here: images are profiled without transformers, which takes seconds to import.
        from aqua_demo.programs.llama import build_llama

        torch.set_num_threads(compute_threads())
        self._model = build_llama(scale.llama, max_tokens=scale.max_tokens, seed=0)
        self.total_bytes = scale.budget_bytes
        self.used_bytes = 0  # By keys and values of the last prompt.

    def read(self, tokens: int) -> int:
        """Read a prompt; returns the bytes of its keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(torch.ones((1, tokens), dtype=torch.long), past_key_values=cache)
        self.used_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return self.used_bytes


# The factories that `--program` names, for `aqua-demo` and `aqua-demo --quick`.
images_full, images_quick = (partial(Images, SCALES[name]) for name in ("full", "quick"))
llm_full, llm_quick = (partial(Llm, SCALES[name]) for name in ("full", "quick"))
