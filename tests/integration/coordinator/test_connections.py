"""What many connections cost: an idle one nothing, and an ended one leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from aqua_coordinator.http import connections
from aqua_coordinator.http.connections import Connection, ConnectionLimits
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
    # By type: `isinstance` asks the objects, and some of other libraries warn when they are asked.
    assert [one for one in gc.get_objects() if issubclass(type(one), KINDS)] == []


async def test_only_connections_that_may_owe_something_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "PATROL_S", 0)
    limits, looks, made = ConnectionLimits(0.0, Metrics()), Mock(return_value=0), []
    for _ in range(30):
        protocol = limits.protocol(lambda app_state: Mock(state=app_state))
        transport = Mock(get_write_buffer_size=looks, is_closing=Mock(return_value=False))
        protocol.connection_made(transport)
        protocol.state["connection"].owing_since_s = None
        made.append((protocol, transport))
    patrol = asyncio.create_task(limits.close_late_ones())

    async def looks_in_two_rounds() -> int:
        looks.reset_mock()
        for _ in range(2 * connections.TICKS_PER_ROUND + 2):
            await asyncio.sleep(0)
        return looks.call_count

    assert await looks_in_two_rounds() >= 30
    assert await looks_in_two_rounds() == 0
    protocol, transport = made[7]
    protocol.state["connection"].write(b"an answer")
    assert await looks_in_two_rounds() == 1
    transport.abort.assert_not_called()
    protocol.data_received(b"half a head")
    assert await looks_in_two_rounds() == 1
    transport.abort.assert_called_once_with()
    patrol.cancel()


async def test_an_answer_to_one_that_is_gone_is_dropped_without_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_exception_handler", faults.append)
    # As uvloop's, which raises once the socket is closed.
    transport = Mock(write=Mock(side_effect=RuntimeError("the handler is closed")))
    connection = Connection(transport, {}, set())
    connection.write(b"an answer")
    transport.is_closing.return_value = True
    connection.write(b"and another, to what it had sent ahead")
    await asyncio.sleep(0)
    transport.write.assert_not_called()
    assert faults == []
