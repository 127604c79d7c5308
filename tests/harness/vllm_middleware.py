"""`AquaMiddleware` before a server that answers with what it gets, without a network."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx

from aqualib.engines.vllm.operations.admin_api import AquaMiddleware, body_of
from aqualib.engines.vllm.plugin import CONNECTOR

if TYPE_CHECKING:
    from aqualib.engines.vllm.operations.admin_api import App, Receive, Scope, Send


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, which is as long as the headers say, if they do."""
    body = await body_of(receive, 1 << 20)
    assert body is not None
    told = dict(scope["headers"]).get(b"content-length")
    assert told is None or int(told) == len(body)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def before(vllm: App, options: dict[str, Any]) -> App:
    """The middleware before a server under these options."""
    transfer = SimpleNamespace(kv_connector=CONNECTOR, kv_connector_extra_config=options)
    config = SimpleNamespace(kv_transfer_config=transfer, additional_config=None)
    state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config))
    middleware = AquaMiddleware(vllm)

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await middleware({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    return run


def through(
    content: object,
    options: dict[str, Any],
    *more: tuple[str, str | bytes],
    **headers: str,
) -> Any:  # noqa: ANN401 - JSON
    """What vLLM gets of a request; `more` headers come behind the others."""

    async def ask() -> bytes:
        transport = httpx.ASGITransport(app=before(echo, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            kind = {"content-type": "application/json"}
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            sent: Any = [*(kind | named).items(), *more]
            answer = await http.post("/v1/completions", content=body, headers=sent)
            return answer.content

    answer = asyncio.run(ask())
    return answer if isinstance(content, bytes) else json.loads(answer)
