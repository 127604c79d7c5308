"""A Llama small enough for a CPU test, with real random weights and a tokenizer, on disk.

Random weights must be written: vLLM's dummy weights give degenerate outputs, and identical outputs
prove nothing. The tokenizer is byte-level, so any text has tokens and every byte counts once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

VOCABULARY_SIZE: Final = 320
ADAPTER_RANK: Final = 8

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<s>", "</s>", *letters])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def write_tiny_llama(folder: Path, *, seed: int = 0, hidden: int = 256, layers: int = 2) -> Path:
    """Write model and tokenizer to `folder` and return it; `hidden` is a multiple of 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_tiny_adapter(folder: Path, *, seed: int = 0, hidden: int = 256, layers: int = 2) -> Path:
    """Write a LoRA adapter of the tiny Llama to `folder` and return it; it changes all answers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    outputs = {"q_proj": hidden, "v_proj": 2 * 64}
    name = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"
    weights = {}
    for layer in range(layers):
        for module, width in outputs.items():
            weights[name.format(layer, module, "A")] = torch.randn(ADAPTER_RANK, hidden) / 16
            weights[name.format(layer, module, "B")] = torch.randn(width, ADAPTER_RANK) / 4
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": list(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
