"""What the batch service tells of its batches, asked once for all who look at the same time.

The coordinator asks it only while somebody looks, as an operator, and for nothing but counts, times
and names. That service is a guest on the page: however it fails (away, slow, of another version, an
answer without end), the page has a sentence instead of its section, and all the rest as ever.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Final

import httpx
from pydantic import SecretStr, ValidationError

from aqua_protocol.batches import BatchSummary
from aqua_protocol.errors import UnavailableError

PATH: Final = "/aqua/batches"
TIMEOUT_S: Final = 2.0
"""Seconds for an answer, which takes milliseconds. Doubled, the page says two seconds later that
there is none."""
KEPT_S: Final = 2.0
"""Seconds that an answer, or that there was none, is given again: as often as the page asks.
Doubled, the section is behind by four seconds."""
LONGEST_ANSWER_BYTES: Final = 1 << 20
"""Bytes: 100 batches with the longest names take 200 KiB. Doubled, so is what a wrong server makes
us read."""


class BatchWatch:
    """A look at a batch service.

    Args:
        url: Of the service, without the path.
        token: Its operator's token; None for a service without API keys.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, url: str, token: SecretStr | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + PATH
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token.get_secret_value()}"
        # Made once: reading the system's authorities takes some 10 ms.
        self._tls = ssl.create_default_context() if url.startswith("https:") else False
        self._clock = clock
        self._lock = asyncio.Lock()
        self._made_s: float | None = None
        self._answer: BatchSummary | UnavailableError

    async def overview(self) -> BatchSummary:
        """How batches are going, as of two seconds ago at most.

        Raises:
            UnavailableError: The service does not answer, or not so that we understand it; its
                message is for people.
        """
        async with self._lock:
            if self._made_s is None or self._clock() - self._made_s >= KEPT_S:
                try:
                    self._answer = await self._ask()
                except UnavailableError as error:
                    self._answer = error
                self._made_s = self._clock()
            if isinstance(self._answer, UnavailableError):
                raise self._answer
            return self._answer

    async def _ask(self) -> BatchSummary:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._fetch()
        except TimeoutError as error:
            raise _refused(f"does not answer within {TIMEOUT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _refused("does not answer") from error
        match status:
            case 200:
                pass
            case 401 | 403:
                raise _refused(
                    "refuses this coordinator: give both the same AQUA_BATCH_OPERATOR_TOKEN"
                )
            case 404:
                raise _refused(f"has no {PATH}: it is older than this coordinator, or another")
            case _:
                raise _refused(f"answers with HTTP {status}")
        try:
            return BatchSummary.model_validate_json(body)
        except ValidationError as error:
            raise _refused("answers what this coordinator does not understand") from error

    async def _fetch(self) -> tuple[int, bytes]:
        # A new connection each time: a Service spreads them, and none is kept for a page that is
        # not looked at.
        async with (
            httpx.AsyncClient(verify=self._tls, timeout=None, trust_env=False) as http,  # noqa: S113 - `_ask` has one for all of it
            http.stream("GET", self._url, headers=self._headers) as answer,
        ):
            body = bytearray()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > LONGEST_ANSWER_BYTES:
                    raise _refused("answers without end")
            return answer.status_code, bytes(body)


def _refused(what: str) -> UnavailableError:
    return UnavailableError(f"The batch service {what}.", remedy="Read its log.")
