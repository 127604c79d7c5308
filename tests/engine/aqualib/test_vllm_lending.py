"""A vLLM (CPU build) that lends its KV cache: outputs are those of one that never did.

Greedy outputs are compared token by token with an engine whose cache is always whole. Memory that
is lent is unmapped, so an engine that touched it would not answer wrongly, it would crash.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from aqua_protocol import MIB
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.producer.copy_limit import FIRST_RATE, MIN_RATE
from harness.block_pool import PaperPool
from harness.bounds import until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.holder_process import HolderProcess
from harness.lender_process import LenderProcess
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import SLOWED, Scenario, VllmProgram, run

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


RANKS: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Without the first, a build for CPUs wants a NUMA node for every rank."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


def waves(model: str, **changes: Any) -> Scenario:  # noqa: ANN401 - fields of a scenario
    """24 requests; when only the last of them run, the same again."""
    scenario = Scenario(
        model,
        engine={"num_gpu_blocks_override": BLOCKS},
        request_count=24,
        wave_at_step=120,
    )
    return dataclasses.replace(scenario, **changes)


def lending(model: str, **changes: Any) -> Scenario:  # noqa: ANN401 - as above
    return waves(model, lend=LEND, await_offered_bytes=LENT, offers_before_wave=True, **changes)


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


def assert_took_back(
    answer: dict[str, Any], stock: dict[str, list[int]], *, waves: int = 2, lent: int = LENT
) -> None:
    """Every request was answered as without lending, and each wave really took memory back."""
    assert answer["tokens"] == stock
    assert answer["reclaims"] >= waves, answer
    assert answer["reclaimed_bytes"] >= lent + waves - 1, answer
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


def test_with_turns_and_paging_and_a_coordinator_that_dies_it_answers_as_ever(
    model: str, stock: dict[str, list[int]], sockets: str, coordinator: CoordinatorProcess
) -> None:
    turns = {
        "policy": "cfs",
        "slice_iterations": 4,
        "granularity_tokens": 0,
        "store_bytes": "16MiB",
        "is_offline": True,
    }
    # Whoever takes turns waits nearly to the end, so nothing is offered between the waves.
    scenario = dataclasses.replace(lending(model, aqua=turns), offers_before_wave=False)
    with VllmProgram(scenario, **environment(sockets, coordinator.url)) as program:
        program.until("offered")
        with HolderProcess(coordinator.url, LENT, SLAB) as holder:
            coordinator.kill()
            program.go_on()
            answer = program.until("done")
            assert_took_back(answer, stock, waves=1)
            assert answer["forced"] > 0, "nobody was put out: a slice ended while memory was lent"
            assert answer["paging"]["restored_tokens"] > 0, "nothing came back from host memory"
            assert holder.look()["intact"], "the borrower lost bytes"


def test_memory_of_a_borrower_that_is_killed_comes_back(
    model: str, stock: dict[str, list[int]], sockets: str, coordinator: CoordinatorProcess
) -> None:
    with VllmProgram(lending(model), **environment(sockets, coordinator.url)) as program:
        program.until("offered")
        with HolderProcess(coordinator.url, LENT, SLAB) as holder:
            holder.kill()
            program.go_on()
            assert_took_back(program.until("done"), stock)


def test_without_a_coordinator_and_with_a_prefix_cache_it_answers_as_ever(
    model: str, stock: dict[str, list[int]], sockets: str
) -> None:
    engine = {"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": True}
    with VllmProgram(lending(model, engine=engine), **environment(sockets)) as program:
        assert program.until("offered")["leased_bytes"] == 0
        program.go_on()
        assert_took_back(program.until("done"), stock)


def test_one_engine_lends_to_another_and_takes_back_while_both_work(
    model: str, stock: dict[str, list[int]], sockets: str, coordinator: CoordinatorProcess
) -> None:
    alone = run(Scenario(model))["tokens"]
    turns = {"policy": "cfs", "slice_iterations": 4, "granularity_tokens": 0, "store_bytes": LENT}
    borrower = Scenario(model, aqua=turns, await_leased_bytes=LENT, pause_at_step=60)
    borrowing = {
        **environment(sockets, coordinator.url),
        "AQUA_GPU_UUID": "GPU-borrower",
        "AQUA_WANTED_BYTES": str(LENT),
        "AQUA_MEMBER": "borrower",
    }
    with VllmProgram(lending(model), **environment(sockets, coordinator.url)) as lender:
        lender.until("offered")
        with VllmProgram(borrower, **borrowing) as program:
            before = program.until("paused")
            assert before["leased_bytes"] == LENT
            consumers = coordinator.get("consumers")["consumers"]
            assert [one["consumer_id"] for one in consumers] == ["borrower"]
            assert before["location"] == "peer"
            lender.go_on()
            program.go_on()
            answer = program.until("done")
            assert_took_back(lender.until("done"), stock)
            assert answer["tokens"] == alone
            assert answer["paging"]["restored_tokens"] > 300, answer
            assert answer["drained_bytes"] > 0, "nothing was paged where it was taken back"


def test_one_engine_lends_while_it_is_idle_and_borrows_while_it_is_busy(
    model: str, stock: dict[str, list[int]], sockets: str, coordinator: CoordinatorProcess
) -> None:
    turns = {"policy": "cfs", "slice_iterations": 4, "granularity_tokens": 0, "store_bytes": LENT}
    scenario = dataclasses.replace(
        lending(model, aqua=turns),
        offers_before_wave=False,
        pause_at_step=60,
        joins_at_pause=True,
        await_leased_bytes=LENT,
    )
    variables = environment(sockets, coordinator.url) | {
        "AQUA_WANTED_BYTES": str(LENT),
        "AQUA_MEMBER": "both",
    }
    other = Path(sockets) / "other.sock"
    with (
        LenderProcess(
            other, slab_bytes=SLAB, slab_count=5, url=coordinator.url, producer_id="other"
        ),
        VllmProgram(scenario, **variables) as program,
    ):
        idle = program.until("offered")
        assert idle["leased_bytes"] == 0, "what it borrowed went back before it offered"
        program.go_on()
        busy = program.until("paused")
        assert busy["running"] > 0
        program.go_on()  # It waits for leases, which begin when all of its own memory is back.
        answer = program.until("done")
        assert_took_back(answer, stock, waves=1)
        assert answer["paging"]["restored_tokens"] > 0, answer


@pytest.mark.parametrize("width", ["tensor_parallel_size"])
def test_all_ranks_of_an_engine_lend_the_same_blocks_and_take_them_back(
    model: str, sockets: str, coordinator: CoordinatorProcess, width: str
) -> None:
    engine = {"num_gpu_blocks_override": BLOCKS, width: 2}
    each = 2 * SLAB
    lend = {**LEND, "bytes": each}
    scenario = dataclasses.replace(
        lending(model, engine=engine), lend=lend, await_offered_bytes=each
    )
    variables = environment(sockets, coordinator.url) | RANKS | {"AQUA_MEMBER": "llama"}
    with VllmProgram(scenario, **variables) as program:
        idle = program.until("offered")
        producers = coordinator.get("producers")["producers"]
        assert [one["producer_id"] for one in producers] == ["llama.0", "llama.1"]
        # Half of a block is on each rank.
        assert idle["absent_blocks"] == each // (32 << 10)
        with HolderProcess(coordinator.url, 2 * each, SLAB) as holder:
            assert holder.look()["leased_bytes"] == 2 * each, "each rank lends its own"
            program.go_on()
            answer = program.until("done")
            assert holder.look()["intact"], "the borrower lost bytes"
    stock = run(waves(model, engine=engine), **RANKS)["tokens"]
    assert_took_back(answer, stock, lent=each)


def test_copies_of_all_ranks_give_way_when_they_slow_one_of_them(
    model: str, sockets: str, coordinator: CoordinatorProcess
) -> None:
    scenario = Scenario(
        model,
        engine={"num_gpu_blocks_override": BLOCKS, "tensor_parallel_size": 2},
        lend={**LEND, "bytes": SLAB},
        lending_worker="harness.slowed_worker.SlowedWorker",
        await_offered_bytes=SLAB,
        request_count=1,
        output_tokens=400,
        rounds=100,  # It is killed before.
    )
    slowed = Path(sockets) / "slowed"
    variables = environment(sockets, coordinator.url) | RANKS
    # A busy machine harms steps, too, but not by half.
    variables |= {"AQUA_MEMBER": "llama", "AQUA_HARM_SHARE": "0.5", SLOWED: str(slowed)}
    with VllmProgram(scenario, **variables) as program:
        program.until("offered")
        with HolderProcess(coordinator.url, 2 * SLAB, SLAB) as holder:

            def rates() -> list[float | None]:
                paces = holder.paces()
                assert set(paces) == {"llama.0", "llama.1"}
                return [*paces.values()]

            program.go_on()
            until(lambda: rates() == [0.0, 0.0], "both are measured without copies first")
            until(lambda: min(rate or 0.0 for rate in rates()) > FIRST_RATE, "nothing is slowed")
            slowed.touch()
            until(lambda: rates() == [MIN_RATE, MIN_RATE], "copies give way as far as they can")


def test_the_pool_on_paper_is_vllms_as_far_as_lending_uses_it() -> None:
    from vllm.v1.core.block_pool import BlockPool

    real: Any = BlockPool(40, enable_caching=True, hash_block_size=16)
    paper = PaperPool(40)
    rng = random.Random(5)
    limits = [BlockLimit(pool, 3) for pool in (real, paper)]
    held: list[tuple[list[Any], list[Any]]] = []
    for step in range(400):
        match rng.choice(["take", "take", "free", "free", "lower", "settle", "give back"]):
            case "take" if real.get_num_free_blocks() >= 4:
                held.append((real.get_new_blocks(4), paper.get_new_blocks(4)))
            case "free" if held:
                ours, theirs = held.pop(rng.randrange(len(held)))
                real.free_blocks(ours)
                paper.free_blocks(theirs)
            case "lower":
                limit = rng.randrange(1, 40)
                for each in limits:
                    each.lower(limit, step)
            case "settle":
                for each in limits:
                    each.settle(step)
            case "give back":
                blocks = np.arange(40) >= rng.randrange(40)
                for each in limits:
                    each.give_back(blocks)
        assert list(limits[0].out) == list(limits[1].out)
        assert [b.ref_cnt for b in real.blocks[1:]] == [b.ref_cnt for b in paper.blocks[1:]]
        free = [block.block_id for block in real.free_block_queue.get_all_free_blocks()]
        assert free == [block.block_id for block in paper.free]
        assert real.num_gpu_blocks == paper.num_gpu_blocks
        assert real.get_usage() == paper.get_usage()


def test_a_lent_block_answers_no_prefix_and_the_cache_can_be_reset() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool: Any = BlockPool(8, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(7)
    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(bytes([block.block_id])), 0)
        pool._insert_block_hash(key, block, num_tokens=16)
    pool.free_blocks(blocks)
    limit = BlockLimit(pool, 0)
    limit.lower(5, 0)
    found = [i for i in range(1, 8) if pool.get_cached_block(BlockHash(bytes([i])), [0])]
    assert found == [1, 2, 3, 4]
    assert pool.get_usage() == 0
    assert pool.reset_prefix_cache()
    limit.give_back(np.ones(8, np.bool_))
    assert pool.get_num_free_blocks() == 7
