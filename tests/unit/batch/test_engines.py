"""Which engine gets a request, by its model."""

from __future__ import annotations

import socket

import pytest

from aqua_batch.service.dispatch.engine_names import LOOKUP_S
from aqua_batch.service.dispatch.engines import (
    CLASS_HEADER,
    DEADLINE_HEADER,
    LONGEST_DEADLINE_S,
    EngineEndpoint,
    EnginePool,
    seconds_left,
)
from aqualib.engines.vllm.requests import deadline, service_class


@pytest.fixture
def pool() -> EnginePool:
    """Three engines with a place each that have told nothing yet."""
    urls = [f"http://engine-{number}" for number in range(3)]
    return EnginePool(urls, places=1, api_key=None, timeout_s=1.0, clock_s=lambda: 0.0)


def tell(engine: EngineEndpoint, *models: str) -> None:
    """Have an engine list these models; any, where it lists none."""
    engine.models = frozenset(models) or None
    engine.models_until_s = 10.0


def test_requests_go_to_engines_that_list_their_model_and_wait_where_all_are_full(
    pool: EnginePool,
) -> None:
    first, second, third = pool.engines
    tell(first, "a")
    tell(second, "b", "c")
    tell(third, "a", "b")
    assert {pool.take("a"), pool.take("a")} == {first, third}
    assert pool.take("a") is None
    assert pool.take("b") is second
    assert not any(pool.has_room(model) for model in ("a", "b", None))
    assert [pool.places_for(model) for model in ("a", "b", "c", None)] == [2, 2, 1, 3]


def test_an_engine_that_lists_nothing_gets_requests_of_any_model(pool: EnginePool) -> None:
    tell(pool.engines[0])
    assert pool.take("a") is pool.engines[0]


def test_a_model_of_no_engine_waits_until_all_have_told_and_is_then_refused_by_one(
    pool: EnginePool,
) -> None:
    for engine in pool.engines:
        assert pool.take("unknown") is None
        tell(engine, "a")
    assert pool.take("unknown") in pool.engines


def test_online_requests_go_to_an_engine_of_their_model_and_never_wait(pool: EnginePool) -> None:
    first, second, third = pool.engines
    assert pool.choose_online("b", []) in pool.engines
    tell(first, "a")
    tell(second, "b")
    second.online = 5
    assert pool.choose_online("b", []) is second
    assert pool.choose_online("b", [second]) is third, "it may have it"
    tell(third, "a")
    assert pool.choose_online("b", [second]) is None
    assert pool.choose_online("unknown", []) in {first, third}


class Names:
    """Who answers for names."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses

    async def __call__(self, host: str, port: int) -> list[str]:
        del port
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


async def test_a_name_stands_for_all_of_its_addresses_as_they_come_and_go() -> None:
    names, now_s = Names(llm=["127.0.0.1", "::1"]), 0.0
    urls = ["http://127.0.0.9:1", "dns+http://llm:1/v1", "dns+https://away"]
    pool = EnginePool(
        urls, places=1, api_key=None, timeout_s=1.0, clock_s=lambda: now_s, resolve=names
    )
    async with pool:
        assert sorted(urls_of(pool)) == sorted(
            ["http://127.0.0.9:1", "http://127.0.0.1:1", "http://[::1]:1"]
        )
        gone = next(each for each in pool.engines if each.url == "http://127.0.0.1:1")
        tell(gone, "a")
        assert pool.take("a") is gone
        names.addresses = {"llm": ["::1"], "away": ["10.0.0.1"]}
        await pool.look()
        assert len(pool.engines) == 3, "names are looked up every ten seconds"
        now_s = LOOKUP_S
        await pool.look()
        assert gone.is_leaving
        assert gone in pool.engines, "it has a request still"
        assert gone.room(now_s) == 0
        assert pool.choose_online("a", []) is not gone
        gone.running -= 1
        names.addresses = {}
        now_s = 2 * LOOKUP_S
        await pool.look()
        assert urls_of(pool) == ["http://127.0.0.9:1", "http://[::1]:1", "https://10.0.0.1:443"]
        assert pool.engines[2].server_name == "away", "its certificate is the name's"


def urls_of(pool: EnginePool) -> list[str]:
    return [each.url for each in pool.engines]


def test_engines_are_told_in_the_words_that_they_take() -> None:
    assert (CLASS_HEADER, DEADLINE_HEADER) == (service_class.HEADER, deadline.HEADER)
    assert LONGEST_DEADLINE_S <= deadline.MAX_FINISH_IN_S


@pytest.mark.parametrize(
    ("expires_s", "left_s"),
    [(1600.4, 600), (1000.0, 1), (0.0, 1), (1000.0 + 30 * 86_400, 2_419_200)],
)
def test_no_deadline_is_one_that_an_engine_refuses(expires_s: float, left_s: int) -> None:
    assert seconds_left(expires_s, now_s=1000.0) == left_s
