"""The engines: who takes the next request, and what an answer of theirs means.

An engine is any server that speaks OpenAI's HTTP: vLLM, with or without Aqua's schedulers. They are
listed, or found by DNS (`engine_names`); one that DNS has no more ends what it has. An engine gets
requests of the models that it lists in `/v1/models`, and of any model where it lists none. Requests
of a model that no engine lists wait while an engine has never been there; then one of them gets
them, since its refusal is the answer that OpenAI's clients know.

Each engine has a number of places for offline requests, found by feedback (`concurrency`), so that
none is ever flooded. Online requests, which are passed through, take none: they go to the one that
has the fewest. One that cannot be reached rests, longer each time, and then gets a single request
to show that it is back; that costs no request an attempt. Closing the connection is how a request
is cancelled: vLLM aborts it, and its memory is free at the next step.

An answer is final (2xx, or a refusal that repetition would not change), or the request is to run
again: the engine was overloaded, failed, broke off, or is elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import aiohttp
from pydantic_core import from_json

from aqua_batch.service.dispatch.concurrency import AdmissionLimit, LoadSample
from aqua_batch.service.dispatch.engine_names import (
    LOOKUP_S,
    PREFIX,
    EngineAddress,
    EngineName,
    Resolve,
    resolve,
)
from aqua_protocol.errors import AquaError

FIRST_REST_S: Final = 0.5
"""Seconds that an engine rests when it cannot be reached. Doubled, one that is started anew is used
half a second later."""
LONGEST_REST_S: Final = 30.0
"""Seconds. Doubled, an engine that was away for long is used up to half a minute later."""
CONNECT_S: Final = 10.0
"""Seconds for a connection to come about. Doubled, a machine that is off keeps requests waiting for
twice as long."""
KEPT_S: Final = 3.0
"""Seconds that an idle connection is kept: less than the 5 after which uvicorn, and so vLLM, closes
one, for a request sent at that moment is lost. Doubled, some would be."""
LONGEST_ANSWER_BYTES: Final = 64 << 20
"""Bytes; as long as a line may be. Doubled, an engine gone mad may take twice the memory."""
LOOK_S: Final = 2.0
"""Seconds that an engine may take to tell its metrics or models; one that takes longer has too much
to do. Doubled, that is noticed two seconds later."""
MODELS_S: Final = 10.0
"""Seconds for which it is believed what models an engine has. Doubled, an adapter that was loaded
gets requests ten seconds later."""
LONGEST_MODELS_BYTES: Final = 1 << 20
"""Bytes of an engine's list of models. Doubled, an engine gone mad may take twice the memory."""
LONGEST_METRICS_BYTES: Final = 8 << 20
"""Bytes; vLLM tells some 100 KiB. Doubled, an engine gone mad may take twice the memory."""
CLASS_HEADER: Final = "x-aqua-class"
"""Fixed, as part of the interface of engines that co-serve; others pass over it."""
DEADLINE_HEADER: Final = "x-aqua-finish-in"
"""Likewise; seconds from now on."""
LONGEST_DEADLINE_S: Final = 28 * 24 * 3600
"""Fixed, likewise: what is later is refused, and so is what has passed."""

OK: Final = 200
"""Fixed by HTTP."""
OVERLOADED: Final = frozenset({429, 503})
AGAIN: Final = frozenset({*range(300, 400), 408, 409, 425, *range(500, 600)}) - OVERLOADED
"""Redirects, too: to follow one would send prompts where no operator has listed an engine."""


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
        server_name: Whose certificate it shows, if not that of the URL's host.
        places: Requests that it gets at once.
        running: Requests that it has.
        rests_until_s: Monotonic time before which it gets nothing.
        absences: How often in a row it could not be reached.
        models: Names of those that it has; None for any.
        models_until_s: Monotonic time until which that is believed; None before it was told.
        online: Online requests that it has from here.
        limit: How many of the places are used.
        load: What its metrics said last; None where it has none.
        is_leaving: It gets nothing more, since DNS has it no more.
    """

    url: str
    places: int
    server_name: str | None = None
    running: int = 0
    online: int = 0
    limit: AdmissionLimit = field(init=False)
    load: LoadSample | None = None
    rests_until_s: float = 0.0
    absences: int = 0
    models: frozenset[str] | None = None
    models_until_s: float | None = None
    is_leaving: bool = False

    def __post_init__(self) -> None:
        self.limit = AdmissionLimit(self.places)

    @property
    def has_told(self) -> bool:
        """Whether it is known which models it has."""
        return self.models_until_s is not None

    def serves(self, model: str | None) -> bool:
        """Whether it may have a model; None for whatever a request names."""
        return model is None or self.models is None or model in self.models

    def room(self, now_s: float) -> int:
        """Requests that it would take now; one that was away gets a single one first."""
        if self.is_leaving or now_s < self.rests_until_s:
            return 0
        return max(0, (1 if self.absences else int(self.limit.value)) - self.running)

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
        urls: Base URLs, with or without `/v1`; one that begins with `dns+` stands for all addresses
            of its name.
        places: Requests that each gets at once.
        api_key: For the engines, if they want one.
        timeout_s: How long an answer may take.
        ttft_s: Mean time to the first token above which an engine has too much to do.
        tells_deadlines: Whether engines are told by when requests are wanted.
        clock_s: Monotonic.
        resolve: Looks names up.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        places: int,
        api_key: str | None,
        timeout_s: float,
        ttft_s: float | None = None,
        tells_deadlines: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
        resolve: Resolve = resolve,
    ) -> None:
        bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._listed = [EngineAddress(url) for url in bases if not url.startswith(PREFIX)]
        self._names = [EngineName(url, resolve) for url in bases if url.startswith(PREFIX)]
        self._names_until_s = float("-inf")
        self._places = places
        self.engines: list[EngineEndpoint] = []
        self._settle()
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._ttft_s = ttft_s
        self._tells_deadlines = tells_deadlines
        self._clock_s = clock_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # No engine's session is of use to a batch.
        )
        await self._look_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    def take(self, model: str | None) -> EngineEndpoint | None:
        """Take a place of the emptiest engine for a model; None where all are full."""
        now_s = self._clock_s()
        engine = max(self._for(model), key=lambda each: each.room(now_s), default=None)
        if engine is None or engine.room(now_s) == 0:
            return None
        engine.running += 1
        return engine

    def most_places(self) -> int:
        """Requests that all engines take at once, at most."""
        return self._places * max(1, len(self.engines))

    def places_for(self, model: str | None) -> int:
        """Places of the engines for a model, free or not."""
        return sum(int(each.limit.value) for each in self._for(model))

    def has_room(self, model: str | None) -> bool:
        """Whether any engine for a model would take a request now."""
        now_s = self._clock_s()
        return any(each.room(now_s) for each in self._for(model))

    def _for(self, model: str | None) -> list[EngineEndpoint]:
        told = [each for each in self.engines if each.has_told]
        serving = [each for each in told if each.serves(model)]
        return told if not serving and len(told) == len(self.engines) else serving

    def choose_online(
        self, model: str | None, passed: Sequence[EngineEndpoint]
    ) -> EngineEndpoint | None:
        """The engine with the fewest online requests, but those passed over and those at rest."""
        now_s = self._clock_s()
        serving = [e for e in self.engines if e.serves(model)] or self.engines
        free = [
            e for e in serving if e not in passed and now_s >= e.rests_until_s and not e.is_leaving
        ]
        return min(free, key=lambda each: (not each.has_told, each.online), default=None)

    def next_return_s(self) -> float | None:
        """Seconds until the first resting engine is tried again; None where none rests."""
        now_s = self._clock_s()
        rests = [each.rests_until_s - now_s for each in self.engines if each.rests_until_s > now_s]
        return min(rests, default=None)

    async def look(self) -> None:
        """Ask all engines what they have and how they are, and adjust what each gets."""
        await self._look_up()
        await asyncio.gather(*(self._look_at(each) for each in self.engines))

    async def _look_up(self) -> None:
        if self._names_until_s <= self._clock_s():
            self._names_until_s = self._clock_s() + LOOKUP_S
            await asyncio.gather(*(name.look_up() for name in self._names))
        self._settle()

    def _settle(self) -> None:
        """Have the engines that there are, and those that have still to end something."""
        wanted = [*self._listed, *(each for name in self._names for each in name.addresses)]
        known = {EngineAddress(each.url, each.server_name): each for each in self.engines}
        for address, engine in known.items():
            engine.is_leaving = address not in wanted
        new = [
            EngineEndpoint(url, self._places, server_name)
            for url, server_name in dict.fromkeys(wanted)
            if (url, server_name) not in known
        ]
        busy = (each for each in self.engines if not each.is_leaving or each.running or each.online)
        self.engines = [*busy, *new]

    async def models_of(self, engine: EngineEndpoint) -> list[dict[str, Any]]:
        """What an engine tells of its models; nothing where it tells nothing.

        Raises:
            aiohttp.ClientError, TimeoutError: It cannot be reached, or broke off.
            EngineFailedError: It said too much.
        """
        async with asyncio.timeout(LOOK_S):
            status, content = await self.read(engine, "/v1/models", LONGEST_MODELS_BYTES)
        try:
            found = from_json(content, allow_inf_nan=False)["data"] if status == OK else []
            return [each for each in found if isinstance(each.get("id"), str)]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []  # Something else than an engine.

    async def _look_at(self, engine: EngineEndpoint) -> None:
        if (engine.models_until_s or 0.0) <= self._clock_s():
            try:
                models = await self.models_of(engine)
            except (aiohttp.ClientError, TimeoutError, EngineFailedError):
                return  # Away: what it has told before still holds.
            engine.models = frozenset(each["id"] for each in models) or None
            engine.models_until_s = self._clock_s() + MODELS_S
        try:
            async with asyncio.timeout(LOOK_S):
                status, content = await self.read(engine, "/metrics", LONGEST_METRICS_BYTES)
            load = LoadSample.of(content.decode()) if status == OK else None
        except TimeoutError:
            engine.limit.congested(engine.running)
            return
        except (aiohttp.ClientError, EngineFailedError, ValueError):  # Away, or no metrics.
            load = None
        before, engine.load = engine.load, load
        if load is None or before is None:
            return
        if load.is_congested(before, self._ttft_s):
            engine.limit.congested(engine.running)
        else:
            engine.limit.calm(engine.running)

    async def read(self, engine: EngineEndpoint, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Status and content of what an engine tells of itself.

        Raises:
            aiohttp.ClientError: It cannot be reached, or broke off.
            EngineFailedError: It said more than that.
        """
        assert self._session is not None
        url = engine.url + path
        async with self._session.get(
            url, server_hostname=engine.server_name, allow_redirects=False
        ) as response:
            return response.status, await _read(response, most_bytes)

    async def open(
        self, engine: EngineEndpoint, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Begin a request, and wait for the head of its answer; the caller closes it.

        Raises:
            EngineAbsentError: It cannot be reached; the engine rests now.
            EngineFailedError: It broke off before it answered.
        """
        assert self._session is not None
        try:
            return await self._session.post(
                engine.url + path,
                data=body,
                headers=headers,
                server_hostname=engine.server_name,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            engine.rest(self._clock_s(), 0.0)
            raise EngineAbsentError(
                f"the engine cannot be reached: {type(error).__name__}"
            ) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineFailedError(f"the engine broke off: {type(error).__name__}") from None

    async def ask(
        self, engine: EngineEndpoint, path: str, body: bytes, *, expires_s: float
    ) -> EngineAnswer:
        """Have an engine run an offline request, which is of no use after a Unix time.

        Raises:
            EngineAbsentError: It has not run; the engine rests now.
            EngineFailedError: It failed or broke off.
        """
        headers = {CLASS_HEADER: "offline"}
        if self._tells_deadlines:
            headers[DEADLINE_HEADER] = str(seconds_left(expires_s, time.time()))
        response = await self.open(engine, path, body, headers)
        try:
            engine.absences = 0 if response.status not in OVERLOADED else engine.absences
            content = await _read(response, LONGEST_ANSWER_BYTES)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineFailedError(f"the engine broke off: {type(error).__name__}") from None
        finally:
            response.close()
        if response.status in OVERLOADED:
            self.refused(engine, response)
            raise EngineAbsentError(f"the engine has no room: HTTP {response.status}")
        if response.status in AGAIN:
            raise EngineFailedError(f"the engine failed: HTTP {response.status}")
        try:
            answer = from_json(content, allow_inf_nan=False)
        except ValueError:
            raise EngineFailedError("the engine answered something that is not JSON") from None
        if engine.load is None:
            engine.limit.answered(engine.running)
        return EngineAnswer(response.status, answer, header_of(response, "x-request-id") or "")

    def refused(self, engine: EngineEndpoint, response: aiohttp.ClientResponse) -> None:
        """Take note that an engine has no room."""
        engine.limit.congested(engine.running)
        engine.rest(self._clock_s(), _retry_after_s(response))


def seconds_left(expires_s: float, now_s: float) -> int:
    """Seconds until then, as engines take them: an hour late, or 30 days early, is no refusal."""
    return min(max(1, round(expires_s - now_s)), LONGEST_DEADLINE_S)


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > most_bytes:
            raise EngineFailedError(f"an answer of more than {most_bytes >> 20} MiB")
    return bytes(content)


def header_of(response: aiohttp.ClientResponse, name: str) -> str | None:
    """A header as ASGI has it, where each byte is a letter: aiohttp's is no text if not UTF-8."""
    value = response.headers.get(name)
    return None if value is None else value.encode(errors="surrogateescape").decode("latin-1")


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    try:
        return min(LONGEST_REST_S, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:  # A date.
        return 0.0
