"""What one client does the other does: listings, errors, repetition and the stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import httpx
import pytest

from aqua_client import AsyncCoordinatorClient, CoordinatorClient, RetryRule
from aqua_protocol import CapacityError, UnavailableError
from aqua_protocol.leases import LeaseRequest

T = TypeVar("T")
Handler = Callable[[httpx.Request], httpx.Response]
URL = "http://coordinator:7700"
REQUEST = LeaseRequest(consumer_id="c", bytes=1)


class Driver:
    """Runs the same operation on either client; pauses take no time and are noted."""

    def __init__(self, handler: Handler, *, is_async: bool, retry: RetryRule) -> None:
        self.pauses: list[float] = []
        self._is_async = is_async
        self._handler = handler
        self._retry = retry

    def call(self, name: str, *args: object) -> Any:  # noqa: ANN401 - whatever is answered
        if not self._is_async:
            with self._sync() as client:
                return getattr(client, name)(*args)

        async def run() -> object:
            async with self._async() as client:
                return await getattr(client, name)(*args)

        return asyncio.run(run())

    def take(self, count: int, name: str, **options: object) -> list[Any]:
        if not self._is_async:
            with self._sync() as client:
                entries: Iterator[Any] = getattr(client, name)(**options)
                return list(islice(entries, count))

        async def run() -> list[Any]:
            async with self._async() as client:
                entries: AsyncIterator[Any] = getattr(client, name)(**options)
                taken = []
                async for entry in entries:
                    taken.append(entry)
                    if len(taken) == count:
                        break
                return taken

        return asyncio.run(run())

    def _sync(self) -> CoordinatorClient:
        return CoordinatorClient(
            URL,
            retry=self._retry,
            sleep=self.pauses.append,
            transport=httpx.MockTransport(self._handler),
        )

    def _async(self) -> AsyncCoordinatorClient:
        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        return AsyncCoordinatorClient(
            URL,
            retry=self._retry,
            sleep=sleep,
            transport=httpx.MockTransport(self._handler),
        )


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def drive(request: pytest.FixtureRequest) -> Callable[..., Driver]:
    def make(handler: Handler, *, retry: RetryRule | None = None) -> Driver:
        return Driver(handler, is_async=request.param, retry=retry or RetryRule())

    return make


def refusal(status: int, code: str, **more: object) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "message": "told so", **more})


def offer(name: str) -> dict[str, Any]:
    sizes = {"offered_bytes": 2, "leased_bytes": 1, "free_bytes": 1}
    return {"producer_id": name, "domain": "d", "grantable": True, **sizes}


def test_a_listing_goes_on_until_there_is_no_cursor(drive: Callable[..., Driver]) -> None:
    pages = {None: (["a", "b"], "b"), "b": ([], "c"), "c": (["d"], None)}
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        cursor = request.url.params.get("cursor")
        asked.append(request.url.params["limit"])
        names, goes_on = pages[cursor]
        return httpx.Response(
            200, json={"offers": [offer(name) for name in names], "next_cursor": goes_on}
        )

    driver = drive(handler)
    assert [entry.producer_id for entry in driver.take(100, "list_offers")] == ["a", "b", "d"]
    assert asked == ["1000"] * 3
    asked.clear()
    assert len(driver.take(1, "list_offers")) == 1
    assert len(asked) == 1, "a page is asked for only when it is needed"


def test_a_refusal_arrives_as_its_type_and_is_not_repeated(drive: Callable[..., Driver]) -> None:
    driver = drive(lambda _: refusal(409, "capacity_exhausted", details={"free": 3}))
    with pytest.raises(CapacityError, match="told so") as raised:
        driver.call("grant_lease", REQUEST)
    assert raised.value.details == {"free": 3}
    assert driver.pauses == []


@pytest.mark.parametrize("status", [429, 503])
def test_a_proxy_that_asks_for_patience_gets_it(drive: Callable[..., Driver], status: int) -> None:
    answers = [
        httpx.Response(status, headers={"Retry-After": "1"}, text="busy"),
        httpx.Response(status, headers={"Retry-After": "Sun, 22 Nov 2026 10:00:00 GMT"}),
        httpx.Response(200, json={"status": "ready", "version": "0.1.0"}),
    ]
    driver = drive(lambda _: answers.pop(0))
    assert driver.call("readyz").status == "ready"
    assert driver.pauses[0] == 1.0
    assert driver.pauses[1] < 1.0


def test_a_connection_that_fails_is_tried_again_in_bounds(drive: Callable[..., Driver]) -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        raise httpx.ConnectError("refused", request=request)

    driver = drive(handler)
    with pytest.raises(UnavailableError, match=f"no answer from the coordinator at {URL}"):
        driver.call("grant_lease", REQUEST)
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert len(driver.pauses) == 2
