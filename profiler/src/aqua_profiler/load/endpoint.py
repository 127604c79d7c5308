"""An OpenAI-compatible endpoint over streaming HTTP, one request at a time.

Owns how a request of given lengths is put: a prompt of random common words, so that no two, of
this process or another, share a prefix that a cache could skip, scaled by what the server itself
counts; an exact length of output by `ignore_eos`, left out for servers that do not know it. And how
its answer is read: a piece of text counts as one token, as a user sees it, even where an engine
packs several tokens into a piece; the usage that the server reports says how many there were. And
the translation of what can go wrong into the errors of `errors`.

Not promised: prompts to the exact token. The server's own counts are in the profile.

aiohttp rather than httpx, which the rest of Aqua uses: its parser is C, and a piece of a stream
costs a tenth. At 50 requests/s httpx alone filled a core and was late.

Source: the completions and chat completions endpoints as vLLM and OpenAI stream them.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, Self

import aiohttp

from aqua_profiler.errors import (
    EndpointError,
    EndpointGarbledError,
    EndpointGoneError,
    EndpointRefusedError,
)
from aqua_protocol import ConfigError
from aqua_protocol.bearer import bearer_headers

SHOWN: Final = 200
"""Characters of an answer that an error quotes, chosen by hand. Doubled, errors fill a screen."""

CONNECT_TIMEOUT_S: Final = 10.0
"""Seconds to connect, and for pages beside the load; twice as many only delay the error."""

KEEPALIVE_S: Final = 2.0
"""Seconds that an idle connection is kept: servers close theirs after 5 and more (uvicorn), and one
that is about to be closed costs a request. At twice that it nearly would be."""

TOO_MANY, UNAVAILABLE, NOT_FOUND, BAD, UNPROCESSABLE = 429, 503, 404, 400, 422

WORDS: Final = tuple(
    (  # noqa: SIM905 - a list of them would take a page
        "the of and to in is you that it he was for on are as with his they at be this have from or"
        " one had by word but not what all were we when your can said there use an each which she"
        " do how their if will up other about out many then them these so some her would make like"
        " him into time has look two more write go see number no way could people my than first"
        " water been call who oil its now find long down day did get come made may part"
    ).split()
)
"""Common English: about one token each in vocabularies that people use."""

CONTEXT_SHARE: Final = 0.92
"""Share of an engine's context that a prompt and its answer may aim at: words differ in their
tokens, and one prompt too long would be an error. Chosen by hand; with twice the margin, more of
the long prompts are shortened."""


class ShedError(Exception):
    """The endpoint turned a request away because it has too much to do (429)."""


class Endpoint:
    """Where requests go.

    Args:
        url: Of the server, with or without `/v1`; the path of an operation there fixes which one.
        model: As the server calls it.
        token: A bearer token, if the server wants one.

    Attributes:
        words_per_token: Words of a prompt for one token of the wanted length.
        most_tokens: The engine's context, once it has said so.
        token_ids: Of what prompts are made where their lengths must be exact; None for words.
    """

    def __init__(self, url: str, model: str, token: str | None = None) -> None:
        base, path, _ = url.rstrip("/").partition("/chat/completions")
        self._is_chat, self._may_switch = bool(path), not base.endswith("/completions")
        self.url = base.removesuffix("/completions").removesuffix("/v1")
        self.model = model
        # What strict servers may not know; each is left out once one has refused it by name.
        self._optional: dict[str, Any] = {
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        self.words_per_token = 1.0
        self.most_tokens: int | None = None
        self.token_ids: Sequence[int] | None = None
        # Asked again, the same words would come out of a prefix cache.
        self._salt = secrets.token_hex(8)
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not a URL", remedy="Give http://host:port.")

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(_note_sent)
        self._session = aiohttp.ClientSession(
            headers=bearer_headers(self._token),
            # An idle connection that the server is about to close would cost a request.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # Whether an answer takes too long is decided for all requests together.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "an endpoint is a context manager"
        return self._session

    async def get(self, path: str) -> bytes | None:
        """What a side door of the server answers; None where it has none.

        Raises:
            EndpointError: There is no answer.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
            async with self._open.get(self.url + path, timeout=timeout) as answer:
                return await answer.read() if answer.ok else None
        except TimeoutError:
            return None
        except aiohttp.ClientError as error:
            raise _no_answer(error, self.url) from error

    async def served_model(self) -> str:
        """The first model that the server lists.

        Raises:
            EndpointError: It lists none.
        """
        try:
            page = json.loads(await self.get("/v1/models") or b"")
            name: str = page["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointGarbledError(
                f"{self.url} does not say which model it serves", remedy="Give --model."
            ) from error
        return name

    async def ask(
        self,
        prompt_tokens: int,
        output_tokens: int,
        seed: int,
        on_sent: Callable[[], None],
        on_token: Callable[[], None],
    ) -> int | None:
        """Send one request and read its answer; returns its prompt's tokens, if the server counts.

        Args:
            prompt_tokens: Length to aim at, with words by the seed.
            on_sent: Called when the request has been handed to the socket.
            on_token: Called for each piece of text as it arrives.

        Raises:
            ShedError: The endpoint is too busy.
            EndpointError: It failed.
        """
        while True:
            operation = "chat/completions" if self._is_chat else "completions"
            body = self._body(prompt_tokens, output_tokens, seed)
            url = f"{self.url}/v1/{operation}"
            try:
                async with self._open.post(url, json=body, trace_request_ctx=on_sent) as response:
                    if response.ok:
                        stream = AnswerStream()
                        async for data in response.content.iter_any():
                            for _ in range(stream.feed(data)):
                                on_token()
                        stream.end()
                        return stream.prompt_tokens
                    self._adapt(response, (await response.read()).decode(errors="replace"))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _no_answer(error, self.url) from error

    def _body(self, prompt_tokens: int, output_tokens: int, seed: int) -> dict[str, Any]:
        generator = random.Random(f"prompt {self._salt} {seed}")
        if self.most_tokens is not None:
            room = round(CONTEXT_SHARE * self.most_tokens) - output_tokens
            prompt_tokens = min(prompt_tokens, max(1, room))
        count = max(1, round(prompt_tokens * self.words_per_token))
        prompt: str | list[int] = " ".join(generator.choices(WORDS, k=count))
        if self.token_ids is not None:
            prompt = generator.choices(self.token_ids, k=prompt_tokens)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            **self._optional,
        }
        if self._is_chat:
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}

    def _adapt(self, response: aiohttp.ClientResponse, said: str) -> None:
        """After a refusal: put requests another way from now on, or raise."""
        status = response.status
        if status == TOO_MANY or (status == UNAVAILABLE and "Retry-After" in response.headers):
            raise ShedError
        if status == NOT_FOUND and self._may_switch and not self._is_chat:
            self._is_chat = True
            return
        refused = [name for name in self._optional if name in said]
        if status in {BAD, UNPROCESSABLE} and refused:
            for name in refused:
                del self._optional[name]
            return
        raise EndpointRefusedError(
            f"{response.url} answered {status}: {said[:SHOWN]!r}", status=status
        )


def _no_answer(error: aiohttp.ClientError | TimeoutError, url: str) -> EndpointError:
    """What a failed request says of the endpoint."""
    said = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL | TimeoutError):
        return EndpointGoneError(f"cannot connect to {url}: {said}", connecting=True)
    if isinstance(error, aiohttp.ClientResponseError):
        return EndpointGarbledError(f"{url} does not speak HTTP: {error.message or said}")
    return EndpointGoneError(f"{url} broke off an answer: {said}")


async def _note_sent(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()


class AnswerStream:
    """One answer on its way in: an OpenAI event stream, line by line.

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
