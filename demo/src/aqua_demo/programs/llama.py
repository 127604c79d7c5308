"""The language model: transformers' own Llama, small, with random weights from a seed.

Weights are drawn wider than usual: at the customary deviation of 0.02 a random Llama is nearly
indifferent between tokens, and the demo wants one that is swayed by every cached value.

The prompt is the Declaration of Independence of 1776, in the spelling of the engrossed parchment,
one token a byte: such a vocabulary needs no download and no training, and makes a text of eight
thousand characters a prompt of eight thousand tokens.

Only the programs that run the model import this: it takes three seconds of a processor.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from aqua_demo.scale import LlamaSize

WEIGHT_DEVIATION: Final = 0.1
"""Of the weights of the Llama, five times the customary 0.02. Doubled, its logits spread further,
and sampling depends on fewer of them."""


SPECIAL_WORDS: Final = ("<pad>", "<s>", "</s>")


class ByteVocabulary:
    """Bytes as tokens: 0, 1 and 2 pad, begin and end a sequence; 3 + b is the byte b."""

    pad_token_id: Final = 0
    bos_token_id: Final = 1
    eos_token_id: Final = 2
    special: Final = (pad_token_id, bos_token_id, eos_token_id)
    size: Final = 3 + 256


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of so many tokens, for servers that want one: each byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_WORDS, *letters])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_WORDS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def load_prompt(token_count: int) -> list[int]:
    """Read the first `token_count` tokens of the text, the one that begins a sequence included."""
    text = files("aqua_demo.programs").joinpath("texts/declaration.txt").read_bytes()
    tokens = [ByteVocabulary.bos_token_id, *(3 + byte for byte in text)][:token_count]
    assert len(tokens) == token_count, f"the text has only {len(tokens)} tokens"
    return tokens


def write_llama(folder: Path, size: LlamaSize, *, max_tokens: int, seed: int) -> None:
    """Write such a Llama and its tokenizer, for engines that read a model from disk."""
    transformers_logging.disable_progress_bar()  # It writes a file of some megabytes.
    build_llama(size, max_tokens=max_tokens, seed=seed).save_pretrained(folder)
    write_tokenizer(folder)


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
