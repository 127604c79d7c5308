"""Rows of requests on both databases: what is written, and by how many statements."""

from __future__ import annotations

import asyncio
import secrets
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
    create_engine,
    event,
    insert,
    select,
    text,
    update,
)

from aqua_batch.service.order.rank_writer import earlier_results, rank_requests
from aqua_batch.service.rows.batch_rows import (
    BatchJob,
    cancel_batch,
    create_batch,
    expire_batches,
    find_batch,
)
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.file_rows import FileState, add_file, new_file_id
from aqua_batch.service.rows.request_rows import (
    LeasedRequest,
    RequestOutcome,
    RequestState,
    Return,
    add_worker,
    free_dead_workers,
    lease_requests,
    remove_workers,
    settle,
)
from aqua_batch.service.rows.schema import BATCHES, FILES, REQUESTS
from harness.bounds import HANG_S
from harness.postgres_process import postgres

ResultT = TypeVar("ResultT")

COUNT: Final = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as process:
        yield process.url


@pytest.fixture
def on_postgres(server: str) -> Iterator[str]:
    """URL of an empty database of a PostgreSQL."""
    name = f"of_{secrets.token_hex(8)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        yield server.replace("/postgres?", f"/{name}?")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    is_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/b.db" if is_sqlite else request.getfixturevalue("on_postgres")
    with closing(Database(url)) as opened:
        yield opened


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


async def test_lengths_are_learned_from_a_tenants_own_ended_batches(database: Database) -> None:
    def new_batch(connection: Connection, tenant: str, endpoint: str) -> BatchJob:
        places = {"input_file_id": "f", "input_key": f"in/{new_file_id()}", "labels": {}}
        times = {"completion_window": "24h", "created_s": 0, "expires_s": 10}
        return create_batch(connection, tenant=tenant, endpoint=endpoint, **places, **times)

    def fill_files(connection: Connection) -> BatchJob:
        for tenant, endpoint, state in (
            ("t", "/v1/completions", FileState.STORED),
            ("t", "/v1/completions", FileState.DELETING),
            ("t", "/v1/embeddings", FileState.STORED),
            ("other", "/v1/completions", FileState.STORED),
            ("t", "/v1/completions", FileState.STORED),
        ):
            batch = new_batch(connection, tenant, endpoint)
            file_id = new_file_id()
            add_file(connection, file_id, tenant, f"out of {batch.seq}", 0.0)
            connection.execute(update(FILES).where(FILES.c.file_id == file_id).values(state=state))
            changed = update(BATCHES).where(BATCHES.c.seq == batch.seq)
            connection.execute(changed.values(output_file_id=file_id))
        return new_batch(connection, "t", "/v1/completions")

    new = await database.write(fill_files)
    found = await database.read(partial(earlier_results, batch=new))
    assert [output for _, output in found] == ["out of 5", "out of 1"]


def cancel(connection: Connection, _: Sequence[LeasedRequest]) -> None:
    cancel_batch(connection, "t", "b", 1.0)


def expire(connection: Connection, _: Sequence[LeasedRequest]) -> None:
    expire_batches(connection, 2000.0)


def record(connection: Connection, leased: Sequence[LeasedRequest]) -> None:
    outcomes = [RequestOutcome(each, is_answer=True, record=b"{}") for each in leased[:5]]
    returns = [Return(each, not_before_s=0.0, counts=True) for each in leased[5:]]
    settle(connection, outcomes, returns, 1.0)


def give_back(connection: Connection, _: Sequence[LeasedRequest]) -> None:
    remove_workers(connection, ["w"])


def free_dead(connection: Connection, _: Sequence[LeasedRequest]) -> None:
    free_dead_workers(connection, 2000.0)


def rank(connection: Connection, _: Sequence[LeasedRequest]) -> None:
    rank_requests(connection, batch=1, first_rank=0, lines=list(range(COUNT)))


@pytest.mark.parametrize("work", [cancel, expire, record, give_back, free_dead, rank])
async def test_requests_are_locked_after_their_batch(
    on_postgres: str, work: Callable[[Connection, Sequence[LeasedRequest]], None]
) -> None:
    """In the other order two transactions could each wait for the other."""
    with closing(Database(on_postgres)) as database:
        await database.write(fill)
        leased = await database.write(lease(10))
        other = create_engine(on_postgres, poolclass=NullPool)
        with other.connect() as holder:
            holder.execute(select(BATCHES).with_for_update(key_share=True)).all()
            working = asyncio.create_task(
                database.write(lambda connection: work(connection, leased))
            )
            async with asyncio.timeout(HANG_S):
                while not waits(other):
                    assert not working.done(), "it has passed over the batch's row"
                    await asyncio.sleep(0.01)
            try:
                holder.execute(select(REQUESTS.c.line).with_for_update(nowait=True)).all()
            finally:
                holder.rollback()
                await working


def waits(engine: Engine) -> bool:
    """Whether a transaction waits for a row of another."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with engine.connect() as looking:
        return bool(looking.execute(query).scalar())


async def test_a_cancel_and_outcomes_that_meet_are_both_done(on_postgres: str) -> None:
    """Whichever is first: outcomes that come after the cancel are late."""
    with closing(Database(on_postgres)) as database:
        await database.write(fill)
        leased = await database.write(lease(COUNT))
        outcomes = [RequestOutcome(each, is_answer=True, record=b"{}") for each in leased]
        with closing(Database(on_postgres)) as second:
            cancelling = asyncio.create_task(
                second.write(partial(cancel_batch, tenant="t", batch_id="b", now_s=1.0))
            )
            settling = [
                database.write(partial(settle, outcomes=some, returns=[], now_s=1.0))
                for some in (outcomes[begin : begin + 50] for begin in range(0, COUNT, 50))
            ]
            lates = await asyncio.gather(*settling)
            cancelled = await cancelling
        assert cancelled.status == "cancelling"
        batch = await database.read(partial(find_batch, tenant="t", batch_id="b"))
        assert batch.completed + sum(map(len, lates)) == COUNT
