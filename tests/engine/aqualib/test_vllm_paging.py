"""A stock vLLM (CPU build) under Aqua: outputs are those of an engine that was never preempted.

Greedy outputs are compared token by token with vLLM's own scheduler on the same requests. Since
recomputing gives the same outputs, each test also asserts that blocks really came back from the
store, and `zeroes_loads` shows that outputs depend on what came back.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import Any, Final

import pytest

from harness.coordinator_process import CoordinatorProcess
from harness.engine_cluster import SLAB, SLABS, WANTED, EngineCluster
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import Scenario, VllmProgram, run

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ROOM: Final[dict[str, Any]] = {
    "policy": "cfs",
    "slice_iterations": 4,
    "granularity_tokens": 0,
    "store_bytes": "16MiB",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


def on_host(model: str, **aqua: Any) -> Scenario:  # noqa: ANN401 - options of the adapter
    return Scenario(model, aqua={**ROOM, "is_offline": True, **aqua})


def on_peer(model: str, **aqua: Any) -> Scenario:  # noqa: ANN401 - as above
    return Scenario(model, aqua={**ROOM, **aqua}, await_leased_bytes=WANTED, pause_at_step=60)


def assert_paged(answer: dict[str, Any], *, forced: int = 10) -> None:
    """The load really happened, and nothing is held for requests that are gone."""
    assert answer["forced"] >= forced, answer
    assert answer["paging"]["restored_tokens"] > 30 * forced, answer
    assert answer["paged_blocks"]["in"] > forced, answer
    assert answer["paged_blocks"]["out"] > forced, answer
    assert answer["held_places"] == 0, answer


def test_swapped_requests_answer_as_if_never_preempted(
    model: str, stock: dict[str, list[int]]
) -> None:
    answer = run(on_host(model), AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock
    assert_paged(answer, forced=100)
    assert answer["failures"] == {}
    assert answer["paging"]["clean_blocks"] > 0, "full blocks are paged out once only"


@pytest.mark.parametrize("load", ["sync", "async"])
def test_steps_that_page_nothing_run_without_the_connector(
    model: str, stock: dict[str, list[int]], load: str
) -> None:
    worker = {"worker_cls": "harness.resting_worker.RestCountingWorker"}
    answer = run(dataclasses.replace(on_host(model, load=load), engine=worker))
    assert answer["tokens"] == stock
    assert_paged(answer, forced=100)
    found = answer["steps_found"]
    assert min(found["none"], found["a connector"]) > 50, found
    counted = answer["metrics"]["aqua:kv_paged_in_bytes_total"]
    assert counted > 0, "what workers count is told though some steps tell nothing"


def test_a_plan_of_nothing_is_the_same_one_in_each_process() -> None:
    from aqualib.engines.vllm.connector import NOTHING_PLANNED, AquaPagingPlan

    assert pickle.loads(pickle.dumps(NOTHING_PLANNED)) is NOTHING_PLANNED  # noqa: S301 - our own
    other = pickle.loads(pickle.dumps(AquaPagingPlan(drops=[1])))  # noqa: S301 - our own
    assert other == AquaPagingPlan(drops=[1])
    assert NOTHING_PLANNED.is_empty
    assert not other.is_empty


def test_what_a_step_reads_is_there_before_a_full_graph_is_replayed() -> None:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext

    from aqualib.engines.vllm.connector import asks_for_layers

    asking = ForwardContext(
        no_compile_layers={},
        attn_metadata={"layer": object()},
        slot_mapping={},
        cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
    )
    assert asks_for_layers(asking)
    replayed = dataclasses.replace(asking, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    assert not asks_for_layers(replayed)
    assert not asks_for_layers(dataclasses.replace(asking, attn_metadata=None)), "a second runner's"


@pytest.mark.parametrize("is_lent", [False, True])
def test_blocks_that_come_layer_by_layer_answer_as_if_never_preempted(
    model: str,
    stock: dict[str, list[int]],
    request: pytest.FixtureRequest,
    *,
    is_lent: bool,
) -> None:
    if is_lent:
        _, _, environment = request.getfixturevalue("cluster")
        scenario = dataclasses.replace(on_peer(model, load="sync"), pause_at_step=0)
    else:
        environment = {"AQUA_SLAB_BYTES": str(SLAB)}
        scenario = on_host(model, load="sync")
    cut = dataclasses.replace(scenario, cuts_loads=True)
    answer = run(cut, **environment)
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["failures"] == {}
    assert answer["cut"]["columns"] > 100, answer["cut"]
    assert answer["cut"]["waits"] > 100, "vLLM asked for the layers of such steps"
    zeroed = run(dataclasses.replace(cut, zeroes_loads=True), **environment)
    assert zeroed["tokens"] != stock, "loads decide nothing"


def test_first_tokens_first_answers_as_if_never_preempted(
    model: str, stock: dict[str, list[int]]
) -> None:
    scenario = on_host(model, policy="first-token", slice_iterations=2, stint_tokens=16)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock
    assert_paged(answer, forced=3)


def test_checkpointed_requests_answer_as_if_never_preempted(
    model: str, stock: dict[str, list[int]]
) -> None:
    answer = run(on_host(model, mode="checkpoint"), AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["paging"]["checkpointed_blocks"] > 20


def test_two_workers_answer_as_if_never_preempted(model: str) -> None:
    # Each has its shard of every block in a store of its own, and one table counts for both.
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0|{min(1, (os.cpu_count() or 1) - 1)}"}
    stock = run(Scenario(model, engine=engine), **cores)["tokens"]
    aqua = {**ROOM, "is_offline": True}
    answer = run(Scenario(model, engine=engine, aqua=aqua), AQUA_SLAB_BYTES=str(SLAB), **cores)
    assert answer["tokens"] == stock
    assert answer["forced"] >= 10, answer
    assert answer["paging"]["restored_tokens"] > 300, answer
    assert answer["metrics"]["aqua:kv_paged_in_bytes_total"] > 0, answer
    assert answer["held_places"] == 0, answer


@pytest.mark.parametrize("mode", ["swap", "checkpoint"])
def test_loads_beside_the_model_answer_as_if_never_preempted(
    model: str, stock: dict[str, list[int]], mode: str
) -> None:
    scenario = on_host(model, mode=mode, load="async", max_loading_blocks=12)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock
    assert_paged(answer)


@pytest.mark.parametrize("aqua", [{}, {"mode": "checkpoint"}, {"max_loading_blocks": 12}])
def test_asynchronous_scheduling_answers_as_if_never_preempted(
    model: str, stock: dict[str, list[int]], aqua: dict[str, Any]
) -> None:
    scenario = dataclasses.replace(on_host(model, **aqua), overlaps_steps=True)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert answer["scheduler"] == "AsyncAquaScheduler"
    assert answer["tokens"] == stock
    assert_paged(answer)


def test_zeroed_loads_change_the_answers(model: str, stock: dict[str, list[int]]) -> None:
    scenario = dataclasses.replace(on_host(model), zeroes_loads=True)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert_paged(answer)
    same = sum(answer["tokens"][name] == tokens for name, tokens in stock.items())
    assert same <= len(stock) // 4, f"{same} of {len(stock)} outputs do not depend on loads"


@pytest.mark.parametrize(
    ("overlaps_steps", "caches_prefixes"), [(False, False), (True, False), (True, True)]
)
def test_blocks_that_fail_their_checksum_are_computed_again(
    model: str, stock: dict[str, list[int]], *, overlaps_steps: bool, caches_prefixes: bool
) -> None:
    scenario = dataclasses.replace(
        on_host(model),
        engine={"enable_prefix_caching": caches_prefixes},
        spoil_at_step=60,
        overlaps_steps=overlaps_steps,
    )
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB), AQUA_CHECKSUM="1")
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["failures"].get("checksum_mismatch", 0) > 0, answer
    assert answer["paging"]["lost_blocks"] > 0


def test_beside_another_connector_it_answers_as_if_never_preempted(
    model: str, stock: dict[str, list[int]]
) -> None:
    scenario = dataclasses.replace(on_host(model), is_beside=True, spoil_at_step=60)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB), AQUA_CHECKSUM="1")
    assert answer["tokens"] == stock
    assert_paged(answer, forced=100)
    assert answer["paging"]["lost_blocks"] > 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_aborted_requests_leave_nothing_behind_and_the_others_alone(
    model: str, stock: dict[str, list[int]], load: str
) -> None:
    scenario = dataclasses.replace(on_host(model, load=load), abort_at_step=60)
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert set(answer["tokens"]) < set(stock)
    assert answer["tokens"].items() <= stock.items()
    assert_paged(answer)


def test_without_a_store_preempted_requests_are_computed_again(
    model: str, stock: dict[str, list[int]]
) -> None:
    answer = run(on_host(model, mode="recompute"))
    assert answer["tokens"] == stock
    assert answer["forced"] > 10
    assert answer["paging"]["restored_tokens"] == 0


def test_a_store_that_is_too_small_pages_what_fits(model: str, stock: dict[str, list[int]]) -> None:
    answer = run(on_host(model, store_bytes="1MiB"), AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock
    assert answer["paging"]["unsaved_blocks"] > 0
    assert answer["held_places"] == 0


def test_prefixes_of_finished_requests_are_loaded_by_later_ones(
    model: str,
) -> None:
    plain = Scenario(model, shared_tokens=96, rounds=2)
    tier = dataclasses.replace(on_host(model, prefix_tier=True), shared_tokens=96, rounds=2)
    stock_answer = run(plain)
    answer = run(tier, AQUA_SLAB_BYTES=str(SLAB))
    assert answer["tokens"] == stock_answer["tokens"]
    assert answer["paging"]["kept_blocks"] > 0
    assert answer["paging"]["prefix_hit_tokens"] >= 12 * 96, "the second round finds every prefix"
    zeroed = run(dataclasses.replace(tier, zeroes_loads=True), AQUA_SLAB_BYTES=str(SLAB))
    assert zeroed["tokens"] != answer["tokens"], "hits decide nothing"


def test_evicted_requests_answer_as_if_they_never_were(
    model: str, stock: dict[str, list[int]]
) -> None:
    # Few enough that nothing else has KV come back. In the second round it comes back as zeroes.
    scenario = dataclasses.replace(
        on_host(model, policy="fcfs"),
        request_count=3,
        evict_at_step=40,
        rounds=2,
        zeroes_from_round=1,
    )
    answer = run(scenario, AQUA_SLAB_BYTES=str(SLAB))
    assert answer["forced"] == 0
    assert answer["paging"]["evicted_requests"] == 2
    assert answer["paging"]["evicted_tokens"] > 80
    assert answer["paging"]["restored_tokens"] == answer["paging"]["evicted_tokens"]
    changed = {name for name, tokens in answer["tokens"].items() if tokens != stock[f"0{name[1:]}"]}
    assert len(changed) == 1, "the one that was evicted of the second round"
    assert changed < {"1-0", "1-1", "1-2"}
    assert answer["held_places"] == 0


def test_everything_taken_back_in_the_middle_changes_no_answer(
    model: str,
    stock: dict[str, list[int]],
    cluster: EngineCluster,
) -> None:
    _, lender, environment = cluster
    scenario = dataclasses.replace(on_peer(model, prefix_tier=True), pinned=2)
    with VllmProgram(scenario, **environment) as program:
        before = program.until("paused")
        assert before["leased_bytes"] >= WANTED
        assert before["location"] == "peer"
        assert sum(each["present_blocks"] for each in before["pins"]) > 0, "on the peer"
        lender.reclaim(SLABS)
        program.go_on()
        lender.await_reclaimed()
        answer = program.until("done")
    assert [each["present_blocks"] for each in answer["pins"]] == [2, 2]
    for each in answer["pins"]:
        number = each["id"].removeprefix("again-")
        assert answer["tokens"].pop(each["id"]) == stock[f"0-{number}"][:8]
    assert answer["paging"]["lost_blocks"] == 0, "what was pinned has moved to host memory"
    pinned_tokens = sum(each["tokens"] for each in answer["pins"])
    assert answer["paging"]["prefix_hit_tokens"] >= pinned_tokens
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["leased_bytes"] == 0
    assert answer["paged_in_bytes"] > before["paged_in_bytes"], "no load after the reclaim"


def test_a_producer_killed_in_the_middle_changes_no_answer(
    model: str,
    stock: dict[str, list[int]],
    cluster: EngineCluster,
) -> None:
    _, lender, environment = cluster
    with VllmProgram(on_peer(model), **environment) as program:
        before = program.until("paused")
        assert before["location"] == "peer"
        lender.kill()
        program.go_on()
        answer = program.until("done")
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["paged_in_bytes"] > before["paged_in_bytes"], "no load after the death"


def test_a_coordinator_that_goes_away_changes_no_answer(
    model: str,
    stock: dict[str, list[int]],
    cluster: EngineCluster,
) -> None:
    coordinator, _, environment = cluster
    with VllmProgram(on_peer(model), **environment) as program:
        before = program.until("paused")
        coordinator.kill()
        program.go_on()
        answer = program.until("done")
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["location"] == "peer", "what is leased stays leased"
    assert answer["paged_in_bytes"] > before["paged_in_bytes"]


def test_an_engine_started_without_a_coordinator_joins_when_one_appears(
    model: str,
    stock: dict[str, list[int]],
    cluster: EngineCluster,
) -> None:
    coordinator, _, environment = cluster
    coordinator.kill()
    scenario = dataclasses.replace(on_peer(model), joins_at_pause=True)
    with VllmProgram(scenario, **environment) as program:
        before = program.until("paused")
        assert before["location"] == "host"
        assert before["metrics"]["aqua:workers_without_coordinator"] == 1
        assert before["metrics"]["aqua:slicing_on"] == 1
        with CoordinatorProcess(coordinator.data_dir, port=coordinator.port):
            program.go_on()
            answer = program.until("done")
    assert answer["tokens"] == stock
    assert_paged(answer)
    assert answer["location"] == "peer"
    assert answer["metrics"]["aqua:workers_without_coordinator"] == 0
    assert answer["paged_in_bytes"] > before["paged_in_bytes"]
