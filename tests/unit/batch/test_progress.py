"""How batches are going: rates of late, time left, whose they are, and what is left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from aqua_batch.batch_run import BatchProgress
from aqua_batch.service.progress import ENDED_SHOWN, BatchRates, ended_by_batch, overview
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.schema import BATCHES
from aqua_protocol.batches import MOST_BATCHES, BatchSummary

ROW: dict[str, Any] = {
    **dict.fromkeys(("endpoint", "completion_window", "input_file_id", "input_key"), "x"),
    **dict.fromkeys(("created_s", "in_progress_s", "generation", "completed", "failed"), 0),
    "tenant": "red",
    "ending": "",
    "labels": {"secret": "a label of the tenant's"},
    "errors": [],
    "total": 10,
    "expires_s": 1000,
    "status": "in_progress",
}


async def told(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    now_s: float,
    tenant: str | None,
    batch_rates: BatchRates,
) -> BatchSummary:
    database = Database(f"sqlite:///{tmp_path}/batch.db")

    def add(connection: Connection) -> None:
        connection.execute(insert(BATCHES), [{**ROW, **row} for row in rows])

    await database.write(add)
    look = partial(overview, tenant=tenant, batch_rates=batch_rates, now_s=now_s, engines=(3, 1))
    found: BatchSummary = await database.read(look)
    database.close()
    return found


def test_a_rate_is_what_ended_over_the_last_minute() -> None:
    batch_rates = BatchRates()
    assert batch_rates.is_due(100.0)
    batch_rates.note(100.0, {1: 0})
    assert not batch_rates.is_due(104.0)
    assert batch_rates.rate_per_s(1, 40, 104.0) is None, "four seconds say little"
    assert batch_rates.rate_per_s(2, 40, 120.0) is None, "it was not there"
    assert batch_rates.rate_per_s(1, 40, 120.0) == 2.0
    for at_s in range(105, 300, 5):
        batch_rates.note(at_s, {1: at_s})
    # What it did at the beginning no longer counts.
    assert batch_rates.rate_per_s(1, 295, 295.0) == 1.0
    assert batch_rates.rate_per_s(1, 235, 295.0) == 0.0


def test_a_clock_that_is_set_back_begins_anew() -> None:
    batch_rates = BatchRates()
    batch_rates.note(1000.0, {1: 5})
    assert batch_rates.is_due(100.0)
    batch_rates.note(100.0, {1: 5})
    assert batch_rates.rate_per_s(1, 15, 120.0) == 0.5


async def test_the_time_left_follows_the_rate_and_without_one_the_mean(tmp_path: Path) -> None:
    rows = [
        {"batch_id": "steady", "completed": 4, "failed": 1},
        {"batch_id": "stuck", "completed": 5, "expires_s": 2000},
        {"batch_id": "new", "in_progress_s": 95, "expires_s": 3000},
    ]
    batch_rates = BatchRates()
    batch_rates.note(80.0, {2: 5})
    found = await told(tmp_path, rows, 100.0, None, batch_rates)
    steady, stuck, new = found.batches
    assert (steady.requests_per_s, steady.seconds_left) == (0.05, 100.0)
    assert (stuck.requests_per_s, stuck.seconds_left) == (0.0, None)
    assert (new.requests_per_s, new.seconds_left) == (None, None)
    assert (found.open_requests, found.engines, found.absent_engines) == (20, 3, 1)


async def test_what_the_dispatcher_hurries_is_late_here_and_deadlines_come_first(
    tmp_path: Path,
) -> None:
    rows = [
        {"batch_id": "later", "expires_s": 9000, "completed": 9},
        {"batch_id": "soon", "expires_s": 800, "completed": 1},
        {"batch_id": "over", "status": "completed", "completed": 10},
    ]
    found = await told(tmp_path, rows, 500.0, None, BatchRates())
    assert [each.batch_id for each in found.batches] == ["soon", "later", "over"]
    assert [each.is_late for each in found.batches] == [True, False, False]
    assert found.late_batches == 1
    assert found.counts == {"in_progress": 2, "completed": 1}


async def test_a_tenant_is_told_of_its_own_alone_and_nobody_of_what_is_in_it(
    tmp_path: Path,
) -> None:
    fault = {"code": "invalid_json", "message": "line 3: my prompt", "line": 3}
    rows: list[dict[str, Any]] = [
        {"batch_id": "r", "errors": [fault]},
        {"batch_id": "b", "tenant": "blue", "expires_s": 60},
    ]
    own = await told(tmp_path, rows, 50.0, "red", BatchRates())
    assert [each.batch_id for each in own.batches] == ["r"]
    assert (own.counts, own.open_requests, own.late_batches) == ({"in_progress": 1}, 10, 0)
    assert own.batches[0].fault == "invalid_json"
    for secret in ("prompt", "label"):
        assert secret not in own.model_dump_json()


async def test_the_answer_is_bounded_and_its_sums_are_of_all(tmp_path: Path) -> None:
    many: list[dict[str, Any]] = [
        {"batch_id": f"o{k}", "expires_s": 1000 + k} for k in range(MOST_BATCHES)
    ]
    ended: list[dict[str, Any]] = [
        {"batch_id": f"e{k}", "status": "cancelled"} for k in range(2 * ENDED_SHOWN)
    ]
    found = await told(tmp_path, many + ended, 50.0, None, BatchRates())
    assert len(found.batches) == MOST_BATCHES
    assert found.batches[-1].batch_id == f"e{ENDED_SHOWN}"
    assert found.counts == {"in_progress": MOST_BATCHES, "cancelled": 2 * ENDED_SHOWN}


async def test_only_running_batches_are_watched(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    rows = [
        {**ROW, "batch_id": "a", "completed": 2, "failed": 3},
        {**ROW, "batch_id": "b", "status": "validating"},
    ]
    await database.write(lambda connection: connection.execute(insert(BATCHES), rows))
    assert await database.read(ended_by_batch) == {1: 5}
    database.close()


@pytest.mark.parametrize("tenant", [None, "red"])
async def test_a_service_without_batches_says_so(tmp_path: Path, tenant: str | None) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    look = partial(overview, tenant=tenant, batch_rates=BatchRates(), now_s=1.0, engines=(1, 0))
    found = await database.read(look)
    assert (found.batches, found.counts, found.open_requests) == ([], {}, 0)
    database.close()


@pytest.mark.parametrize(
    ("work_done", "text"),
    [
        (0.0, "time left unknown"),
        (0.5, "1:02:03 left"),
        (1.0, "0:00:00 left"),
        (1 / 41, "1 day, 17:22:00 left"),
    ],
)
def test_a_run_tells_its_time_left_by_work(work_done: float, text: str) -> None:
    run = BatchProgress(3, 9, work_done, running=1, nodes=1, elapsed_s=3723.0)
    assert str(run) == f"3 of 9 requests, {text}"
