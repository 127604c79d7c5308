"""Runs over a real Ray cluster of two nodes on this machine.

The engines count instead of computing, so that what is tried here is the way between machines:
places, shares, answers, deaths. `test_vllm_on_ray` tries it with real ones.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from aqua_batch.batch_run import BatchProgress, BatchRun
from aqua_batch.journal import ResultJournal
from aqua_batch.policies import Policy
from aqua_batch.ray_fleet import Placement, RayFleet
from aqua_batch.records import read_batch
from aqua_batch.target import describe
from aqua_batch.tokenization import tokenize
from aqua_batch.tokens import BYTE_TOKENIZER
from aqua_protocol.errors import AquaError, CapacityError, ConfigError, UnavailableError
from harness import counting_engine
from harness.bounds import HANG_S
from harness.counting_engine import CountingEngine
from harness.ray_nodes import RayNodes, ray_nodes

pytestmark = [
    # Each actor imports and compiles for itself: minutes with cold caches beside busy neighbours.
    pytest.mark.timeout(900),
    # Ray leaves sockets and files to the end of the process, and warns of its own future.
    pytest.mark.filterwarnings("ignore"),
]

REQUESTS = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    import ray.cloudpickle

    # Actors cannot import from tests/: they get the engine's code with the engine.
    ray.cloudpickle.register_pickle_by_value(counting_engine)
    with ray_nodes(2) as nodes:
        yield nodes


def placement(node_count: int = 2, *, wait_s: float = HANG_S, gpus: int = 0) -> Placement:
    return Placement(node_count, gpus=gpus, gpus_are_asked=gpus > 0, cpus=1, wait_s=wait_s)


def write_batch(path: Path) -> Path:
    rows = []
    for index in range(REQUESTS):
        is_long = index % 4 == 0
        text = f"draw {index}" if is_long else f"{'grade this answer ' * 5}{index}"
        body = {"prompt": text, "max_tokens": 150 if is_long else 3, "ignore_eos": True}
        rows.append({"custom_id": f"r{index}", "url": "/v1/completions", "body": body})
    file = path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def finish(fleet: RayFleet, file: Path, out: Path, **told: object) -> int:
    batch = read_batch(file)
    tokenized = tokenize(batch, BYTE_TOKENIZER, longest_tokens=None, to_run=True)
    cost = describe("A100-80GB", None).cost
    with ResultJournal(out) as journal:
        return BatchRun(
            batch,
            tokenized,
            fleet,
            journal,
            model="tiny",
            cost=cost,
            policy=Policy.FORESIGHT,
            **told,  # type: ignore[arg-type]
        ).finish()


def answers(out: Path) -> dict[str, dict[str, object]]:
    """What each request was answered with; fails where one was answered twice."""
    rows = [json.loads(raw) for raw in out.read_text().splitlines()]
    made = {
        row["custom_id"]: json.loads(row["response"]["body"]["choices"][0]["text"]) for row in rows
    }
    assert len(made) == len(rows)
    return made


def test_two_nodes_answer_every_request_once_and_share_the_work(
    cluster: RayNodes, tmp_path: Path
) -> None:
    file, out = write_batch(tmp_path), tmp_path / "out.jsonl"
    seen: list[BatchProgress] = []
    with RayFleet(CountingEngine, placement(), address=cluster.address) as fleet:
        assert finish(fleet, file, out, on_progress=seen.append) == REQUESTS
        assert fleet.cache_counters().queried_tokens == REQUESTS, "no request ran twice"
    made = answers(out)
    assert len(made) == REQUESTS
    processes = [each["process"] for each in made.values()]
    assert len(set(processes)) == 2
    # Equal in work, which is not equal in number.
    assert all(processes.count(each) > 10 for each in set(processes))
    assert (seen[-1].done, seen[-1].total, seen[-1].nodes) == (REQUESTS, REQUESTS, 2)
    assert seen[-1].work_done == pytest.approx(1.0)


def test_too_few_nodes_are_named_with_what_was_asked(cluster: RayNodes) -> None:
    said: list[str] = []
    with pytest.raises(CapacityError, match="9 engines want 1 CPU") as caught:
        RayFleet(CountingEngine, placement(9, wait_s=0.5), address=cluster.address, say=said.append)
    assert "of the cluster's 2 nodes 2 have that" in str(caught.value)
    assert "waiting" in said[0]
    with pytest.raises(CapacityError, match="1 GPU"):
        RayFleet(CountingEngine, placement(1, wait_s=0.1, gpus=1), address=cluster.address)


def test_an_engine_that_cannot_start_says_why_and_where(cluster: RayNodes) -> None:
    engine = partial(counting_engine.refuse, "no such model", "Copy it to each node.")
    with pytest.raises(ConfigError, match=r"engine . on .*no such model") as caught:
        RayFleet(engine, placement(), address=cluster.address)
    assert caught.value.remedy == "Copy it to each node."


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [("127.0.0.1:9", UnavailableError, "127.0.0.1:9"), ("head", ConfigError, "host:port")],
)
def test_a_cluster_that_is_not_there_is_said_at_once(
    address: str, error: type[AquaError], said: str
) -> None:
    with pytest.raises(error, match=said):
        RayFleet(CountingEngine, placement(), address=address)


# Last, because Ray takes a while to believe that a node is dead.
@pytest.mark.parametrize("victim", ["engine", "node"])
def test_what_dies_in_the_middle_is_replaced_and_nothing_is_lost_or_repeated(
    cluster: RayNodes, tmp_path: Path, victim: str
) -> None:
    file, out, go_on = write_batch(tmp_path), tmp_path / "out.jsonl", tmp_path / "go-on"
    said: list[str] = []
    killed = threading.Event()

    def kill(state: BatchProgress) -> None:
        if killed.is_set():
            return
        assert 0 < state.done < REQUESTS
        killed.set()
        if victim == "node":
            cluster.kill_one()
        else:
            made = next(iter(answers(out).values()))
            os.kill(int(str(made["process"])), signal.SIGKILL)

    def told(reason: str) -> None:
        said.append(reason)
        go_on.touch()

    # Both stop after a few answers, so that the one that is killed has more to do.
    engine = partial(CountingEngine, stops_after=5, goes_on_at=str(go_on))
    try:
        with RayFleet(engine, placement(), address=cluster.address) as fleet:
            assert finish(fleet, file, out, on_progress=kill, on_loss=told) == REQUESTS
    finally:
        if victim == "node":
            cluster.add()
    assert killed.is_set()
    assert "died" in said[0]
    assert "will run again" in said[0]
    assert len(answers(out)) == REQUESTS
