"""A few plain HTTP requests, one after the other, for programs that are not asynchronous.

aiohttp as in `endpoint`, on an event loop of its own that keeps the connection.
"""

from __future__ import annotations

import asyncio

import aiohttp

from aqua_profiler.errors import EndpointError, EndpointGarbledError, EndpointGoneError


class BlockingHttp:
    """A connection that is kept between requests.

    Args:
        timeout_s: Of a request with its answer.
        token: A bearer token, if the server wants one.
    """

    def __init__(self, timeout_s: float, token: str | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def request(self, method: str, url: str, body: str | None = None) -> tuple[int, str]:
        """Send JSON, if any; returns status and text of the answer.

        Raises:
            EndpointError: There was none.
        """
        return self._runner.run(self._request(method, url, body))

    async def _request(self, method: str, url: str, body: str | None) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        content = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._session.request(method, url, data=body, headers=content) as answer:
                return answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise no_answer(error, url) from error

    def close(self) -> None:
        """Close the connection; again is harmless."""
        if self._session is not None:
            self._runner.run(self._session.close())
            self._session = None
        self._runner.close()


def no_answer(error: aiohttp.ClientError | TimeoutError, url: str) -> EndpointError:
    """What a failed request says of the endpoint."""
    said = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL | TimeoutError):
        return EndpointGoneError(f"cannot connect to {url}: {said}", connecting=True)
    if isinstance(error, aiohttp.ClientResponseError):
        return EndpointGarbledError(f"{url} does not speak HTTP: {error.message or said}")
    return EndpointGoneError(f"{url} broke off an answer: {said}")
