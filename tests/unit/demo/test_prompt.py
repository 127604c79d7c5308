"""The demo's prompt and its byte-level tokens."""

from __future__ import annotations

import pytest

from aqua_demo.programs.llama import ByteVocabulary, load_prompt
from aqua_demo.scale import SCALES


@pytest.mark.parametrize("name", SCALES)
def test_the_text_is_long_enough_for_the_prompts(name: str) -> None:
    tokens = load_prompt(SCALES[name].prompt_tokens)
    assert len(tokens) == SCALES[name].prompt_tokens
    assert tokens[0] == ByteVocabulary.bos_token_id
    text = bytes(token - 3 for token in tokens[1:]).decode()
    assert text.startswith("In Congress, July 4, 1776.")


def test_every_token_is_in_the_vocabulary() -> None:
    tokens = load_prompt(8151)
    assert min(tokens) > ByteVocabulary.pad_token_id
    assert max(tokens) < ByteVocabulary.size


def test_asking_for_more_text_than_there_is_says_how_much_there_is() -> None:
    with pytest.raises(AssertionError, match="8151 tokens"):
        load_prompt(1_000_000)
