"""The two clients of the coordinator: the same operations, sent in two ways.

Each operation is declared once, as a function of `aqua_client.calls`; a descriptor turns it into a
method that sends the call, and the type checker sees the answer (or the awaitable) of each. A
client keeps its connections, is bounded in time on every call, and repeats by one rule: only calls
that may be repeated are, and only where that can help: no answer, or one that says "not now"
(`UnavailableError` and its children, HTTP 429 and 503). Of several coordinators over one Redis each
is tried once without a pause, so that one which is replaced costs nothing; what could not even be
sent moves on whatever it is. Between rounds the pause grows fourfold each time, is jittered so that
a cluster of clients does not come back in step, and is at least what the answer asks for
(`retry_after_s`, `Retry-After`), within the bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from aqua_client import calls
from aqua_client.calls import EntryT, PageT
from aqua_client.http import addresses_of, answer_of, as_no_answer, options_of, request_of, was_sent
from aqua_protocol.errors import UnavailableError

if TYPE_CHECKING:
    from aqua_client.calls import Call, Listing
    from aqua_client.tls import TlsFiles
    from aqua_client.tracing import Tracer

GROWTH: Final = 4
"""Factor from one pause to the next: the third attempt of a restart of the coordinator (about a
second) then falls behind it. Doubled, the bound of a pause is reached at once."""


@dataclass(frozen=True, slots=True)
class RetryRule:
    """Bounds of repetition.

    Attributes:
        max_attempts: Rounds of one call over all coordinators, the first included; 1 repeats
            nothing after a pause.
        first_pause_s: Before the second sending, before jitter.
        max_pause_s: Of any pause, also of one that the coordinator asks for.
    """

    max_attempts: int = 3
    first_pause_s: float = 0.05
    max_pause_s: float = 1.0

    def pause_s(self, error: UnavailableError, *, attempt: int, random: Random) -> float | None:
        """Return the seconds to wait after failed round `attempt`, from 1; None to give up."""
        if attempt >= self.max_attempts:
            return None
        grown_s: float = self.first_pause_s * GROWTH ** (attempt - 1)
        jittered_s = grown_s * random.uniform(0.5, 1.5)
        return min(max(jittered_s, error.retry_after_s or 0.0), self.max_pause_s)


DEFAULT_TIMEOUT_S: Final = 2.0
"""Bound of one sending: a coordinator answers in milliseconds, so a hung one is given up soon
enough for an engine to spill. Doubled, a member notices a hung coordinator twice as late."""
DEFAULT_RETRY: Final = RetryRule()

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")
SyncT = TypeVar("SyncT")
AsyncT = TypeVar("AsyncT")


class Operation(Generic[P, SyncT, AsyncT]):
    """A method that builds a call or a listing and hands it to its client's method `sender`."""

    def __init__(self, build: Callable[P, object], sender: str) -> None:
        self.build = build
        self._sender = sender
        self.__doc__ = build.__doc__

    @overload
    def __get__(
        self, client: CoordinatorClient, owner: type | None = None
    ) -> Callable[P, SyncT]: ...
    @overload
    def __get__(
        self, client: AsyncCoordinatorClient, owner: type | None = None
    ) -> Callable[P, AsyncT]: ...
    def __get__(self, client: object, owner: type | None = None) -> object:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> object:
            return getattr(client, self._sender)(self.build(*args, **kwargs))

        return method


def operation(build: Callable[P, Call[AnswerT]]) -> Operation[P, AnswerT, Awaitable[AnswerT]]:
    """Make the method of a single call."""
    return Operation(build, "send")


def listing(
    build: Callable[P, Listing[PageT, EntryT]],
) -> Operation[P, Iterator[EntryT], AsyncIterator[EntryT]]:
    """Make the method that iterates over the entries of a listing, page after page."""
    return Operation(build, "entries")


class Operations:
    """What both clients can do; see `aqua_client.calls` for each."""

    report_producer = operation(calls.report_producer)
    report_consumer = operation(calls.report_consumer)
    heartbeat = operation(calls.heartbeat)
    remove_producer = operation(calls.remove_producer)
    remove_consumer = operation(calls.remove_consumer)
    get_producer = operation(calls.get_producer)
    get_consumer = operation(calls.get_consumer)
    list_producers = listing(calls.list_producers)
    list_consumers = listing(calls.list_consumers)
    list_offers = listing(calls.list_offers)
    update_offer = operation(calls.update_offer)

    grant_lease = operation(calls.grant_lease)
    renew_lease = operation(calls.renew_lease)
    release_lease = operation(calls.release_lease)
    revoke_lease = operation(calls.revoke_lease)
    get_lease = operation(calls.get_lease)
    list_leases = listing(calls.list_leases)
    open_reclaim = operation(calls.open_reclaim)
    get_reclaim = operation(calls.get_reclaim)
    list_reclaims = listing(calls.list_reclaims)
    list_quotas = listing(calls.list_quotas)
    list_quarantine = listing(calls.list_quarantine)

    put_placements = operation(calls.put_placements)
    get_placements = operation(calls.get_placements)
    put_profile = operation(calls.put_profile)
    get_profiles = operation(calls.get_profiles)
    healthz = operation(calls.healthz)
    readyz = operation(calls.readyz)


class _Client(Operations):
    """What both clients have: the addresses, and the rule of repetition with its randomness.

    Attributes:
        url: The coordinator to ask next; at first any, so that clients spread over all.
    """

    def __init__(self, urls: str, retry: RetryRule, tracer: Tracer | None) -> None:
        self._addresses: Final = addresses_of(urls)
        self._tracer = tracer
        self._retry = retry
        self._random = Random()
        self.url = self._random.choice(self._addresses)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({','.join(self._addresses)})"

    @contextmanager
    def _sending(self, call: Call[AnswerT], address: str) -> Iterator[Mapping[str, str]]:
        """One sending, with the headers of its span if it is part of a trace; it begins none."""
        tracer = self._tracer
        with as_no_answer(address):
            if tracer is None or not tracer.is_within:
                yield {}
                return
            with tracer.span(
                call.method,
                kind="client",
                attributes={
                    "http.request.method": call.method,
                    "url.full": address + call.path,
                },
            ):
                yield tracer.headers()

    def _next(
        self, call: Call[AnswerT], address: str, error: UnavailableError, sent: int
    ) -> tuple[str, float]:
        """Where to send the call after sending `sent`, from 1, and after how many seconds.

        Raises:
            UnavailableError: Nowhere: the error.
        """
        rounds, others_asked = divmod(sent, len(self._addresses))
        pause_s: float | None = 0.0
        if not others_asked:
            pause_s = self._retry.pause_s(error, attempt=rounds, random=self._random)
            goes_on = call.repeatable
        else:
            goes_on = call.repeatable or call.elsewhere or not was_sent(error)
        if pause_s is None or not goes_on:
            raise error
        index = self._addresses.index(address) + 1
        self.url = self._addresses[index % len(self._addresses)]
        return self.url, pause_s


class CoordinatorClient(_Client):
    """Calls to a coordinator, or to several as if they were one; safe to share between threads.

    Args:
        url: `http://host:port` or `https://...`, without a path; several, separated by commas, of
            coordinators over one Redis.
        token: Bearer token; None where the coordinator runs without authentication.
        tls: Files for https; those of the environment if None.
        timeout_s: Bound of a single sending.
        retry: When calls are repeated.
        sleep: Waits between sendings; replaced in tests.
        tracer: Draws calls that are part of a trace; None where tracing is off.
        transport: Replaces the network in tests.

    Raises:
        ConfigError: The address or a TLS file is no good.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryRule = DEFAULT_RETRY,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(url, retry, tracer)
        self._sleep = sleep
        self._http = httpx.Client(
            **options_of(self._addresses, token, tls, timeout_s), transport=transport
        )

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
        address, sent = self.url, 1
        while True:
            try:
                with self._sending(call, address) as traced:
                    answer = self._http.request(**request_of(call, address, traced))
                    return answer_of(call, answer)
            except UnavailableError as error:
                address, pause_s = self._next(call, address, error, sent)
            if pause_s:
                self._sleep(pause_s)
            sent += 1

    def entries(self, listing: Listing[PageT, EntryT]) -> Iterator[EntryT]:
        """Iterate over a listing; the next page is asked for when the one before is used up."""
        call: Call[PageT] | None = listing.first
        while call is not None:
            page = self.send(call)
            yield from listing.entries(page)
            call = listing.after(page)


class AsyncCoordinatorClient(_Client):
    """`CoordinatorClient` for asyncio: the same methods, awaited or iterated with `async for`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryRule = DEFAULT_RETRY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(url, retry, tracer)
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            **options_of(self._addresses, token, tls, timeout_s), transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Harmless when repeated."""
        await self._http.aclose()

    async def send(self, call: Call[AnswerT]) -> AnswerT:
        """Work as `CoordinatorClient.send` does."""
        address, sent = self.url, 1
        while True:
            try:
                with self._sending(call, address) as traced:
                    answer = await self._http.request(**request_of(call, address, traced))
                    return answer_of(call, answer)
            except UnavailableError as error:
                address, pause_s = self._next(call, address, error, sent)
            if pause_s:
                await self._sleep(pause_s)
            sent += 1

    async def entries(self, listing: Listing[PageT, EntryT]) -> AsyncIterator[EntryT]:
        """Work as `CoordinatorClient.entries` does."""
        call: Call[PageT] | None = listing.first
        while call is not None:
            page = await self.send(call)
            for entry in listing.entries(page):
                yield entry
            call = listing.after(page)
