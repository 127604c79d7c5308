"""Rows of requests on both databases: what is written, and by how many statements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    NullPool,
    Select,
    create_engine,
    event,
    insert,
    select,
    text,
)

from aqua_batch.service.database import Database
from aqua_batch.service.rank_writer import rank_requests
from aqua_batch.service.request_rows import (
    LeasedRequest,
    RequestOutcome,
    RequestState,
    add_worker,
    lease_requests,
    settle,
)
from aqua_batch.service.schema import BATCHES, REQUESTS
from harness.bounds import HANG_S
from harness.postgres_process import postgres

ResultT = TypeVar("ResultT")

COUNT: Final = 2000


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        opened = Database(f"sqlite:///{tmp_path}/batch.db")
        yield opened
        opened.close()
        return
    with postgres() as process:
        opened = Database(process.url)
        yield opened
        opened.close()


def fill(connection: Connection) -> None:
    """One batch that runs, and one worker."""
    unset = {"completed": 0, "failed": 0, "generation": 0, "errors": [], "labels": {}, "ending": ""}
    batch = {"seq": 1, "batch_id": "b", "tenant": "t", "endpoint": "/v1/completions", "model": "m"}
    batch |= {"completion_window": "24h", "input_file_id": "f", "input_key": "k"}
    times = {"created_s": 0, "in_progress_s": 0, "expires_s": 1000}
    row = {**unset, **batch, **times, "status": "in_progress", "total": COUNT}
    connection.execute(insert(BATCHES).values(row))
    request: dict[str, Any] = {"batch": 1, "start": 0, "size": 1, "generation": 0, "attempts": 0}
    request |= {"not_before_s": 0.0, "state": RequestState.WAITING}
    lines = ({**request, "line": n, "custom_id": f"{n}", "rank": n} for n in range(COUNT))
    connection.execute(insert(REQUESTS), list(lines))
    add_worker(connection, "w", 1000.0)


def lease(room: int) -> Callable[[Connection], list[LeasedRequest]]:
    """The transaction that leases so many requests."""
    return partial(
        lease_requests,
        worker="w",
        room=room,
        room_of=lambda _: COUNT,
        most_bytes=COUNT,
        running={},
        now_s=1.0,
    )


async def counting(
    database: Database, work: Callable[[Connection], ResultT]
) -> tuple[ResultT, int]:
    """What some work gives, and how many times the database plans for it, inserts aside."""
    count = 0

    def noted(
        _: Connection,
        __: object,
        statement: str,
        parameters: Sequence[object],
        ___: object,
        is_many: bool,
    ) -> None:
        nonlocal count
        if not statement.startswith("INSERT"):
            count += len(parameters) if is_many else 1

    def watched(connection: Connection) -> ResultT:
        event.listen(connection, "before_cursor_execute", noted)
        return work(connection)

    return await database.write(watched), count


async def test_statements_of_a_transaction_do_not_grow_with_its_rows(database: Database) -> None:
    await database.write(fill)
    counts = []
    for room in (10, 200):
        leased, of_lease = await counting(database, lease(room))
        assert len(leased) == room
        outcomes = [RequestOutcome(each, is_answer=True, record=b"{}") for each in leased]
        record = partial(settle, outcomes=outcomes, returns=[], now_s=1.0)
        late, of_record = await counting(database, record)
        assert not late
        lines = list(range(1000, 1000 + room))
        rank = partial(rank_requests, batch=1, first_rank=0, lines=lines)
        _, of_rank = await counting(database, rank)
        counts.append((of_lease, of_record, of_rank))
    assert counts[0] == counts[1], counts


async def test_an_order_is_given_to_what_waits_alone(database: Database) -> None:
    await database.write(fill)
    assert [each.line for each in await database.write(lease(3))] == [0, 1, 2]
    backwards = list(reversed(range(COUNT)))
    for begin in (0, 1000):
        lines = backwards[begin : begin + 1000]
        await database.write(partial(rank_requests, batch=1, first_rank=begin, lines=lines))
    ranks = select(REQUESTS.c.line).where(REQUESTS.c.line > 2).order_by(REQUESTS.c.rank)
    kept = select(REQUESTS.c.rank).where(REQUESTS.c.line <= 2).order_by(REQUESTS.c.line)
    found, of_leased = await database.read(
        lambda connection: (
            list(connection.execute(ranks).scalars()),
            list(connection.execute(kept).scalars()),
        )
    )
    assert found == backwards[:-3]
    assert of_leased == [0, 1, 2]


async def test_an_order_takes_its_locks_by_line_whatever_it_is() -> None:
    with postgres() as process, closing(Database(process.url)) as database:
        await database.write(fill)
        other = create_engine(process.url, poolclass=NullPool)
        with other.connect() as holder:
            holder.execute(locked(5))
            backwards = list(reversed(range(10)))
            rank = partial(rank_requests, batch=1, first_rank=0, lines=backwards)
            ranking = asyncio.create_task(database.write(rank))
            async with asyncio.timeout(HANG_S):
                while not waits(other):  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.01)
            try:
                holder.execute(locked(9))  # Not taken yet: else each would wait for the other.
            finally:
                holder.rollback()
                await ranking


def waits(engine: Engine) -> bool:
    """Whether a transaction waits for a row of another."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with engine.connect() as looking:
        return bool(looking.execute(query).scalar())


def locked(line: int) -> Select[Any]:
    """Take a request's row, or fail at once."""
    query = select(REQUESTS.c.line).where(REQUESTS.c.batch == 1, REQUESTS.c.line == line)
    return query.with_for_update(nowait=True)
