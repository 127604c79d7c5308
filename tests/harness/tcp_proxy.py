"""A TCP proxy that can lose the network between two real processes, and bring it back.

It passes bytes on, holds them back (a stall: they arrive when it ends), swallows them (a drop:
whoever was connected then has to connect anew) or resets every connection and refuses more. A
swallowed connection is still accepted, since the kernel answers for a listening socket: the caller
waits for an answer instead of for the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, Final, Self

from harness.bounds import HANG_S

CHUNK_BYTES: Final = 1 << 16


class Passage(StrEnum):
    """What happens to bytes."""

    PASS = "pass"
    STALL = "stall"
    DROP = "drop"
    RESET = "reset"


class ProxyThread:
    """An event loop in a thread of its own, for any number of proxies; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._proxies: list[TcpProxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)
        self._loop.close()

    def open(self, target_port: int) -> TcpProxy:
        """A proxy on a free port of loopback, for a server there that may come and go."""
        proxy = TcpProxy(self, target_port)
        self.run(proxy.listen())
        self._proxies.append(proxy)
        return proxy

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the loop, and wait for its end."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_S)


class TcpProxy:
    """One proxy; see the module. Made by `ProxyThread.open`.

    Attributes:
        port: Where it listens.
        connection_count: Connections that it holds open.
        byte_count: Bytes that it has carried, both ways.
    """

    def __init__(self, thread: ProxyThread, target_port: int) -> None:
        self.port = 0
        self.connection_count = 0
        self.byte_count = 0
        self._thread: Final = thread
        self._target_port: Final = target_port
        self._passage = Passage.PASS
        self._drop_count = 0
        self._moves = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._cuts: set[Callable[[], None]] = set()

    def set(self, passage: Passage) -> None:
        """Treat bytes so from now on; returns when it does."""
        self._thread.run(self._change(passage))

    async def listen(self) -> None:
        """Begin; on the loop."""
        self._moves.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End it, and every connection; on the loop."""
        assert self._server is not None, "closed before it listens"
        self._server.close()
        await self._change(Passage.RESET)
        while self.connection_count:  # noqa: ASYNC110 - at the end; each ends in its next step
            await asyncio.sleep(0)

    async def _change(self, passage: Passage) -> None:
        was, self._passage = self._passage, passage
        self._drop_count += passage is Passage.DROP
        if passage is Passage.RESET or was is Passage.DROP:
            for cut in tuple(self._cuts):
                cut()
        if passage is Passage.STALL:
            self._moves.clear()
        else:
            self._moves.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        try:
            if self._passage is Passage.RESET:
                return
            cut = asyncio.Event()
            self._cuts.add(cut.set)
            try:
                work = asyncio.create_task(self._carry(reader, writer))
                over = asyncio.create_task(cut.wait())
                await asyncio.wait([work, over], return_when=asyncio.FIRST_COMPLETED)
                for task in (work, over):
                    task.cancel()
                await asyncio.gather(work, over, return_exceptions=True)
            finally:
                self._cuts.discard(cut.set)
            if not cut.is_set():
                writer.close()  # What it has yet to send, it sends.
                return
        finally:
            if not writer.is_closing():
                writer.transport.abort()
            self.connection_count -= 1

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        drop_count = self._drop_count
        if self._passage is Passage.DROP:
            await asyncio.Event().wait()  # Until it is cut.
        await self._moves.wait()
        with contextlib.suppress(OSError):
            its_reader, its_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            there = asyncio.create_task(self._pump(reader, its_writer, drop_count))
            back = asyncio.create_task(self._pump(its_reader, writer, drop_count))
            try:
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
                its_writer.close()
            finally:
                for task in (there, back):
                    task.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
                if not its_writer.is_closing():
                    its_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drop_count: int
    ) -> None:
        """Carry bytes one way; none any more once some of them were swallowed."""
        while chunk := await reader.read(CHUNK_BYTES):
            await self._moves.wait()
            if drop_count == self._drop_count:
                self.byte_count += len(chunk)
                writer.write(chunk)
                await writer.drain()
        await writer.drain()
