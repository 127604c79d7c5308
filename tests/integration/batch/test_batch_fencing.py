"""Several services on one database: what a dead one had is taken up, its late answers are not."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from harness.batch_service import (
    BatchServiceProcess,
    chat_line,
    completed,
    records,
    submit,
    wait_until,
)
from harness.bounds import until
from harness.counting_server import CountingServer

LEASE_S = "0.5"


def outcomes_by_line(data_dir: Path) -> dict[int, int]:
    """How many outcomes each line has in the database."""
    with closing(sqlite3.connect(data_dir / "batch.db")) as database:
        return dict(database.execute("SELECT line, count(*) FROM outcomes GROUP BY line"))


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "control"])
def test_answers_of_a_service_that_stood_still_are_discarded(
    tmp_path: Path, is_fenced: bool
) -> None:
    """Without fencing, the same history records requests twice."""
    lines = [chat_line(f"first-{i}", f"hold first {i}") for i in range(3)]
    lines += [chat_line(f"last-{i}", f"hold last {i}") for i in range(4)]
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], is_fenced=is_fenced, lease_s=LEASE_S) as frozen,
    ):
        batch = submit(frozen.client(), lines)
        engine.wait_for("began", 7)
        frozen.freeze()
        with BatchServiceProcess(tmp_path, [engine.url], lease_s=LEASE_S) as second:
            engine.wait_for("began", 14)  # All of them again, once the first is thought dead.
            engine.release("first")
            client = second.client()
            wait_until(client, batch.id, lambda seen: completed(seen) == 3)
            frozen.thaw()
            if not is_fenced:
                until(
                    lambda: set(outcomes_by_line(tmp_path).values()) == {2},
                    "each line has two outcomes",
                )
                return
            frozen.wait_to_say("late answers discarded")
            assert outcomes_by_line(tmp_path) == {1: 1, 2: 1, 3: 1}
            engine.release("last")
            ended = wait_until(client, batch.id)
            found = [each["custom_id"] for each in records(client, ended.output_file_id)]
            assert found == [f"first-{i}" for i in range(3)] + [f"last-{i}" for i in range(4)]
            assert ended.request_counts
            assert ended.request_counts.completed == 7


def test_a_service_that_is_told_to_stop_gives_its_requests_back_at_once(tmp_path: Path) -> None:
    with CountingServer() as engine:
        # A life so long that no other service would take them up for an hour.
        with BatchServiceProcess(tmp_path, [engine.url], lease_s="3600") as first:
            batch = submit(first.client(), [chat_line("a", "hold it"), chat_line("b", "hold it")])
            engine.wait_for("began", 2)
            assert first.stop() == 0
            engine.wait_for("gone", 2)
        with BatchServiceProcess(tmp_path, [engine.url], lease_s="3600") as second:
            engine.wait_for("began", 4)
            engine.release("it")
            assert wait_until(second.client(), batch.id).status == "completed"


def test_a_batch_cancelled_at_one_service_is_broken_off_at_the_other(tmp_path: Path) -> None:
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url]) as runs,
        BatchServiceProcess(tmp_path, ["http://127.0.0.1:9"]) as cancels,
    ):
        batch = submit(runs.client(), [chat_line("a", "hold it")])
        engine.wait_for("began", 1)
        cancels.client().batches.cancel(batch.id)
        engine.wait_for("gone", 1)
        assert wait_until(cancels.client(), batch.id).status == "cancelled"


def test_requests_wait_for_an_engine_that_is_away(tmp_path: Path) -> None:
    """Nothing is lost, and no attempt counted, while nothing listens where the engine was."""
    with CountingServer() as gone:
        url = gone.url
    with BatchServiceProcess(tmp_path, [url], max_attempts="1") as service:
        batch = submit(service.client(), [chat_line("a", "fine")])
        client = service.client()
        wait_until(client, batch.id, lambda seen: seen.status == "in_progress")
        with CountingServer(url) as engine:
            engine.wait_for("ended", 1)
            assert wait_until(client, batch.id).status == "completed"


def test_a_request_that_engines_fail_at_ends_after_its_attempts(tmp_path: Path) -> None:
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], max_attempts="2") as service,
    ):
        client = service.client()
        ended = wait_until(client, submit(client, [chat_line("a", "fail always")]).id)
        assert engine.counts()["began"] == {"fail always": 2}
        (error,) = records(client, ended.error_file_id)
        assert error["error"] == {
            "code": "engine_error",
            "message": "the engine failed: HTTP 500 (2 attempts)",
        }
