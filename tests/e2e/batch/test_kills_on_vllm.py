"""Batch services and a real vLLM under them, killed and started again ten times: `make test-demos`.

The counting engine of `tests/integration/batch` is killed hundreds of times; this says that nothing
of it hung on that engine. The control has no fencing.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from aqua_demo.batch.run import SCALES
from aqua_demo.engines.api_server import EXACT, MODEL_NAME, ApiServer
from aqua_demo.engines.online_load import read_offline_file, write_offline_file
from aqua_demo.processes import ProcessGroup
from harness.batch_service import BatchServiceProcess, completed, records, submit, wait_until
from harness.bounds import HANG_S, stopwatch

if TYPE_CHECKING:
    from openai.types import Batch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

SCALE: Final = SCALES["quick"]
ENDPOINT: Final = "/v1/completions"
VICTIMS: Final = [*["service"] * 8, *["engine"] * 2]
LEASE_S: Final = "2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from aqua_demo.programs.llama import write_llama

    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, SCALE.llama, max_tokens=SCALE.max_tokens, seed=0)
    return folder


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    with ProcessGroup(tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="module")
def engine(group: ProcessGroup, model: Path) -> ApiServer:
    return started(group, model)


def started(group: ProcessGroup, model: Path, port: int | None = None) -> ApiServer:
    options = SCALE.engine_options(prefix_caching=True)
    server = ApiServer(group, "engine", model, options, port=port)
    server.await_ready()
    return server


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    body = {"model": MODEL_NAME, **EXACT}
    write_offline_file(tmp_path / "in.jsonl", SCALE.offline_count, 0, 256, topics=8, body=body)
    return (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)


def has_answered(least: int, batch: Batch) -> bool:
    return completed(batch) >= least


def count(data_dir: Path, query: str) -> int:
    with closing(sqlite3.connect(data_dir / "batch.db")) as database:
        return int(database.execute(query).fetchone()[0])


DOUBLES: Final = (
    "SELECT count(*) FROM (SELECT line FROM outcomes GROUP BY line HAVING count(*) > 1)"
)
TAKEN_UP: Final = "SELECT count(*) FROM requests WHERE generation > 1"


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "control"])
def test_what_a_service_that_stood_still_answers_late_is_discarded(
    tmp_path: Path, engine: ApiServer, lines: list[bytes], *, is_fenced: bool
) -> None:
    """Without fencing, the same history records requests twice."""
    data = tmp_path / "data"
    with BatchServiceProcess(data, [engine.url], is_fenced=is_fenced, lease_s=LEASE_S) as frozen:
        batch = submit(frozen.client(), lines, endpoint=ENDPOINT)
        wait_until(frozen.client(), batch.id, lambda seen: completed(seen) > 0)
        frozen.freeze()
        before = count(data, "SELECT count(*) FROM outcomes")
        with BatchServiceProcess(data, [engine.url], lease_s=LEASE_S) as second:
            client = second.client()
            # What the other one had comes first.
            wait_until(client, batch.id, lambda seen: completed(seen) > before + 20)
            frozen.thaw()
            if is_fenced:
                frozen.wait_to_say("late answers discarded")
                assert count(data, DOUBLES) == 0
                client.batches.cancel(batch.id)
                return
            looked = stopwatch()
            while not count(data, DOUBLES):
                assert looked() < HANG_S, "nothing was recorded twice"


def test_ten_kills_leave_each_request_with_one_outcome(
    tmp_path: Path, group: ProcessGroup, model: Path, engine: ApiServer, lines: list[bytes]
) -> None:
    rng = random.Random(0)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    data = tmp_path / "data"

    def service() -> BatchServiceProcess:
        return BatchServiceProcess(data, [engine.url], lease_s=LEASE_S)

    services = [service(), service()]
    try:
        batch = submit(services[0].client(), lines, endpoint=ENDPOINT)
        taken_up = 0
        for number, victim in enumerate(victims, start=1):
            due = number * len(lines) // (len(victims) + 2)
            seen = wait_until(services[0].client(), batch.id, partial(has_answered, due))
            assert completed(seen) < len(lines), "nothing was under way"
            if victim == "engine":
                engine.kill()
                engine = started(group, model, engine.port)
            else:
                at = rng.randrange(len(services))
                services[at].__exit__()
                services[at] = service()
            taken_up = max(taken_up, count(data, TAKEN_UP))
        ended = wait_until(services[0].client(), batch.id)
        assert ended.status == "completed"
        assert ended.error_file_id is None
        found: list[dict[str, Any]] = records(services[0].client(), ended.output_file_id)
        asked = read_offline_file(tmp_path / "in.jsonl")
        assert [each["custom_id"] for each in found] == [each["custom_id"] for each in asked]
        for line, answer in zip(asked, found, strict=True):
            (choice,) = answer["response"]["body"]["choices"]
            assert len(choice["token_ids"]) == line["body"]["max_tokens"]
        assert taken_up > 0, "nothing was taken up by another one: nothing is shown"
    finally:
        for each in services:
            each.__exit__()
