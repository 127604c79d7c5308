"""All that runs batches is killed again and again: each request ends once, and none is lost.

That it is the generations of leases which keep this true, and that requests end twice without, is
shown by the control in `integration/batch/test_batch_fencing.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final, Self

import openai
from openai.types import Batch

from harness.batch_service import (
    BatchServiceProcess,
    chat_line,
    completed,
    records,
    submit,
    wait_until,
)
from harness.bounds import HANG_S, stopwatch
from harness.counting_server import CountingServer
from harness.postgres_process import PostgresProcess, postgres
from harness.slices import IS_WHOLE, SEED

KILLS: Final = 200 if IS_WHOLE else 4
REQUESTS: Final = 60 * KILLS
LEASE_S: Final = "0.3"
ORDER: Final = "foresight" if IS_WHOLE else "fcfs"
"""Of batches; in a whole tier each service also starts a process that finds it and may lose it."""

VICTIMS: Final = ("service", "database", "engine")
ROUND_KILLS: Final = 200 if IS_WHOLE else len(VICTIMS)
ROUND_REQUESTS: Final = 60


def test_each_request_has_one_outcome_however_often_the_service_is_killed(tmp_path: Path) -> None:
    """Kills fall where engines have answered a drawn number more: also before, amid and after."""
    moments = random.Random(f"{SEED} kills")
    lines = [chat_line(f"r{i}", f"prompt {i}") for i in range(REQUESTS)]
    lines.append(b"bad\n")
    answered = 0
    with CountingServer() as engine:
        with BatchServiceProcess(tmp_path, [engine.url], lease_s=LEASE_S, order=ORDER) as service:
            batch = submit(service.client(), lines)
        for _ in range(KILLS - 1):
            with BatchServiceProcess(
                tmp_path, [engine.url], lease_s=LEASE_S, order=ORDER, engine_concurrency="8"
            ) as service:
                # Requests run again count, too, so this comes about before all have ended.
                answered = sum(engine.counts()["ended"].values())
                if answered < REQUESTS - 40:
                    engine.wait_for("ended", answered + moments.randrange(40))
                service.kill()
        with BatchServiceProcess(tmp_path, [engine.url], lease_s=LEASE_S) as service:
            client = service.client()
            ended = wait_until(client, batch.id)
            assert ended.status == "completed"
            found = [each["custom_id"] for each in records(client, ended.output_file_id)]
            assert found == [f"r{i}" for i in range(REQUESTS)]
            assert [each["error"]["line"] for each in records(client, ended.error_file_id)] == [
                REQUESTS + 1
            ]
            assert ended.request_counts
            assert ended.request_counts.to_dict() == {
                "total": REQUESTS + 1,
                "completed": REQUESTS,
                "failed": 1,
            }
    assert answered > 0, "no kill fell while requests ran"


class Cluster:
    """Two services and two engines around one PostgreSQL; any of them can be killed and replaced.

    Args:
        folder: Of the services' files.
    """

    def __init__(self, database: PostgresProcess, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self.engines = [CountingServer() for _ in range(2)]
        self.services = [self._service() for _ in range(2)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.services:
            service.__exit__()
        for engine in self.engines:
            engine.__exit__()

    def _service(self) -> BatchServiceProcess:
        return BatchServiceProcess(
            self._folder,
            [each.url for each in self.engines],
            lease_s=LEASE_S,
            order=ORDER,
            engine_concurrency="4",
            database_url=self._database.url,
        )

    def kill(self, victim: str, at: int) -> None:
        """Kill one of them, the first or second of its kind, and start another in its place."""
        match victim:
            case "service":
                self.services[at].kill()
                self.services[at].__exit__()
                self.services[at] = self._service()
            case "engine":
                url = self.engines[at].url
                self.engines[at].__exit__()
                self.engines[at] = CountingServer(url)
            case _:
                self._database.kill()
                self._database.start()

    def client(self) -> openai.OpenAI:
        """Of a service that was not killed last."""
        return self.services[0].client()

    def wait_for_begun(self, client: openai.OpenAI, batch: Batch, count: int) -> bool:
        """Wait until engines have begun so many more requests; whether the batch is under way."""
        before = self._begun()
        waited = stopwatch()
        while self._begun() < before + count:
            assert waited() < HANG_S, "the batch stands still"
            if client.batches.retrieve(batch.id).status == "completed":
                break
        return completed(client.batches.retrieve(batch.id)) < ROUND_REQUESTS

    def _begun(self) -> int:
        return sum(sum(each.counts()["began"].values()) for each in self.engines)


def test_each_request_has_one_outcome_whatever_is_killed(tmp_path: Path) -> None:
    """A service, an engine, or the database with all that it had not written to the disk."""
    draw = random.Random(f"{SEED} victims")
    lines = [chat_line(f"r{i}", f"prompt {i}") for i in range(ROUND_REQUESTS)]
    under_way = 0
    with postgres() as database, Cluster(database, tmp_path) as cluster:
        batches = []
        for kill in range(ROUND_KILLS):
            client = cluster.client()
            batches.append(submit(client, lines))
            begun = draw.randrange(ROUND_REQUESTS // 2)
            under_way += cluster.wait_for_begun(client, batches[-1], begun)
            cluster.kill(VICTIMS[kill % len(VICTIMS)], draw.randrange(2))
        client = cluster.client()
        for batch in batches:
            ended = wait_until(client, batch.id)
            assert ended.status == "completed"
            found = [each["custom_id"] for each in records(client, ended.output_file_id)]
            assert found == [f"r{i}" for i in range(ROUND_REQUESTS)]
            assert (completed(ended), ended.error_file_id) == (ROUND_REQUESTS, None)
    assert under_way > 0, "no kill fell while requests ran"
