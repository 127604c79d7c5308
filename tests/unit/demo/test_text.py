"""The demo's prompt and its byte-level tokens."""

from __future__ import annotations

import pytest

from aqua_demo.scale import FULL, QUICK
from aqua_demo.text import PromptTokenizer, load_prompt
from aqua_protocol import ConfigError


def test_text_survives_encoding_and_decoding() -> None:
    tokenizer = PromptTokenizer()
    text = "Nature's God – naïve, 漢字, \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_is_in_the_vocabulary() -> None:
    tokens = PromptTokenizer().encode("".join(map(chr, range(256))))
    assert min(tokens) >= 0
    assert max(tokens) < PromptTokenizer.vocab_size


def test_bytes_that_are_no_text_decode_to_a_mark() -> None:
    assert PromptTokenizer().decode([3 + 0xFF, 3 + ord("a")]) == "\N{REPLACEMENT CHARACTER}a"


def test_the_text_is_long_enough_for_the_prompts() -> None:
    tokens = load_prompt(FULL.prompt_tokens)
    assert len(tokens) == FULL.prompt_tokens >= QUICK.prompt_tokens
    assert PromptTokenizer().decode(tokens).startswith("In Congress, July 4, 1776.")


def test_asking_for_more_text_than_there_is_says_how_much_there_is() -> None:
    with pytest.raises(ConfigError, match="8151 tokens"):
        load_prompt(1_000_000)
