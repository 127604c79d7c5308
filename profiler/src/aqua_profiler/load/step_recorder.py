"""The admin API of an engine under Aqua, as far as it records steps."""

from __future__ import annotations

import json
from typing import Any, Final, Self

import aiohttp
from pydantic import ValidationError

from aqua_profiler.errors import EndpointGarbledError, EndpointGoneError
from aqua_profiler.load.endpoint import KEEPALIVE_S
from aqua_protocol.bearer import bearer_headers
from aqua_protocol.errors import ErrorBody, UnknownResourceError, error_from_body

PATH: Final = "/aqua/steps"
"""Fixed by the engine's admin API."""

TIMEOUT_S: Final = 60.0
"""Seconds that an answer may take: it comes between two steps, and on a CPU one takes seconds.
Doubled, a dead engine is found out later."""


class StepRecorder:
    """Has every rank of an engine record its steps; a context manager.

    Args:
        url: Of the server.
        token: The engine's `AQUA_ADMIN_TOKEN`.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + PATH
        self._headers = bearer_headers(token)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def record(self, *, recording: bool) -> None:
        """Begin to record anew, or stop."""
        await self._call("PATCH", {"recording": recording})

    async def read(self) -> list[dict[str, Any]]:
        """What each rank says of itself and of its steps, as it came."""
        return await self._call("GET", None)

    async def _call(self, method: str, body: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Ask.

        Raises:
            AquaError: What the engine refused with, as its own type.
            UnknownResourceError: There is no such admin API.
            EndpointError: There is no answer, or another one.
        """
        assert self._session is not None, "a recorder is a context manager"
        try:
            async with self._session.request(method, self._url, json=body) as answer:
                status, said = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointGoneError(
                f"no answer from {self._url}: {str(error) or type(error).__name__}"
            ) from error
        try:
            content = json.loads(said)
            if answer.ok:
                engines: list[dict[str, Any]] = content["engines"]
                return engines
            raise error_from_body(ErrorBody.model_validate(content))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            if status == UnknownResourceError.http_status:
                raise UnknownResourceError(
                    f"{self._url}: this server does not record its steps",
                    remedy="Start vLLM with --scheduler-cls aqualib.engines.vllm.AquaScheduler and "
                    "--middleware aqualib.engines.vllm.AquaMiddleware.",
                ) from error
            raise EndpointGarbledError(
                f"{self._url} answered {status} with no record of steps"
            ) from error
