"""Steps of offline work are aborted between layers, and nobody's answer shows it.

By seed over `harness.vllm_simulation`, where a step that may be aborted is at random, beside all
that happens there otherwise; on a real vLLM whose layers ask for aborts at random; and on a real
server, where an online request arrives in the midst of a step that would never end by itself.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from aqua_protocol import ConfigError
from aqua_schedulers.conserve.step_time import FIRST_FIXED_TOKENS
from aqualib.engines.vllm.options import options_of
from aqualib.engines.vllm.scheduling.abort_checks import abortable_layers
from harness.bounds import HANG_S, until
from harness.engine_cluster import SLABS, WANTED, EngineCluster
from harness.step_aborts import HELD, keep_published
from harness.tiny_llama import write_tiny_llama
from harness.vllm_disturbances import lives, seeds, wrong
from harness.vllm_program import Scenario, VllmProgram, run
from harness.vllm_server import metrics_of, vllm_server
from harness.vllm_shapes import Shape, make_config

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

SERVING: Final = {"ttft_s": 1000.0, "tpot_s": 60.0}
SWAP: Final = Shape(
    {"co_serving": SERVING, "policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0},
    requests=14,
    turns=0.5,
    speed=0.3,
    offline=0.8,
    aborts=0.4,
    caches_prefixes=True,
)
CHECKPOINT: Final = {**SWAP.aqua, "mode": "checkpoint"}
RECOMPUTE: Final = {**SWAP.aqua, "mode": "recompute"}
SHAPES: Final = [
    SWAP,
    replace(SWAP, caches_prefixes=False),
    replace(SWAP, depth=2),
    replace(SWAP, aqua=CHECKPOINT, loss=0.05),
    replace(SWAP, aqua=CHECKPOINT, depth=2, store_blocks=(40, 60, 50)),
    replace(SWAP, aqua=RECOMPUTE, depth=2, offline=1.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_whatever_is_aborted_every_output_is_right(model: str, shape: Shape) -> None:
    engines = lives(model, shape, seeds(len(SHAPES)), disturbance=0.05)
    assert wrong(engines) == 0
    aborted = sum(engine.runner.aborted_steps for engine in engines)
    assert aborted > 20
    counted = sum(int(each.scheduler.co_serving.totals()["step_aborts"]) for each in engines)
    assert counted == aborted
    for engine in engines:
        engine.require_rest()


@pytest.mark.parametrize(("depth", "share"), [(1, 0.9), (2, 0.0)])
def test_requests_of_an_aborted_step_stay_in_memory_unless_steps_overlap(
    model: str, depth: int, share: float
) -> None:
    stayed: list[bool] = []

    def watch(engine: Any) -> None:  # noqa: ANN401 - of vLLM's scheduler
        update = engine.scheduler.update_from_output

        def update_and_note(output: Any, answer: Any) -> Any:  # noqa: ANN401 - vLLM's
            before = engine.scheduler.co_serving.totals()["step_aborts"]
            outputs = update(output, answer)
            if engine.scheduler.co_serving.totals()["step_aborts"] > before:
                running = {each.request_id for each in engine.scheduler.running}
                stayed.extend(name in running for name in output.num_scheduled_tokens)
            return outputs

        engine.scheduler.update_from_output = update_and_note

    assert wrong(lives(model, replace(SWAP, depth=depth), range(6), begin=watch)) == 0
    assert len(stayed) > 50
    assert sum(stayed) >= share * len(stayed)
    assert share or not any(stayed)


@pytest.mark.parametrize("depth", [1, 2])
def test_published_blocks_of_aborted_steps_change_outputs(model: str, depth: int) -> None:
    shape = replace(SWAP, depth=depth)
    engines = lives(model, shape, range(40), begin=lambda each: keep_published(each.scheduler))
    assert wrong(engines) > 1


def test_an_engine_without_the_worker_says_so_and_does_not_start_if_it_is_to_abort(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(model, replace(SWAP, aborts=0.0))
    assert abortable_layers(config, options_of(config)) is None
    assert "AquaWorker is missing), so budgets alone" in caplog.text
    insisting = {**SWAP.aqua, "co_serving": {**SERVING, "layer_aborts": True}}
    config = make_config(model, replace(SWAP, aqua=insisting, aborts=0.0))
    with pytest.raises(ConfigError, match="AquaWorker is missing") as refused:
        abortable_layers(config, options_of(config))
    assert "layer_aborts" in refused.value.remedy


# --- A real vLLM -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, each of which may be the one in which a step stops."""
    return write_tiny_llama(tmp_path_factory.mktemp("deep-llama"), layers=4)


@pytest.fixture(scope="module")
def stock(deep: Path) -> dict[str, list[int]]:
    """What vLLM answers by itself, by the number of the request."""
    answer = run(Scenario(str(deep), output_tokens=60))
    return {name.partition("-")[2]: tokens for name, tokens in answer["tokens"].items()}


def aborted(
    deep: Path,
    mode: str = "checkpoint",
    engine: dict[str, Any] | None = None,
    prefix_tier: bool | None = None,
    *,
    is_lent: bool = False,
    **facts: Any,  # noqa: ANN401 - fields
) -> Scenario:
    # By time, the machine would say which layers have one.
    co_serving = {**SERVING, "safepoint_layers": 1}
    aqua = {"co_serving": co_serving, "mode": mode, "prefix_tier": prefix_tier}
    aqua |= {"is_offline": not is_lent, "store_bytes": "16MiB"}
    given: dict[str, Any] = {"aborted_layers": 0.15, "online_every": 3, **facts}
    return Scenario(
        str(deep),
        aqua=aqua,
        engine={"enable_prefix_caching": True, **(engine or {})},
        output_tokens=60,
        wave_at_step=30,
        **given,
    )


def same(answer: dict[str, Any], stock: dict[str, list[int]]) -> int:
    assert len(answer["tokens"]) == 2 * len(stock)
    return sum(stock[name.partition("-")[2]] == each for name, each in answer["tokens"].items())


@pytest.mark.parametrize(
    ("mode", "overlaps_steps"),
    [("checkpoint", False), ("checkpoint", True), ("swap", False), ("recompute", True)],
)
def test_a_real_engine_answers_as_if_nothing_was_aborted(
    deep: Path, stock: dict[str, list[int]], mode: str, *, overlaps_steps: bool
) -> None:
    answer = run(aborted(deep, mode, overlaps_steps=overlaps_steps))
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer
    assert answer["asked_layers"] == answer["stopped_layers"], answer
    assert len(answer["stopped_layers"]) > 2, "steps stop all over their layers"
    assert answer["metrics"]["aqua:co_serving_without_aborts"] == 0.0
    assert answer["held_places"] == 0, answer


def test_a_real_engine_aborts_steps_that_wait_for_their_layers(
    deep: Path, stock: dict[str, list[int]]
) -> None:
    engine = {"enable_prefix_caching": False}
    answer = run(aborted(deep, "swap", engine, aborted_layers=0.3, cuts_loads=True))
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer
    assert answer["cut"]["columns"] > 0, answer
    assert answer["held_places"] == 0, answer


def test_a_real_engine_aborts_steps_of_requests_whose_checkpoints_are_lost(
    deep: Path, stock: dict[str, list[int]]
) -> None:
    answer = run(aborted(deep, spoil_at_step=150), AQUA_CHECKSUM="1")
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer
    assert len(answer["stopped_layers"]) > 2, answer
    assert answer["failures"]["checksum_mismatch"] > 0, answer
    assert answer["paging"]["lost_blocks"] > 0, answer
    assert answer["held_places"] == 0, answer


def test_a_real_engine_aborts_steps_whose_prompts_are_found_in_the_prefix_tier(
    deep: Path, stock: dict[str, list[int]]
) -> None:
    # By the tier alone: what vLLM caches by itself would be found first.
    engine = {"enable_prefix_caching": False}
    answer = run(aborted(deep, engine=engine, prefix_tier=True))
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer
    assert len(answer["stopped_layers"]) > 2, answer
    assert answer["paging"]["kept_blocks"] > 0, answer
    assert answer["paging"]["prefix_hit_tokens"] > 0, answer
    assert answer["held_places"] == 0, answer


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_a_real_engine_aborts_steps_while_the_memory_of_its_checkpoints_goes(
    deep: Path,
    stock: dict[str, list[int]],
    cluster: EngineCluster,
    *,
    overlaps_steps: bool,
    is_killed: bool,
) -> None:
    going: dict[str, Any] = {
        "pause_at_step": 60,
        "await_leased_bytes": WANTED,
        "overlaps_steps": overlaps_steps,
    }
    with VllmProgram(aborted(deep, is_lent=True, **going), **cluster.environment) as program:
        before = program.until("paused")
        assert before["location"] == "peer"
        assert before["paged_blocks"]["out"] > 0, before
        if is_killed:
            cluster.lender.kill()
        else:
            cluster.lender.reclaim(SLABS)
        program.go_on()
        if not is_killed:
            cluster.lender.await_reclaimed()
        answer = program.until("done")
    assert same(answer, stock) == 2 * len(stock)
    aborts = "aqua:step_aborts_total"
    assert answer["metrics"][aborts] > before["metrics"].get(aborts, 0.0) + 2, answer
    assert answer["paged_in_bytes"] > before["paged_in_bytes"], "no load after it"
    assert is_killed or answer["drained_bytes"] > 0, answer
    assert answer["held_places"] == 0, answer


def test_two_ranks_abort_together_and_answer_as_if_nothing_was_aborted(deep: Path) -> None:
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0|{min(1, (os.cpu_count() or 1) - 1)}"}
    found = run(Scenario(str(deep), engine=engine, output_tokens=60), **cores)["tokens"]
    stock = {name.partition("-")[2]: tokens for name, tokens in found.items()}
    answer = run(aborted(deep, engine=engine), **cores)
    assert same(answer, stock) == 2 * len(stock)
    assert answer["metrics"]["aqua:step_aborts_total"] > 2, answer


@pytest.mark.parametrize("rank_count", [1, 2])
def test_an_engine_whose_last_rank_has_no_page_aborts_nothing_says_so_and_answers(
    deep: Path, stock: dict[str, list[int]], rank_count: int
) -> None:
    engine: dict[str, Any] = {}
    cores: dict[str, Any] = {}
    if rank_count == 2:
        engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0|{min(1, (os.cpu_count() or 1) - 1)}"}
    worker = "harness.holding_worker.BlindWorker"
    answer = run(aborted(deep, engine=engine, aborting_worker=worker), **cores)
    # Two ranks add in another order than one.
    assert same(answer, stock) >= (2 * len(stock) if rank_count == 1 else 0)
    assert answer["metrics"]["aqua:co_serving_without_aborts"] == 1.0
    assert answer["metrics"]["aqua:step_aborts_total"] == 0, answer
    assert answer["metrics"]["aqua:offline_tokens_total"] > 0


# --- A server --------------------------------------------------------------------------------


def ask(client: httpx.Client, service_class: str, prompt: list[int], count: int) -> list[int]:
    """The tokens of a greedy completion."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {"aqua_class": service_class},
    }
    answer = client.post("/v1/completions", json=body, timeout=HANG_S).raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextmanager
def holding_server(
    deep: Path, tmp_path: Path, scheduler: str = "aqualib.engines.vllm.AquaScheduler"
) -> Iterator[tuple[httpx.Client, Path]]:
    """A server whose first offline step waits to be aborted, and the file that says it waits."""
    aqua = {"is_offline": True, "store_bytes": "16MiB", "mode": "checkpoint"}
    aqua["co_serving"] = {"ttft_s": 100.0, "tpot_s": 10.0, "layer_aborts": True}
    transfer = {"kv_connector": "AquaConnector", "kv_role": "kv_both"}
    flags = [
        *("--scheduler-cls", scheduler),
        *("--worker-cls", "harness.holding_worker.HoldingWorker"),
        *("--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": aqua})),
        "--enable-prefix-caching",
    ]
    held = tmp_path / "held"
    # The server finds the workers of tests, and Aqua where this process has found it.
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment: dict[str, Any] = {HELD: str(held), "PYTHONPATH": os.pathsep.join(folders)}
    with vllm_server(deep, tmp_path / "log", *flags, **environment) as client:
        # By an engine's first step of any kind its ranks say that they have the page.
        ask(client, "online", [2], 1)
        yield client, held


def test_an_online_request_gets_its_answer_though_the_step_before_it_would_never_end(
    deep: Path, tmp_path: Path
) -> None:
    rng = random.Random(2)
    long, short = ([rng.randrange(2, 320) for _ in range(count)] for count in (200, 20))
    with holding_server(deep, tmp_path) as (client, held), ThreadPoolExecutor(1) as pool:
        offline = pool.submit(ask, client, "offline", long, 8)
        until(held.exists, "a step is held")
        assert not offline.done()
        online = ask(client, "online", short, 8)
        again = offline.result(HANG_S)
        assert ask(client, "online", long, 8) == again, "offline work was spoilt by the abort"
        assert ask(client, "offline", short, 8) == online
        found = metrics_of(client)
    assert found["aqua:step_aborts_total"] == 1
    assert found["aqua:step_abort_tokens_total"] == FIRST_FIXED_TOKENS
    assert found["aqua:online_arrivals_total"] == 3


@pytest.mark.parametrize(
    ("scheduler", "is_right"),
    [
        ("aqualib.engines.vllm.AquaScheduler", True),
        ("harness.keeping_scheduler.KeepingScheduler", False),
    ],
)
def test_who_asks_the_same_as_the_aborted_step_reads_nothing_that_it_has_not_computed(
    deep: Path, tmp_path: Path, scheduler: str, *, is_right: bool
) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(2, 320) for _ in range(200)]
    with holding_server(deep, tmp_path, scheduler) as (client, held), ThreadPoolExecutor(1) as pool:
        offline = pool.submit(ask, client, "offline", prompt, 8)
        until(held.exists, "a step is held")
        online = ask(client, "online", prompt, 8)
        assert (online == offline.result(HANG_S)) is is_right
