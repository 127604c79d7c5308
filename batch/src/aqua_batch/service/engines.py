"""The engines: who takes the next request, and what an answer of theirs means.

An engine is any server that speaks OpenAI's HTTP: vLLM, with or without Aqua's schedulers. Each has
a number of places, so that one is never flooded. One that cannot be reached rests, longer each
time, and then gets a single request to show that it is back; that costs no request an attempt.
Closing the connection is how a request is cancelled: vLLM aborts it, and its memory is free at the
next step.

An answer is final (2xx, or a refusal that repetition would not change), or the request is to run
again: the engine was overloaded, failed, or broke off.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import aiohttp

from aqua_protocol.errors import AquaError

FIRST_REST_S: Final = 0.5
"""Seconds that an engine rests when it cannot be reached. Doubled, one that is started anew is used
half a second later."""
LONGEST_REST_S: Final = 30.0
"""Seconds. Doubled, an engine that was away for long is used up to half a minute later."""
CONNECT_S: Final = 10.0
"""Seconds for a connection to come about. Doubled, a machine that is off keeps requests waiting for
twice as long."""
LONGEST_ANSWER_BYTES: Final = 64 << 20
"""Bytes; as long as a line may be. Doubled, an engine gone mad may take twice the memory."""

OVERLOADED: Final = frozenset({429, 503})
AGAIN: Final = frozenset({408, 409, 425, 500, 502, 504})


class EngineAbsentError(AquaError):
    """An engine cannot be reached, or says that it has no room; the request has not run."""

    code = "engine_absent"
    http_status = 503


class EngineFailedError(AquaError):
    """An engine failed at a request, or broke off; it may have run in part."""

    code = "engine_failed"
    http_status = 502


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A final answer.

    Attributes:
        status: Of HTTP.
        body: JSON.
        request_id: The engine's, or nothing.
    """

    status: int
    body: Any
    request_id: str

    @property
    def is_answer(self) -> bool:
        """Whether the engine did what was asked."""
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP's success


@dataclass(eq=False, slots=True)
class EngineEndpoint:
    """One engine.

    Attributes:
        url: Without the path.
        places: Requests that it gets at once.
        running: Requests that it has.
        rests_until_s: Monotonic time before which it gets nothing.
        absences: How often in a row it could not be reached.
    """

    url: str
    places: int
    running: int = 0
    rests_until_s: float = 0.0
    absences: int = 0

    def room(self, now_s: float) -> int:
        """Requests that it would take now; one that was away gets a single one first."""
        if now_s < self.rests_until_s:
            return 0
        return max(0, (1 if self.absences else self.places) - self.running)

    def rest(self, now_s: float, at_least_s: float) -> None:
        """Leave it alone for a while, longer each time."""
        if now_s < self.rests_until_s:
            return  # Others that were under way say the same.
        self.absences += 1
        pause_s = min(LONGEST_REST_S, FIRST_REST_S * 2 ** (self.absences - 1))
        self.rests_until_s = now_s + max(at_least_s, pause_s * random.uniform(0.75, 1.25))


class EnginePool:
    """Engines, with the connections to them; a context manager.

    Args:
        urls: Base URLs, with or without `/v1`.
        places: Requests that each gets at once.
        api_key: For the engines, if they want one.
        timeout_s: How long an answer may take.
        clock_s: Monotonic.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        places: int,
        api_key: str | None,
        timeout_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = [EngineEndpoint(url.rstrip("/").removesuffix("/v1"), places) for url in urls]
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._clock_s = clock_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    def take(self, most: int) -> list[EngineEndpoint]:
        """Take up to so many places, of the emptiest engines first; each is given back alone."""
        now_s = self._clock_s()
        taken: list[EngineEndpoint] = []
        while len(taken) < most:
            engine = max(self.engines, key=lambda each: each.room(now_s))
            if engine.room(now_s) == 0:
                break
            engine.running += 1
            taken.append(engine)
        return taken

    def next_return_s(self) -> float | None:
        """Seconds until the first resting engine is tried again; None where none rests."""
        now_s = self._clock_s()
        rests = [each.rests_until_s - now_s for each in self.engines if each.rests_until_s > now_s]
        return min(rests, default=None)

    async def ask(self, engine: EngineEndpoint, path: str, body: bytes) -> EngineAnswer:
        """Have an engine run a request.

        Raises:
            EngineAbsentError: It has not run; the engine rests now.
            EngineFailedError: It failed or broke off.
        """
        assert self._session is not None
        try:
            async with self._session.post(engine.url + path, data=body) as response:
                engine.absences = 0 if response.status not in OVERLOADED else engine.absences
                content = await _read(response)
        except aiohttp.ClientConnectorError as error:
            engine.rest(self._clock_s(), 0.0)
            raise EngineAbsentError(
                f"the engine cannot be reached: {type(error).__name__}"
            ) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineFailedError(f"the engine broke off: {type(error).__name__}") from None
        if response.status in OVERLOADED:
            engine.rest(self._clock_s(), _retry_after_s(response))
            raise EngineAbsentError(f"the engine has no room: HTTP {response.status}")
        if response.status in AGAIN:
            raise EngineFailedError(f"the engine failed: HTTP {response.status}")
        try:
            answer = json.loads(content)
        except ValueError:
            raise EngineFailedError("the engine answered something that is not JSON") from None
        return EngineAnswer(response.status, answer, response.headers.get("x-request-id", ""))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > LONGEST_ANSWER_BYTES:
            raise EngineFailedError(f"an answer of more than {LONGEST_ANSWER_BYTES >> 20} MiB")
    return bytes(content)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    try:
        return min(LONGEST_REST_S, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:  # A date.
        return 0.0
