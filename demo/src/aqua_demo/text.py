"""The prompt: a long public-domain text, one token a byte.

The text is the Declaration of Independence of 1776, in the spelling of the engrossed parchment.
A byte-level vocabulary needs no download and no training, and makes a text of eight thousand
characters a prompt of eight thousand tokens.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from aqua_protocol import ConfigError


class PromptTokenizer:
    """Bytes as tokens, after three special ones.

    Tokens 0, 1 and 2 pad, begin and end a sequence; token 3 + b is the byte b.
    """

    pad_token_id: Final = 0
    bos_token_id: Final = 1
    eos_token_id: Final = 2
    vocab_size: Final = 3 + 256

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with the token that begins a sequence."""
        return [self.bos_token_id, *(3 + byte for byte in text.encode())]

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; special ones vanish, bytes that are not UTF-8 become U+FFFD."""
        return bytes(token - 3 for token in tokens if token >= 3).decode(errors="replace")  # noqa: PLR2004 - the special tokens


def load_prompt(token_count: int) -> list[int]:
    """The first `token_count` tokens of the text.

    Raises:
        ConfigError: The text is shorter.
    """
    text = files("aqua_demo").joinpath("texts/declaration.txt").read_text(encoding="utf-8")
    tokens = PromptTokenizer().encode(text)
    if token_count > len(tokens):
        raise ConfigError(
            f"the text has {len(tokens)} tokens, {token_count} were asked for",
            remedy=f"Ask for at most {len(tokens)} prompt tokens.",
        )
    return tokens[:token_count]
