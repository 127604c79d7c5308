"""A small OpenAI-compatible server that streams, for tests of those who load one.

Requests wait in line for a slot, read their prompt, then send a token every so often. From a given
request on it can fail, in the ways in which servers fail. It serves over TCP in real time, or on
the virtual clock of those who ask (`on_virtual_clock`): then a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from harness.bounds import HANG_S
from harness.virtual_time import VirtualTimeLoop, VirtualTimePolicy


class Fault(StrEnum):
    """How the server fails, from its `fails_from`-th request on."""

    DIES = "dies"
    STALLS = "stalls"
    ERRORS = "errors"
    GARBAGE = "garbage"
    CUTS_OFF = "cuts_off"
    SHEDS = "sheds"


@dataclass(frozen=True)
class Manners:
    """What the server is like.

    Attributes:
        slots: Requests served at once.
        prefill_s: Time to the first token of a request in a slot.
        token_s: Time for each further token.
        cache_tokens: Of its KV cache, told by `/metrics`; None for a server without metrics.
        cache_bytes: Likewise.
        fault: How it fails, if it does.
        fails_from: The first request that meets the fault.
        unknown: Options that it refuses by name, as strict servers do.
        word_tokens: Tokens of a word; 0 for a server that does not count them.
        limits: Of an engine that records its steps, as it tells them; None for one that does not.
        context_tokens: A prompt and its answer must fit; told by `/v1/models`. None for no limit.
    """

    slots: int = 8
    prefill_s: float = 0.01
    token_s: float = 0.005
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    fault: Fault | None = None
    fails_from: int = 0
    unknown: tuple[str, ...] = ()
    word_tokens: int = 1
    context_tokens: int | None = None
    limits: dict[str, int] | None = None


class OpenAIServer:
    """Serves on loopback, on a thread of its own, until closed; or as `on_virtual_clock` says.

    Attributes:
        url: Its address.
        asked: Requests so far.
        prompts: Of all of them.
    """

    def __init__(self, manners: Manners) -> None:
        self._manners = manners
        self.asked = 0
        self.prompts: list[str | list[int]] = []
        self._steps: list[list[float]] = []
        self._held_tokens = self._waiting = 0
        self.url = ""
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._slots: asyncio.Semaphore
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(HANG_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(HANG_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def listen_on(self, path: Path, loop: VirtualTimeLoop) -> None:
        """Serve on a Unix socket, until the loop is closed."""
        self._slots = asyncio.Semaphore(self._manners.slots)
        self._held_tokens = 0
        self._server = await asyncio.start_unix_server(self._connection, path)
        loop.before_closing(partial(path.unlink, missing_ok=True))
        loop.before_closing(self._die)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._slots = asyncio.Semaphore(self._manners.slots)
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._closing.wait()
        self._die()

    def _die(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(
                    line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
                )
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                await self._answer(head.split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics" and self._manners.cache_tokens is not None:
            _plain(writer, 200, self._metrics())
        elif path == "/aqua/steps" and self._manners.limits is not None:
            _plain(writer, 200, json.dumps({"engines": [self._recorded(body)]}))
        elif path == "/v1/models" and self._manners.context_tokens is not None:
            card = {"id": "m", "max_model_len": self._manners.context_tokens}
            _plain(writer, 200, json.dumps({"data": [card]}))
        elif path == "/v1/completions":
            await self._complete(json.loads(body), writer)
        else:
            _plain(writer, 404, "no such page")

    def _metrics(self) -> str:
        manners = self._manners
        assert manners.cache_tokens is not None
        usage = min(1.0, self._held_tokens / manners.cache_tokens)
        return (
            f'vllm:kv_cache_usage_perc{{model_name="m"}} {usage}\n'
            f'vllm:num_requests_waiting{{model_name="m"}} {self._waiting}\n'
            f'vllm:num_requests_waiting_by_reason{{reason="capacity"}} 99\n'
            f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{manners.cache_tokens}",'
            f'kv_cache_memory_bytes="{manners.cache_bytes}"}} 1\n'
        )

    def _recorded(self, body: bytes) -> dict[str, Any]:
        if body:
            self._steps.clear()
        key = {"model": "m", "engine": "fake 1", "gpu": "none"}
        return {**key, "limits": self._manners.limits, "steps": self._steps}

    def _note_step(self, tokens: int, context: int, pairs: float) -> None:
        seconds = 0.005 + 1e-5 * tokens + 2e-7 * context + 1e-9 * pairs
        self._steps.append([tokens, context, pairs, 1, seconds])

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        manners, number = self._manners, self.asked
        self.asked += 1
        self.prompts.append(asked["prompt"])
        strange = next((name for name in manners.unknown if name in asked), None)
        if strange is not None:
            _plain(writer, 400, json.dumps({"error": f"unknown field {strange}"}))
            return
        needed = _words_of(asked) * manners.word_tokens + asked["max_tokens"]
        if manners.context_tokens is not None and needed > manners.context_tokens:
            _plain(writer, 400, json.dumps({"error": f"{needed} tokens exceed the context"}))
            return
        fault = manners.fault if number >= manners.fails_from else None
        if fault in {Fault.ERRORS, Fault.SHEDS}:
            _plain(writer, 500 if fault is Fault.ERRORS else 429, "CUDA out of memory")
            return
        if fault is Fault.DIES:
            self._die()
            return
        self._waiting += 1
        async with self._slots:
            self._waiting -= 1
            if fault is Fault.STALLS:
                await asyncio.sleep(3600)
            await self._stream(asked, writer, fault)

    async def _stream(
        self, asked: dict[str, Any], writer: asyncio.StreamWriter, fault: Fault | None
    ) -> None:
        manners, count = self._manners, asked["max_tokens"]
        prompt = _words_of(asked) * manners.word_tokens
        self._held_tokens += prompt + count
        try:
            await asyncio.sleep(manners.prefill_s)
            self._note_step(prompt, 0, prompt**2 / 2)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            if fault is Fault.GARBAGE:
                _chunk(writer, b"<html>the model is being loaded</html>\n")
            for index in range(count):
                last = index == count - 1
                if last and fault is Fault.CUTS_OFF:
                    writer.write(b"0\r\n\r\n")
                    return
                reason = "length" if last else None
                _event(writer, {"choices": [{"text": " so", "finish_reason": reason}]})
                if not last:
                    await asyncio.sleep(manners.token_s)
                    self._note_step(1, prompt + index + 1, 0.0)
            if manners.word_tokens and "stream_options" in asked:
                usage = {"prompt_tokens": prompt, "completion_tokens": count}
                _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        finally:
            self._held_tokens -= prompt + count


@contextmanager
def on_virtual_clock(manners: Manners, socket: Path) -> Iterator[OpenAIServer]:
    """A server for every `asyncio.run` in this block, on that loop and its virtual clock."""
    server = OpenAIServer(manners)
    server.url = "http://engine.test"
    with pytest.MonkeyPatch.context() as patch:
        # Whoever would connect over TCP, whose bytes take a moment, finds the server here.
        patch.setattr(aiohttp, "TCPConnector", partial(aiohttp.UnixConnector, str(socket)))
        asyncio.set_event_loop_policy(VirtualTimePolicy(partial(server.listen_on, socket)))
        try:
            yield server
        finally:
            asyncio.set_event_loop_policy(None)


def _words_of(asked: dict[str, Any]) -> int:
    prompt = asked["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def _plain(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
