"""Which engine gets a request, by its model."""

from __future__ import annotations

import pytest

from aqua_batch.service.engines import EngineEndpoint, EnginePool


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
