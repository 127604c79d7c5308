"""Several coordinators over one Redis, to both clients: which is asked, how often, and for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httpx
import pytest

from aqua_client import AsyncCoordinatorClient, CoordinatorClient, RetryRule
from aqua_protocol import CapacityError, ConfigError, UnavailableError
from aqua_protocol.leases import LeaseRequest
from aqua_protocol.members import Heartbeat

NAMES: Final = ("one", "two", "three")
URLS: Final = ",".join(f"http://{name}:7700" for name in NAMES)
REQUEST: Final = LeaseRequest(consumer_id="c", bytes=1)
CAPACITY: Final = {"code": "capacity_exhausted", "message": "full"}
HEALTH: Final = {"status": "ready", "version": "0.1.0"}
Handler = Callable[[httpx.Request], httpx.Response]


class Fleet:
    """Coordinators of which some are away, and who was asked; pauses take no time.

    Attributes:
        away: What happens to requests to those that are away.
    """

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self.away: dict[str, Callable[[httpx.Request], httpx.Response]] = {}
        self.asked: list[str] = []
        self.pauses: list[int] = []

    def run(self, *calls: tuple[Any, ...]) -> Any:  # noqa: ANN401 - whatever is answered
        """Make the calls with one client; gives the last answer."""
        if not self._is_async:
            with CoordinatorClient(
                URLS,
                sleep=lambda _: self.pauses.append(len(self.asked)),
                transport=httpx.MockTransport(self._handle),
            ) as client:
                return [getattr(client, name)(*args) for name, *args in calls][-1]

        async def sleep(_: float) -> None:
            self.pauses.append(len(self.asked))

        async def run() -> object:
            async with AsyncCoordinatorClient(
                URLS, sleep=sleep, transport=httpx.MockTransport(self._handle)
            ) as client:
                return [await getattr(client, name)(*args) for name, *args in calls][-1]

        return asyncio.run(run())

    def all_away(self, how: Handler) -> None:
        self.away = dict.fromkeys(NAMES, how)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        if host in self.away:
            return self.away[host](request)
        return httpx.Response(200, json=HEALTH)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return Fleet(is_async=request.param)


def refuse_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def hang_up(request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("hung up", request=request)


def stopping(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503, json={"code": "service_unavailable", "message": "stopping"})


@pytest.mark.parametrize("how", [refuse_connection, hang_up, stopping])
def test_the_next_one_is_asked_at_once_and_from_then_on(fleet: Fleet, how: Handler) -> None:
    away = NAMES[:2]
    fleet.away = dict.fromkeys(away, how)
    fleet.run(*[("readyz",)] * 5)
    assert fleet.pauses == []
    assert fleet.asked[-5:] == ["three"] * 5
    assert len(fleet.asked) <= 7


def test_a_round_over_all_comes_before_a_pause_and_rounds_are_bounded(fleet: Fleet) -> None:
    fleet.all_away(stopping)
    with pytest.raises(UnavailableError):
        fleet.run(("readyz",))
    assert len(fleet.asked) == RetryRule().max_attempts * len(NAMES)
    assert fleet.pauses == [3, 6]
    assert {*fleet.asked[:3]} == {*fleet.asked[3:6]} == {*NAMES}


@pytest.mark.parametrize("how", [refuse_connection, hang_up, stopping])
def test_a_report_goes_to_each_once_and_is_not_repeated_later(fleet: Fleet, how: Handler) -> None:
    fleet.all_away(how)
    with pytest.raises(UnavailableError):
        fleet.run(("heartbeat", Heartbeat()))
    assert sorted(fleet.asked) == sorted(NAMES)
    assert fleet.pauses == []


@pytest.mark.parametrize(("how", "sendings"), [(refuse_connection, 3), (hang_up, 1), (stopping, 1)])
def test_what_must_happen_once_goes_elsewhere_only_if_it_was_not_sent(
    fleet: Fleet, how: Handler, sendings: int
) -> None:
    fleet.all_away(how)
    with pytest.raises(UnavailableError):
        fleet.run(("revoke_lease", "lease", 1))
    assert len(fleet.asked) == sendings


def test_a_refusal_is_the_answer_of_all(fleet: Fleet) -> None:
    fleet.all_away(lambda _: httpx.Response(409, json=CAPACITY))
    with pytest.raises(CapacityError):
        fleet.run(("grant_lease", REQUEST))
    assert len(fleet.asked) == 1


def test_a_grant_has_the_same_key_everywhere(fleet: Fleet) -> None:
    keys = set()

    def hang_up_and_note(request: httpx.Request) -> httpx.Response:
        keys.add(request.headers["Idempotency-Key"])
        return hang_up(request)

    fleet.all_away(hang_up_and_note)
    with pytest.raises(UnavailableError):
        fleet.run(("grant_lease", REQUEST))
    assert len(keys) == 1


def test_clients_spread_over_all() -> None:
    first = {CoordinatorClient(URLS).url for _ in range(100)}
    assert first == set(URLS.split(","))


@pytest.mark.parametrize("urls", ["http://one,", "http://one,two", ",", "http://one;http://two"])
def test_each_address_is_checked(urls: str) -> None:
    with pytest.raises(ConfigError, match="AQUA_COORDINATOR_URL"):
        CoordinatorClient(urls)
