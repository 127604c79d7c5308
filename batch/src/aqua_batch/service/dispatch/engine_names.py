"""Engines found by DNS: each address of a name is an engine, as behind a headless Service.

`dns+http://llm.gpu.svc:8000` names engines as Thanos names its stores: looked up again and again,
so that pods that start get requests and pods that have gone get no more. What is not known is not
believed: while a lookup fails, or finds nothing, the engines stay that it found before; those that
are gone for good cannot be reached, and rest.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger(__name__)

PREFIX: Final = "dns+"
"""Fixed, as part of the interface: what a URL begins with whose name is looked up."""
LOOKUP_S: Final = 10.0
"""Seconds between two lookups, twice in the 30 that cluster DNS keeps an answer by default.
Doubled, a new engine gets its first request ten seconds later."""
ANSWER_S: Final = 5.0
"""Seconds for a lookup; resolvers ask a second server after that. Doubled, engines' loads are
looked at five seconds later while DNS is away."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


class EngineAddress(NamedTuple):
    """Where an engine is: its base URL, and whose certificate it shows if that is not the URL's."""

    url: str
    server_name: str | None = None


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a name, v4 and v6.

    Raises:
        OSError: The name has none, or its server does not answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class EngineName:
    """One name of engines.

    Args:
        url: `dns+http://HOST:PORT` or `dns+https`, without `/v1`.
        resolve: Looks a name up.

    Attributes:
        addresses: Engines that it stands for, as of the last lookup that found any.
    """

    def __init__(self, url: str, resolve: Resolve = resolve) -> None:
        self._url = urlsplit(url.removeprefix(PREFIX))
        self._resolve = resolve
        self._fault = ""
        self.addresses: frozenset[EngineAddress] = frozenset()

    async def look_up(self) -> None:
        """Find its engines; nothing changes while none are found."""
        scheme, host = self._url.scheme, self._url.hostname or ""
        port = self._url.port or {"http": 80, "https": 443}[scheme]
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._fault:  # Once, not every ten seconds.
                log.warning("engines not found by DNS", name=host, error=fault)
            self._fault = fault
            return
        self._fault = ""
        server_name = host if scheme == "https" else None
        self.addresses = frozenset(
            EngineAddress(f"{scheme}://{_quoted(each)}:{port}{self._url.path}", server_name)
            for each in found
        )


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
