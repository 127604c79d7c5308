"""Models whose layers keep different things, small enough for a CPU test, with random weights.

Each stands for a family that people serve: what vLLM makes of its configuration (groups of blocks,
their sizes, their layout) is what it makes of the large one's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from harness.tiny_llama import VOCABULARY_SIZE, write_tokenizer

WINDOW_TOKENS: Final = 64
"""Two blocks of vLLM's attention for CPUs: the requests of a test outgrow it several times."""

WEIGHT_SPREAD: Final = 0.06
"""Standard deviation of weights: outputs neither repeat one token nor forget what was read."""

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEADS: Final = {"num_key_value_heads": 2, "head_dim": 64}


def _config(family: str) -> Any:  # noqa: ANN401 - transformers'
    import transformers

    if family == "gemma-3":  # Two windows to each full layer.
        return transformers.Gemma3TextConfig(
            **_COMMON,
            **_HEADS,
            num_hidden_layers=6,
            sliding_window=WINDOW_TOKENS,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
    if family == "gpt-oss":  # Windows and full layers in turn, attention sinks, experts.
        return transformers.GptOssConfig(
            **_COMMON,
            **_HEADS,
            num_hidden_layers=4,
            sliding_window=WINDOW_TOKENS,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    if family == "mistral":  # Windows alone.
        return transformers.MistralConfig(
            **_COMMON, **_HEADS, num_hidden_layers=2, sliding_window=WINDOW_TOKENS
        )
    if family == "deepseek-v2":  # Latent attention, of the size that vLLM's kernel for CPUs has.
        return transformers.DeepseekV2Config(
            **_COMMON,
            num_hidden_layers=2,
            first_k_dense_replace=2,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
        )
    if family == "granite-4":  # States of Mamba 2 and full layers in turn.
        return transformers.GraniteMoeHybridConfig(
            **_COMMON,
            num_key_value_heads=2,
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            position_embedding_type="rope",
            num_local_experts=0,
            shared_intermediate_size=256,
            mamba_n_heads=8,
            mamba_d_state=16,
        )
    raise ValueError(family)


def write_tiny_hybrid(folder: Path, family: str) -> Path:
    """Write a model of the family and its tokenizer to `folder` and return it."""
    import torch
    from transformers import AutoModelForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(family)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, WEIGHT_SPREAD)
    model.save_pretrained(folder)
    return folder
