"""Decoders small enough to generate with in milliseconds, with weights that make caches matter.

The customary initialisation leaves a random model nearly indifferent to what it attends to, and a
test that compares logits would hardly notice a wrong key. These weights are drawn 25 times wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY: Final = 97
LAYERS: Final = 6

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(**changes: Any) -> LlamaForCausalLM:  # noqa: ANN401 - any field of its configuration
    """Two key/value heads for four heads."""
    return _seeded(
        lambda: LlamaForCausalLM(LlamaConfig(**{**_COMMON, "num_key_value_heads": 2, **changes}))
    )


def qwen2() -> Qwen2ForCausalLM:
    """As Llama, with biases on queries, keys and values."""
    return _seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**_COMMON, num_key_value_heads=2)))


def gpt_neox() -> GPTNeoXForCausalLM:
    """A key/value head for each head, rotary on part of it, attention beside the MLP."""
    return _seeded(lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_COMMON)))


def prompt(batch: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs for `generate`; in a batch the first sequence is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, :5] = 0
        mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _seeded(build: Callable[[], Any]) -> Any:  # noqa: ANN401 - whichever model it builds
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()
