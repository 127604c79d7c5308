"""Prompts as token ids: a Hugging Face folder, a tiktoken name, or bytes.

The plan needs to know which prompts share how much of their beginning; the engine needs the very
same tokens, or what the plan calls shared is not. Without a tokenizer bytes serve for planning: a
shared prefix of bytes is one of tokens too, only the counts are off, by about four bytes a token
in English. A tokenizer that stands in says so (`Tokenizer.exact`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from aqua_batch.bodies import CHAT_URL, prompt_parts
from aqua_protocol.errors import ConfigError

logger = logging.getLogger("aqua_batch")

IMAGE_BYTES: Final = 4 * 576
"""For a plan: 576 tokens, an image of 336 x 336 in patches of 14, as LLaVA takes it. Doubled,
prompts with images count as longer, and so as more compute-bound."""

BYTES: Final = "bytes"
"""The name of the fallback."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns a request's body into token ids.

    Attributes:
        name: For reports.
        text: Token ids of a completion prompt.
        template: Token ids of a chat with the turn of the assistant begun; None where no template
            is known, and roles and contents are written line by line.
    """

    name: str
    text: Callable[[str], list[int]]
    template: Callable[[list[Mapping[str, Any]], list[Any] | None], list[int]] | None = None

    @property
    def exact(self) -> bool:
        """Whether these are the engine's tokens."""
        return self.name != BYTES

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> list[int]:
        """Token ids of a chat, and of the tools that it may use.

        Raises:
            ValueError: The chat template refuses the messages.
        """
        if self.template is None:
            return self.text(plain_chat(messages, tools))
        try:
            return self.template(list(messages), tools)
        except Exception as error:  # Templates are programs: they raise what they like.
            raise ValueError(f"the chat template refuses the messages: {error}") from error


BYTE_TOKENIZER: Final = Tokenizer(BYTES, lambda text: list(text.encode(errors="surrogatepass")))
"""UTF-8 bytes as tokens."""


def prompt_tokens(tokenizer: Tokenizer, url: str, body: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of each prompt of a checked request.

    Raises:
        ValueError: The chat template refuses the messages.
    """
    if url == CHAT_URL:
        return [tokenizer.chat(_as_texts(body["messages"]), body.get("tools"))]
    return [
        tokenizer.text(prompt) if isinstance(prompt, str) else prompt
        for prompt in prompt_parts(body["prompt"])
    ]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: A folder with a Hugging Face tokenizer, the name ("owner/name") of one in the Hugging
            Face cache of this machine, a tiktoken encoding or model, or "bytes".

    Raises:
        ConfigError: Neither is there, or its library is not installed.
    """
    if name == BYTES:
        return BYTE_TOKENIZER
    if Path(name).is_dir() or (name.count("/") == 1 and name[0] not in "./~"):
        return _from_transformers(name)
    if "/" in name or name.startswith("."):
        raise ConfigError(
            f"no tokenizer folder {name!r}",
            remedy="Give a folder with tokenizer.json, a tiktoken name, or 'bytes'.",
        )
    return _from_tiktoken(name)


def plain_chat(messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None) -> str:
    """Messages as text, where no template is known: tools, roles and contents, line by line."""
    lines = [f"{json.dumps(tool)}\n" for tool in tools or ()]
    lines += [f"{message['role']}: {_text_of(message.get('content'))}\n" for message in messages]
    return "".join(lines) + "assistant:"


def _as_texts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose contents are plain texts.

    Most templates print the content as it comes: a list of parts would be in the prompt as Python
    writes lists.
    """
    return [
        {**message, "content": _text_of(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _text_of(content: object) -> str:
    """The text of a message, parts joined as vLLM does, with a stand-in for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = cast("list[dict[str, Any]]", content)
    return "\n".join(part["text"] if part["type"] == "text" else _stand_in(part) for part in parts)


def _stand_in(part: Mapping[str, Any]) -> str:
    """A text about as long as an image in an engine, the same for the same image alone."""
    name = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).hexdigest()
    tag = f"<{part['type']} {name}>"
    return (tag * (IMAGE_BYTES // len(tag) + 1))[:IMAGE_BYTES]


def _from_transformers(name: str) -> Tokenizer:
    """What transformers finds on this machine; nothing is downloaded, which could take for ever."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{name} is a Hugging Face tokenizer, and transformers is not installed",
            remedy="pip install 'aqua-batch[transformers]'",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer {name!r}, as a folder or in this machine's Hugging Face cache, that "
            f"transformers can read: {error}",
            remedy="Give the folder that has tokenizer.json; `hf download` fills the cache.",
        ) from error

    def chat(messages: list[Mapping[str, Any]], tools: list[Any] | None) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        # It brings its own special tokens.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    if not getattr(tokenizer, "chat_template", None):
        logger.warning("%s has no chat template: chats are written as 'role: content'", name)
        return Tokenizer(name, lambda text: list(tokenizer(text)["input_ids"]))
    return Tokenizer(name, lambda text: list(tokenizer(text)["input_ids"]), chat)


def _from_tiktoken(name: str) -> Tokenizer:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            f"no folder {name!r}, and tiktoken is not installed to look for an encoding",
            remedy="pip install 'aqua-batch[tiktoken]', or give a tokenizer folder or 'bytes'.",
        ) from error
    try:
        known = name in tiktoken.list_encoding_names()
        encoding = tiktoken.get_encoding(name) if known else tiktoken.encoding_for_model(name)
    except KeyError as error:
        raise ConfigError(
            f"unknown tokenizer {name!r}: no such folder, and tiktoken does not know it",
            remedy=f"tiktoken knows {', '.join(tiktoken.list_encoding_names())}; or use 'bytes'.",
        ) from error
    except OSError as error:  # requests' errors are OSErrors: it downloads the encoding once
        raise ConfigError(
            f"tiktoken could not load {name!r}: {error}",
            remedy="It downloads encodings on first use; or give a tokenizer folder, or 'bytes'.",
        ) from error
    # Special tokens in a text are text. OpenAI does not publish its chat templates.
    encode = encoding.encode
    return Tokenizer(f"tiktoken:{name}", lambda text: encode(text, disallowed_special=()))
