"""The model's traces against the real coordinator's books and the real producer's decisions.

Every situation that the model is made for is walked by its shortest path, and some hundred paths
drawn by a seed, with faults. Where code and model part, one of them is wrong.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any, Final

import pytest

from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from harness.bounds import HANG_S
from harness.lease_protocol import LeaseProtocol
from harness.lease_situations import SITUATIONS
from harness.lease_state import State
from harness.replay import LEFT_OUT, Replay, replay
from harness.slices import examples
from harness.state_search import explore
from harness.store_servers import KINDS, running_store

PATHS: Final = examples(20, whole=300)
PATH_STEPS: Final = 18
Path = list[tuple[str, State]]


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[EmbeddedValkey]:
    with running_store(request.param) as server:
        yield server


@pytest.fixture
async def pipeline(store: EmbeddedValkey) -> AsyncIterator[Pipeline]:
    pool = open_pool(store.url, connect_timeout_s=HANG_S, max_connections=2)
    pipeline = Pipeline(pool, timeout_s=HANG_S)
    pipeline.start()
    yield pipeline
    await pipeline.close()


def _drawn(seed: int) -> Path:
    chance, protocol = random.Random(f"path {seed}"), LeaseProtocol(faults=2)
    state, path = protocol.initial(), Path()
    for _ in range(PATH_STEPS):
        steps = [step for step in protocol.steps(state) if not LEFT_OUT.search(step[0])]
        path.append(chance.choice(steps))
        state = path[-1][1]
    return path


@cache
def _witnesses() -> dict[str, Path]:
    protocol = LeaseProtocol(faults=1)
    search = explore(protocol.initial(), protocol.steps, {})
    found: dict[str, Path] = {}
    for name, holds in SITUATIONS.items():
        state, path = protocol.initial(), Path()
        for step in search.path(next(at for at in search.came_from if holds(at))):
            state = next(after for name, after in protocol.steps(state) if name == step)
            path.append((step, state))
        if not any(LEFT_OUT.search(step) for step, _ in path):
            found[name] = path
    return found


async def _walk(pipeline: Pipeline, path: Path) -> list[str]:
    async def command(*words: str) -> Any:  # noqa: ANN401 - any reply
        return await pipeline.command(*words)

    return await replay(Ledger(pipeline), command, path, LeaseProtocol().initial())


async def test_every_situation_of_the_model_is_one_of_the_code(pipeline: Pipeline) -> None:
    witnesses = _witnesses()
    assert len(witnesses) >= len(SITUATIONS) - 1
    for name, path in witnesses.items():
        assert await _walk(pipeline, path) == [], (name, [step for step, _ in path])


async def test_code_follows_paths_of_the_model_with_faults(pipeline: Pipeline) -> None:
    for seed in range(PATHS):
        path = _drawn(seed)
        assert await _walk(pipeline, path) == [], (seed, [step for step, _ in path])


async def test_a_code_that_keeps_what_is_back_does_not_follow(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(self: Replay) -> None:
        del self

    monkeypatch.setattr(Replay, "report", say_nothing)
    assert any([await _walk(pipeline, _drawn(seed)) for seed in range(3)])
