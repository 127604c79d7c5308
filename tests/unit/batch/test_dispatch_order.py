"""Who runs next: late batches first, as far as that starves no tenant; then tenants fairly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, insert

from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import (
    LeasedRequest,
    choose_requests,
    fair_shares,
    is_late,
    open_work,
)
from aqua_batch.service.rows.schema import BATCHES

DAY_S = 86_400


def requests(tenant: str, batch: int, count: int) -> list[LeasedRequest]:
    return [
        LeasedRequest(batch, line, f"{line}", tenant, "/v1/completions", "key", 0, 1, 1, 0, 0)
        for line in range(count)
    ]


def test_free_places_go_to_the_tenants_that_run_least() -> None:
    assert fair_shares(6, {}, {"red": 100, "blue": 100}) == {"red": 3, "blue": 3}
    assert fair_shares(6, {"red": 10}, {"red": 100, "blue": 100}) == {"red": 0, "blue": 6}
    assert fair_shares(6, {"red": 2}, {"red": 100, "blue": 2}) == {"red": 4, "blue": 2}
    assert fair_shares(6, {}, {"red": 1, "blue": 0}) == {"red": 1, "blue": 0}


def test_a_batch_is_late_if_its_pace_misses_its_window() -> None:
    assert not is_late(0, DAY_S, 0, 1000, 0.09 * DAY_S)  # Too early to say.
    assert is_late(0, DAY_S, 0, 1000, 0.11 * DAY_S)
    assert is_late(0, DAY_S, 500, 1000, 0.5 * DAY_S)  # It would end at the last moment.
    assert not is_late(0, DAY_S, 700, 1000, 0.5 * DAY_S)
    assert is_late(0, DAY_S, 999, 1000, 2 * DAY_S)


def test_a_tenants_batches_run_by_deadline() -> None:
    waiting = requests("red", 2, 3) + requests("red", 1, 3)
    chosen = choose_requests(4, {}, waiting, set())
    assert [each.key for each in chosen] == [each.key for each in waiting[:4]]


def test_late_batches_run_first_and_by_deadline() -> None:
    red, blue, green = requests("red", 1, 9), requests("blue", 2, 9), requests("green", 3, 9)
    chosen = choose_requests(4, {"blue": 50}, red + blue + green, {2, 3})
    assert [each.batch for each in chosen] == [2, 2, 1, 3]  # Two of four places: no more.


def test_a_tenant_that_is_always_late_leaves_the_others_their_share() -> None:
    """A window of a second makes any batch late; that buys half of the places at most."""
    busy, ran = {"red": 0, "blue": 0}, {"red": 0, "blue": 0}
    for _ in range(100):
        waiting = requests("red", 1, 8) + requests("blue", 2, 8)
        for each in choose_requests(8, busy, waiting, {1}):
            ran[each.tenant] += 1
    assert ran == {"red": 400, "blue": 400}


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=5),
    st.sets(st.integers(0, 4)),
)
def test_every_place_is_given_once_while_anything_waits(
    room: int, batches: list[tuple[str, int]], late: set[int]
) -> None:
    waiting = [
        each
        for batch, (tenant, count) in enumerate(batches)
        for each in requests(tenant, batch, count)
    ]
    chosen = choose_requests(room, {}, waiting, late)
    assert len(chosen) == min(room, len(waiting))
    assert len({each.key for each in chosen}) == len(chosen)


async def test_open_work_is_what_running_batches_have_left_and_how_many_are_late(
    tmp_path: Path,
) -> None:
    database = Database(f"sqlite:///{tmp_path}/batch.db")
    row = {
        **dict.fromkeys(("tenant", "endpoint", "completion_window", "input_file_id"), "x"),
        **dict.fromkeys(("created_s", "in_progress_s", "generation"), 0),
        "input_key": "x",
        "ending": "",
        "labels": {},
        "errors": [],
        "total": 10,
        "failed": 1,
    }
    batches = [
        {"batch_id": "a", "status": "in_progress", "expires_s": 100, "completed": 2},
        {"batch_id": "b", "status": "in_progress", "expires_s": 1000, "completed": 8},
        {"batch_id": "c", "status": "completed", "expires_s": 100, "completed": 2},
    ]

    def add(connection: Connection) -> None:
        connection.execute(insert(BATCHES), [{**row, **batch} for batch in batches])

    await database.write(add)
    assert await database.read(partial(open_work, now_s=50.0)) == (8, 1)
    assert await database.read(partial(open_work, now_s=5.0)) == (8, 0)
    database.close()
