"""An engine over HTTP that counts instead of computing; a process that outlives what asks it.

It answers each request with what it was asked, so a test sees from the answer alone
which request it belongs to, and counts how often each prompt began, ended, and was broken off. A
prompt that begins with a word of `BEHAVIOURS` is treated as that says. `/counts` tells; `/release`
lets held requests go.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, Self

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from harness.bounds import HANG_S
from harness.fork_server import ForkedProcess

BEHAVIOURS: Final = {
    "hold": "is answered after /release of its second word, or broken off",
    "fail": "is answered with 500, always",
    "shaky": "is answered with 500 the first time",
    "refuse": "is answered with 400",
    "echo": "is answered with all that was asked, as JSON",
}


class CountingServer:
    """A counting engine on this machine; a context manager that kills it.

    Args:
        url: Where another was; a free port by default.
        model: The one that it lists.
    """

    def __init__(self, url: str | None = None, *, model: str = "m") -> None:
        port = 0 if url is None else int(url.rpartition(":")[2])
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._process = ForkedProcess(_serve, listener, model)
        listener.close()
        self._http = httpx.Client(base_url=self.url, timeout=HANG_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait(HANG_S)

    def counts(self) -> dict[str, dict[str, int]]:
        """How often each prompt began, ended, was broken off, and was said to be of a class.

        And how often a deadline was told, by its seconds.
        """
        found: dict[str, dict[str, int]] = self._http.get("/counts").json()
        return found

    def wait_for(self, kind: str, count: int) -> None:
        """Wait until so many requests in all began, ended or were broken off."""
        self._http.get("/wait", params={"kind": kind, "count": count}).raise_for_status()

    def release(self, group: str) -> None:
        """Let held requests of a group go, those to come as well."""
        self._http.post("/release", params={"group": group}).raise_for_status()

    def tell_metrics(self, text: str) -> None:
        """Have `/metrics` say this from now on; before, there is no such path."""
        self._http.post("/tell", content=text).raise_for_status()


class _Counts:
    def __init__(self) -> None:
        kinds = ("began", "ended", "gone", "offline", "online", "deadlines")
        self.of: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.changed = asyncio.Condition()

    async def add(self, kind: str, prompt: str) -> None:
        async with self.changed:
            self.of[kind][prompt] += 1
            self.changed.notify_all()


def _serve(listener: socket.socket, model: str) -> None:
    config = uvicorn.Config(_Engine(model).api(), log_level="error", lifespan="off")
    with suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


class _Engine:
    def __init__(self, model: str) -> None:
        self.counts = _Counts()
        self._model = model
        self._metrics = ""
        self._released: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def api(self) -> FastAPI:
        api = FastAPI()
        for name in ("chat/completions", "completions", "embeddings"):
            api.post(f"/v1/{name}")(self.answer)
        api.get("/v1/models")(self.models)
        api.get("/metrics")(self.metrics)
        api.post("/tell")(self.tell_metrics)
        api.get("/counts")(self.tell)
        api.get("/wait")(self.wait)
        api.post("/release")(self.release)
        return api

    async def answer(self, request: Request) -> Response:
        asked = await request.json()
        kind = "messages" if "messages" in asked else "prompt" if "prompt" in asked else "input"
        prompt = asked[kind][-1]["content"] if kind == "messages" else asked[kind]
        if kind == "messages" and isinstance(prompt, list):
            prompt = next(part["text"] for part in prompt if part["type"] == "text")
        await self.counts.add("began", prompt)
        if told := request.headers.get("x-aqua-class"):
            await self.counts.add(told, prompt)
        if finish_in_s := request.headers.get("x-aqua-finish-in"):
            await self.counts.add("deadlines", finish_in_s)
        match prompt.partition(" ")[0]:
            case "hold" if not await self._wait_for_release(request, prompt.split()[1]):
                await self.counts.add("gone", prompt)
                return JSONResponse({}, 499)
            case "fail" | "shaky" | "refuse" as manner if refusal := self._refusal(manner, prompt):
                return refusal
        if asked.get("stream"):
            return StreamingResponse(self._stream(prompt), media_type="text/event-stream")
        await self.counts.add("ended", prompt)
        head = {"id": "c", "created": 0, "model": asked["model"]}
        text = json.dumps(asked) if prompt.startswith("echo") else f"{prompt} was asked"
        choice: dict[str, Any]
        match kind:
            case "messages":
                choice = {"message": {"role": "assistant", "content": text}}
                head["object"] = "chat.completion"
            case "prompt":
                choice = {"text": text}
                head["object"] = "text_completion"
            case _:
                data = [{"object": "embedding", "index": 0, "embedding": [float(len(prompt))]}]
                usage = {"prompt_tokens": 1, "total_tokens": 1}
                return JSONResponse({**head, "object": "list", "data": data, "usage": usage})
        return JSONResponse({**head, "choices": [{"index": 0, "finish_reason": "stop", **choice}]})

    def _refusal(self, manner: str, prompt: str) -> Response | None:
        match manner:
            case "fail":
                return JSONResponse({"error": {"message": "out of memory"}}, 500)
            case "shaky" if self.counts.of["began"][prompt] == 1:
                return JSONResponse({"error": {"message": "a hiccup"}}, 500)
            case "refuse":
                error = {"message": "no such model", "type": "BadRequestError", "code": 400}
                return JSONResponse({"error": error}, 400)
        return None

    async def _stream(self, prompt: str) -> AsyncIterator[str]:
        """The prompt's words, one by one; after "stay" none, until the caller leaves."""
        try:
            for word in prompt.split():
                delta = {"index": 0, "delta": {"content": word}}
                head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
                yield f"data: {json.dumps({**head, 'choices': [delta]})}\n\n"
                if word == "stay":
                    await asyncio.sleep(HANG_S)
            yield "data: [DONE]\n\n"
            await self.counts.add("ended", prompt)
        except asyncio.CancelledError:
            await asyncio.shield(self.counts.add("gone", prompt))
            raise

    async def models(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "owned_by": "test"}
        return {"object": "list", "data": [model]}

    async def metrics(self) -> Response:
        return PlainTextResponse(self._metrics, 200 if self._metrics else 404)

    async def tell_metrics(self, request: Request) -> None:
        self._metrics = (await request.body()).decode()

    async def _wait_for_release(self, request: Request, group: str) -> bool:
        """Whether it was released; False where the caller has left."""
        released = self._released[group]
        while not released.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(released.wait(), 0.02)
            if await request.is_disconnected():
                return False
        return True

    async def tell(self) -> dict[str, Counter[str]]:
        return self.counts.of

    async def wait(self, kind: str, count: int) -> None:
        async with self.counts.changed:
            await self.counts.changed.wait_for(lambda: self.counts.of[kind].total() >= count)

    async def release(self, group: str) -> None:
        self._released[group].set()


if __name__ == "__main__":  # In the foreground, for pages that have an engine on a port.
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1024) as listening:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        _serve(listening, "m")
