"""The two clients of the coordinator: the same operations, sent in two ways.

Each operation is declared once, as a function of `aqua_client.calls`; a descriptor turns it into a
method that sends the call, and the type checker sees the answer (or the awaitable) of each. A
client keeps its connections, is bounded in time on every call, and repeats by one rule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Final, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from aqua_client import calls
from aqua_client.calls import EntryT, PageT
from aqua_client.event_stream import event_of, stream_ended, stream_request
from aqua_client.http import address_of, answer_of, error_of, no_answer, options_of, request_of
from aqua_client.retry import RetryRule
from aqua_protocol.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from aqua_client.calls import Call, Listing
    from aqua_protocol.leases import Event

DEFAULT_TIMEOUT_S: Final = 2.0
"""Bound of one sending: a coordinator answers in milliseconds, so a hung one is given up soon
enough for an engine to spill. Doubled, a member notices a hung coordinator twice as late."""
DEFAULT_RETRY: Final = RetryRule()

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


class Operation(Generic[P, AnswerT]):
    """A method that builds a call and sends it."""

    def __init__(self, build: Callable[P, Call[AnswerT]]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self, client: CoordinatorClient, owner: type | None = None
    ) -> Callable[P, AnswerT]: ...
    @overload
    def __get__(
        self, client: AsyncCoordinatorClient, owner: type | None = None
    ) -> Callable[P, Awaitable[AnswerT]]: ...
    def __get__(
        self, client: CoordinatorClient | AsyncCoordinatorClient | None, owner: type | None = None
    ) -> object:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> object:
            return client.send(self.build(*args, **kwargs))

        return method


class ListOperation(Generic[P, PageT, EntryT]):
    """A method that builds a listing and iterates over its entries, page after page."""

    def __init__(self, build: Callable[P, Listing[PageT, EntryT]]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self, client: CoordinatorClient, owner: type | None = None
    ) -> Callable[P, Iterator[EntryT]]: ...
    @overload
    def __get__(
        self, client: AsyncCoordinatorClient, owner: type | None = None
    ) -> Callable[P, AsyncIterator[EntryT]]: ...
    def __get__(
        self, client: CoordinatorClient | AsyncCoordinatorClient | None, owner: type | None = None
    ) -> object:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> object:
            return client.entries(self.build(*args, **kwargs))

        return method


class Operations:
    """What both clients can do; see `aqua_client.calls` for each."""

    report_producer = Operation(calls.report_producer)
    report_consumer = Operation(calls.report_consumer)
    heartbeat = Operation(calls.heartbeat)
    remove_producer = Operation(calls.remove_producer)
    remove_consumer = Operation(calls.remove_consumer)
    get_producer = Operation(calls.get_producer)
    get_consumer = Operation(calls.get_consumer)
    list_producers = ListOperation(calls.list_producers)
    list_consumers = ListOperation(calls.list_consumers)
    list_offers = ListOperation(calls.list_offers)
    update_offer = Operation(calls.update_offer)

    grant_lease = Operation(calls.grant_lease)
    renew_lease = Operation(calls.renew_lease)
    release_lease = Operation(calls.release_lease)
    revoke_lease = Operation(calls.revoke_lease)
    get_lease = Operation(calls.get_lease)
    list_leases = ListOperation(calls.list_leases)
    open_reclaim = Operation(calls.open_reclaim)
    get_reclaim = Operation(calls.get_reclaim)
    list_reclaims = ListOperation(calls.list_reclaims)

    put_placements = Operation(calls.put_placements)
    get_placements = Operation(calls.get_placements)
    put_profile = Operation(calls.put_profile)
    get_profiles = Operation(calls.get_profiles)
    healthz = Operation(calls.healthz)
    readyz = Operation(calls.readyz)


class _Client(Operations):
    """What both clients have: the address, and the rule of repetition with its randomness."""

    def __init__(self, url: str, retry: RetryRule, seed: int | None) -> None:
        self.url: Final = address_of(url)
        self._retry = retry
        self._random = Random(seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url})"

    def _pause_s(
        self, error: UnavailableError, attempt: int, began_s: float, *, repeatable: bool = True
    ) -> float:
        """Seconds until the next sending; raises the error if there is to be none."""
        pause_s = self._retry.pause_s(
            error,
            attempt=attempt,
            elapsed_s=time.monotonic() - began_s,
            random=self._random,
        )
        if pause_s is None or not repeatable:
            raise error
        return pause_s


class CoordinatorClient(_Client):
    """Calls to one coordinator (or a service of several); safe to share between threads.

    Args:
        url: `http://host:port` or `https://...`, without a path.
        token: Bearer token; None where the coordinator runs without authentication.
        ca_file: Certificates to trust instead of the system's, for https.
        timeout_s: Bound of a single sending.
        retry: When calls are repeated.
        seed: Of the jitter of pauses; None for one of its own.
        sleep: Waits between sendings; replaced in tests.
        transport: Replaces the network in tests.

    Raises:
        ConfigError: The address or the certificate file is no good.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryRule = DEFAULT_RETRY,
        seed: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, retry, seed)
        self._sleep = sleep
        self._http = httpx.Client(**options_of(url, token, ca_file, timeout_s), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Harmless when repeated."""
        self._http.close()

    def send(self, call: Call[AnswerT]) -> AnswerT:
        """Send one call, again if the rule says so.

        Raises:
            AquaError: What the coordinator refused with.
            UnavailableError: No answer, or not the answer of a coordinator.
        """
        began_s = time.monotonic()
        attempt = 1
        while True:
            try:
                return self._send_once(call)
            except UnavailableError as error:
                pause_s = self._pause_s(error, attempt, began_s, repeatable=call.repeatable)
            self._sleep(pause_s)
            attempt += 1

    def entries(self, listing: Listing[PageT, EntryT]) -> Iterator[EntryT]:
        """Entries of a listing; the next page is asked for when the one before is used up."""
        page = self.send(listing.first)
        yield from listing.entries(page)
        while page.next_cursor is not None:
            page = self.send(listing.page_at(page.next_cursor))
            yield from listing.entries(page)

    def events(self, *, after: str | None = None) -> Iterator[Event]:
        """Changes of the books as they happen, until the caller stops.

        A broken stream is taken up again behind the last event that was seen.

        Args:
            after: Id of an event; the stream begins behind it, or now.

        Raises:
            AquaError: What the coordinator refused with.
            UnavailableError: The stream broke, and again at each attempt to take it up.
        """
        began_s, attempt = time.monotonic(), 0
        while True:
            try:
                for event in self._stream_once(after):
                    after, began_s, attempt = event.event_id, time.monotonic(), 0
                    yield event
            except UnavailableError as error:
                attempt += 1
                pause_s = self._pause_s(error, attempt, began_s)
            self._sleep(pause_s)

    def _send_once(self, call: Call[AnswerT]) -> AnswerT:
        try:
            response = self._http.request(**request_of(call))
        except httpx.HTTPError as error:
            raise no_answer(self.url, error) from error
        return answer_of(call, response)

    def _stream_once(self, after: str | None) -> Iterator[Event]:
        try:
            with self._http.stream(**stream_request(after)) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield from filter(None, map(event_of, response.iter_lines()))
        except httpx.HTTPError as error:
            raise no_answer(self.url, error) from error
        raise stream_ended(self.url)


class AsyncCoordinatorClient(_Client):
    """`CoordinatorClient` for asyncio: the same methods, awaited or iterated with `async for`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryRule = DEFAULT_RETRY,
        seed: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, retry, seed)
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            **options_of(url, token, ca_file, timeout_s), transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Harmless when repeated."""
        await self._http.aclose()

    async def send(self, call: Call[AnswerT]) -> AnswerT:
        """As `CoordinatorClient.send`."""
        began_s = time.monotonic()
        attempt = 1
        while True:
            try:
                return await self._send_once(call)
            except UnavailableError as error:
                pause_s = self._pause_s(error, attempt, began_s, repeatable=call.repeatable)
            await self._sleep(pause_s)
            attempt += 1

    async def entries(self, listing: Listing[PageT, EntryT]) -> AsyncIterator[EntryT]:
        """As `CoordinatorClient.entries`."""
        page = await self.send(listing.first)
        for entry in listing.entries(page):
            yield entry
        while page.next_cursor is not None:
            page = await self.send(listing.page_at(page.next_cursor))
            for entry in listing.entries(page):
                yield entry

    async def events(self, *, after: str | None = None) -> AsyncIterator[Event]:
        """As `CoordinatorClient.events`."""
        began_s, attempt = time.monotonic(), 0
        while True:
            try:
                async for event in self._stream_once(after):
                    after, began_s, attempt = event.event_id, time.monotonic(), 0
                    yield event
            except UnavailableError as error:
                attempt += 1
                pause_s = self._pause_s(error, attempt, began_s)
            await self._sleep(pause_s)

    async def _send_once(self, call: Call[AnswerT]) -> AnswerT:
        try:
            response = await self._http.request(**request_of(call))
        except httpx.HTTPError as error:
            raise no_answer(self.url, error) from error
        return answer_of(call, response)

    async def _stream_once(self, after: str | None) -> AsyncIterator[Event]:
        try:
            async with self._http.stream(**stream_request(after)) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    if (event := event_of(line)) is not None:
                        yield event
        except httpx.HTTPError as error:
            raise no_answer(self.url, error) from error
        raise stream_ended(self.url)
