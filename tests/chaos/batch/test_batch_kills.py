"""A batch service that is killed again and again: each request ends once, and none is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from harness.batch_service import BatchServiceProcess, chat_line, records, submit, wait_until
from harness.counting_server import CountingServer
from harness.slices import IS_WHOLE, SEED

KILLS: Final = 200 if IS_WHOLE else 4
REQUESTS: Final = 60 * KILLS
LEASE_S: Final = "0.3"


def test_each_request_has_one_outcome_however_often_the_service_is_killed(tmp_path: Path) -> None:
    """Kills fall where engines have answered a drawn number more: also before, amid and after."""
    moments = random.Random(f"{SEED} kills")
    lines = [chat_line(f"r{i}", f"prompt {i}") for i in range(REQUESTS)]
    lines.append(b"bad\n")
    answered = 0
    with CountingServer() as engine:
        with BatchServiceProcess(tmp_path, [engine.url], lease_s=LEASE_S) as service:
            batch = submit(service.client(), lines)
        for _ in range(KILLS - 1):
            with BatchServiceProcess(
                tmp_path, [engine.url], lease_s=LEASE_S, engine_concurrency="8"
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
