"""Connections leave nothing behind that only Python's collector would find."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from aqua_coordinator.connections import Connection, ConnectionLimits
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.server import SERVER_OPTIONS

KINDS = (HttpToolsProtocol, RequestResponseCycle, Connection)


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def answer(scope: Scope, _: Receive, send: Send) -> None:
    """Answer any request; that for `/slow` when its peer is gone."""
    if scope["path"] == "/slow":
        await scope["state"]["gone"].wait()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("way", ["idle", "answered", "aborted", "in the middle"])
def test_a_connection_that_has_ended_leaves_no_cycle(way: str) -> None:
    path = b"/slow" if way == "in the middle" else b"/"

    async def come_and_go() -> None:
        config = uvicorn.Config(answer, **SERVER_OPTIONS)
        config.load()
        limits, state, gone = ConnectionLimits(10.0, Metrics()), ServerState(), asyncio.Event()

        def make() -> asyncio.Protocol:
            made = limits.protocol(HttpToolsProtocol, config=config, server_state=state)
            made.app_state["gone"] = gone
            protocol: asyncio.Protocol = made
            return protocol

        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while not state.connections:  # noqa: ASYNC110 - uvicorn's own set
                await asyncio.sleep(0)
            if way != "idle":
                writer.write(b"GET %s HTTP/1.1\r\nHost: here\r\n\r\n" % path)
            if way in {"answered", "aborted"}:
                await reader.readuntil(b"\r\n\r\n")
            (writer.transport.abort if way == "aborted" else writer.close)()
        while state.connections or (way != "idle" and not state.total_requests):
            await asyncio.sleep(0)
            gone.set()
        await asyncio.gather(*state.tasks)
        server.close()
        await server.wait_closed()

    uvloop.run(come_and_go())
    assert [one for one in gc.get_objects() if isinstance(one, KINDS)] == []
