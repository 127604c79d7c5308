"""A vLLM (CPU build) that lends its KV cache: outputs are those of one that never did.

Greedy outputs are compared token by token with an engine whose cache is always whole. Memory that
is lent is unmapped, so an engine that touched it would not answer wrongly, it would crash.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from aqua_protocol import MIB
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.holder_process import HolderProcess
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import Scenario, VllmProgram, run

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

SLAB: Final = MIB
BLOCKS: Final = 128
"""8 MiB. The longest request needs 16 of them, a wave of 24 requests more than what is left."""

LENT: Final = 5 * MIB
LEND: Final = {"bytes": LENT, "reserve_bytes": 0, "calm_s": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


def waves(model: str, **changes: Any) -> Scenario:  # noqa: ANN401 - fields of a scenario
    """24 requests; when only the last of them run, the same again."""
    scenario = Scenario(
        model,
        engine={"num_gpu_blocks_override": BLOCKS},
        request_count=24,
        wave_at_step=150,
    )
    return dataclasses.replace(scenario, **changes)


def lending(model: str, **changes: Any) -> Scenario:  # noqa: ANN401 - as above
    return waves(model, lend=LEND, await_offered_bytes=LENT, offer_at_step=140, **changes)


@pytest.fixture(scope="module")
def stock(model: str) -> dict[str, list[int]]:
    """What vLLM answers by itself."""
    tokens: dict[str, list[int]] = run(waves(model))["tokens"]
    outputs = [tuple(tokens[f"0-{index}"]) for index in range(24)]
    assert len(set(outputs)) == len(outputs), "degenerate outputs would prove nothing"
    assert len(tokens) == 48
    return tokens


@pytest.fixture
def sockets() -> Iterator[str]:
    """A path short enough for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with ExitStack() as stack:
        yield stack.enter_context(CoordinatorProcess(stack.enter_context(data_dir())))


def environment(sockets: str, url: str = "http://127.0.0.1:9") -> dict[str, str]:
    return {
        "AQUA_COORDINATOR_URL": url,
        "AQUA_SLAB_BYTES": str(SLAB),
        "AQUA_HEARTBEAT_S": "0.1",
        "AQUA_SOCKET_DIR": sockets,
        "AQUA_NODE": "node",
        "AQUA_DOMAIN": "domain",
        "AQUA_GPU_UUID": "GPU-lender",
    }


def assert_took_back(answer: dict[str, Any], stock: dict[str, list[int]]) -> None:
    """Every request was answered as without lending, and both waves really took memory back."""
    assert answer["tokens"] == stock
    assert answer["reclaims"] >= 2, answer
    assert answer["reclaimed_bytes"] > LENT, answer
    assert answer["usage"] < 0.01, "no block is lost"


def test_an_engine_that_lends_and_takes_back_in_the_middle_answers_as_ever(
    model: str, stock: dict[str, list[int]], sockets: str, coordinator: CoordinatorProcess
) -> None:
    with VllmProgram(lending(model), **environment(sockets, coordinator.url)) as program:
        idle = program.until("offered")
        assert idle["pool_blocks"] == BLOCKS - idle["absent_blocks"] == BLOCKS - LENT // (64 << 10)
        assert idle["usage"] == 0, "what is lent is not in use by the engine"
        with HolderProcess(coordinator.url, LENT, SLAB) as holder:
            assert holder.look()["leased_bytes"] == LENT
            assert holder.look()["spilled_bytes"] == 0
            program.go_on()
            answer = program.until("done")
            assert_took_back(answer, stock)
            assert holder.look()["intact"], "the borrower lost bytes"
