"""OpenAI event streams: which lines are tokens, which end an answer, which are nonsense.

Pure, line by line. A piece of text counts as one token, as a user sees it, even where an engine
packs several tokens into a piece; the usage that the server reports says how many there were.

Source: the completions and chat completions endpoints as vLLM and OpenAI stream them.
"""

from __future__ import annotations

import json
from typing import Any, Final

from aqua_profiler.errors import EndpointGarbledError, EndpointRefusedError

SHOWN: Final = 200
"""Characters of an answer that an error quotes, chosen by hand. Doubled, errors fill a screen."""


class AnswerStream:
    """One answer on its way in.

    Attributes:
        tokens: Pieces of text so far.
        is_finished: The server said that the answer is complete.
        prompt_tokens: As the server counts, once it has said so.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.is_finished = False
        self.prompt_tokens: int | None = None
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Take bytes; returns how many new pieces of text were in them.

        Raises:
            EndpointGarbledError: Not an OpenAI event stream.
            EndpointRefusedError: The server reports an error within the stream.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        before = self.tokens
        for line in lines:
            self._line(line.strip())
        return self.tokens - before

    def end(self) -> None:
        """The connection has been closed in order.

        Raises:
            EndpointGarbledError: The answer is cut off, or had no token.
        """
        if self._rest.strip():
            self._line(self._rest.strip())
        if not self.is_finished:
            raise EndpointGarbledError(f"an answer ended after {self.tokens} tokens without [DONE]")
        if not self.tokens:
            raise EndpointGarbledError("an answer was complete without a single token")

    def _line(self, line: bytes) -> None:
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return
        if not line.startswith(b"data:"):
            raise EndpointGarbledError(f"a line of the stream is no event: {_shown(line)}")
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise EndpointGarbledError(f"an event is not JSON: {_shown(data)}") from None
        if not isinstance(event, dict):
            raise EndpointGarbledError(f"an event is no object: {_shown(data)}")
        if event.get("error"):
            raise EndpointRefusedError(f"the endpoint broke off an answer: {_shown(data)}")
        self._event(event, data)

    def _event(self, event: dict[str, Any], data: bytes) -> None:
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise EndpointGarbledError(f"an event has no choices: {_shown(data)}")
        usage = event.get("usage")
        if isinstance(usage, dict):
            count = usage.get("prompt_tokens")
            self.prompt_tokens = count if isinstance(count, int) else None
        for choice in choices:
            if not isinstance(choice, dict):
                raise EndpointGarbledError(f"a choice is no object: {_shown(data)}")
            ended = choice.get("finish_reason") is not None
            self.is_finished |= ended
            # An engine may pack a whole short answer into its end, and show no text of it: bytes
            # of a broken character. It is an answer all the same.
            self.tokens += _is_token(choice, ended=ended) or (ended and not self.tokens)


def _is_token(choice: dict[str, Any], *, ended: bool) -> bool:
    """A piece of text, also an empty one in mid-stream: part of a character is a token too."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        return bool(text) or not (ended or "role" in delta)
    return bool(choice.get("text")) or ("text" in choice and not ended)


def _shown(data: bytes) -> str:
    return repr(data[:SHOWN].decode(errors="replace"))
